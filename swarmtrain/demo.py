"""`swarmtrain demo`: the whole product on one machine, as a user would run it, and what came of it.

One bootstrap peer and three training peers train one small byte-level transformer on the text that ships with Python;
a fourth process trains alone, in a run of its own, on as many tokens as one of the peers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from swarm_peer.identity import Identity

from swarmtrain.create import make_run
from swarmtrain.errors import ExitCode
from swarmtrain.local_swarm import LocalSwarm, PeerProcess, summary_table
from swarmtrain.options import DemoOptions
from swarmtrain.runfile import parse_run_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from swarmtrain.model_config import ModelConfig

DEFAULT_STEPS = 450
QUICK_STEPS = 40
ROUNDS = 40
PROMPT = b"The import statement "

RUN_FILE = """
name = "{name}"
[model]
vocab-size = 256
hidden-size = 128
intermediate-size = 352
num-layers = 2
num-heads = 4
num-kv-heads = 2
context-length = 128
[data]
kind = "python"
[optimizer]
learning-rate = 3e-3
warmup-steps = {warmup}
batch-size = 8
total-steps = {steps}
[round]
inner-steps = {inner}
[admission]
mode = "open"
"""


def run_demo(options: DemoOptions) -> int:
    """Runs the demo.  Returns 0; raises UserError with one line when a part of it failed."""
    console = Console(stderr=True, highlight=False)
    out = options.out
    steps = options.steps or (QUICK_STEPS if options.quick else DEFAULT_STEPS)
    started_s = time.monotonic()
    with LocalSwarm(out, console) as swarm:
        _introduce(console, options, steps)
        runs = [_make_run(out, name, steps) for name in ("demo", "demo-alone")]
        entry = swarm.bootstrap(runs)
        peers = [swarm.join(f"peer {number}", "demo", entry) for number in range(1, options.peers + 1)]
        alone = swarm.join("alone", "demo-alone", entry)
        swarm.watch([*peers, alone], steps)
    _report(peers, alone, time.monotonic() - started_s)
    return int(ExitCode.OK)


def _introduce(console: Console, options: DemoOptions, steps: int) -> None:
    console.print(
        Text(
            f"One bootstrap peer and {options.peers} training peers, each a process of its own, talk TLS over\n"
            f"loopback. They train one byte-level transformer for {steps} steps each, on the text that\n"
            "ships with Python. Another process trains alone on as many tokens as one peer.\n"
            f"Logs, checkpoints and the merged model go to {options.out}/"
        ),
        soft_wrap=True,
    )


def _make_run(out: Path, name: str, steps: int) -> Path:
    text = RUN_FILE.format(name=name, steps=steps, warmup=max(1, steps // 20), inner=max(5, steps // ROUNDS))
    path = out / f"{name}.run"
    make_run(parse_run_file(text, out / f"{name}.toml"), Identity.load_or_create(out / "creator.pem"), path)
    return path


def _report(peers: Sequence[PeerProcess], alone: PeerProcess, seconds: float) -> None:
    """Prints the table, a sample and where the model lies, on stdout."""
    from swarmtrain.pretrained import load_export

    folder = peers[0].folder / "model"
    state, config = load_export(folder)
    merged = peers[0].last("merged")
    gain = alone.end_loss() - float(merged["validation_loss"])
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    console.print(Text("Validation loss (nats per byte), traffic, training time lost to the network:"))
    console.print(summary_table(peers, alone, sum(array.size for array in state.values())))
    verdict = f"beats the lone peer by {gain:.3f}" if gain > 0 else f"is worse than the lone peer by {-gain:.3f}"
    console.print(
        Text(
            f"The merged model {verdict}. Spread of the replicas {float(merged['spread']):.2%}. {seconds:.0f} s in all."
        ),
        soft_wrap=True,
    )
    print(f"Sample: {_sample(state, config)}")
    print(f"Model:  {folder}")


def _sample(state: dict[str, NDArray[np.float32]], config: ModelConfig) -> str:
    import torch

    from swarmtrain.model import LanguageModel, load_weights
    from swarmtrain.sampling import SamplingConfig, printable_line, sample
    from swarmtrain.tokenizer import ByteTokenizer

    model = LanguageModel(config)
    load_weights(model, {name: torch.from_numpy(array) for name, array in state.items()})
    text = sample(model, ByteTokenizer(), PROMPT, SamplingConfig(max_tokens=100, temperature=0.7, seed=1))
    return printable_line(PROMPT + text)
