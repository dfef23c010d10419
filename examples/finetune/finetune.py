"""Three peers fine-tune one model together, on another text than it was trained on.

    python examples/finetune/finetune.py --model swarmtrain-demo/peer-1/model

The text is the name of every character in Unicode, which ships with Python: one line a character, as
"U+00E9 LATIN SMALL LETTER E WITH ACUTE".  Each peer has every third line; some lines are held out for validation.
Everything is done through the commands that you would type: create, bootstrap, join.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.local_swarm import LocalSwarm, PeerProcess, summary_table
from swarmtrain.pretrained import load_export

PEERS = 3
VALIDATION_BYTES = 30_000
# Ideographs have no names of their own, only numbers: nothing to learn.
SKIPPED = ("CJK UNIFIED", "CJK COMPATIBILITY", "HANGUL SYLLABLE", "TANGUT", "NUSHU", "KHITAN", "EGYPTIAN", "ANATOLIAN")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("swarmtrain-demo/peer-1/model"),
    show_default=True,
    help="The model to start from: any folder that `swarmtrain export` or the demo wrote.",
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("swarmtrain-finetune"), show_default=True)
@click.option("--steps", type=click.IntRange(min=4), default=120, show_default=True, help="Inner steps of each peer.")
def main(model: Path, out: Path, steps: int) -> None:
    """Fine-tune MODEL with three peers on this machine."""
    started_s = time.monotonic()
    try:
        with LocalSwarm(out, Console(stderr=True, highlight=False)) as swarm:
            texts = write_texts(out)
            run = create_run(model, out, steps)
            entry = swarm.bootstrap([run])
            peers = [swarm.join(f"peer {n}", "finetune", entry, data=[texts[n - 1]]) for n in range(1, PEERS + 1)]
            swarm.watch(peers, steps)
        report(peers, time.monotonic() - started_s)
    except UserError as error:
        print(f"finetune: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)


def write_texts(out: Path) -> list[Path]:
    """Writes the validation text and each peer's own text; returns the latter's paths."""
    names = [
        f"U+{point:04X} {name}\n"
        for point in range(sys.maxunicode + 1)
        if (name := unicodedata.name(chr(point), "")) and not name.startswith(SKIPPED)
    ]
    held_out = [line for number, line in enumerate(names) if number % 16 == 0]
    (out / "validation.txt").write_text("".join(held_out)[:VALIDATION_BYTES])
    rest = [line for number, line in enumerate(names) if number % 16]
    paths = [out / f"text-{number}.txt" for number in range(1, PEERS + 1)]
    for number, path in enumerate(paths):
        path.write_text("".join(rest[number::PEERS]))
    return paths


def create_run(model: Path, out: Path, steps: int) -> Path:
    """Puts run.toml beside the model and signs it; returns the signed run."""
    text = Path(__file__).with_name("run.toml").read_text()
    (out / "run.toml").write_text(re.sub(r"total-steps = \d+", f"total-steps = {steps}", text))
    shutil.copytree(model, out / "model")
    arguments = ["--state", str(out / "state"), "create", str(out / "run.toml"), "--out", str(out), "--json"]
    done = subprocess.run([sys.executable, "-m", "swarmtrain", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().removeprefix("swarmtrain: ")
        raise UserError(message, ExitCode(done.returncode))
    return out / "finetune.run"


def report(peers: list[PeerProcess], seconds: float) -> None:
    """Prints the table, how the weights travelled, and where the model lies."""
    folder = peers[0].folder / "model"
    state, _ = load_export(folder)
    weights = sum(array.size for array in state.values())
    exchanges = [exchange for peer in peers for exchange in peer.exchanges()]
    patches = sum(bool(exchange["patch"]) for exchange in exchanges)
    sent = sum(exchange["payload_bytes_sent"] for exchange in exchanges)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    console.print(summary_table(peers, None, weights))
    per_weight = sent / (len(exchanges) * weights) if exchanges else 0.0
    console.print(
        Text(
            f"{patches} of {len(exchanges)} snapshots arrived as patches; {per_weight:.2f} bytes per weight and "
            f"exchange on average. {seconds:.0f} s in all."
        ),
        soft_wrap=True,
    )
    console.print(Text(f"Model: {folder}"), soft_wrap=True)


if __name__ == "__main__":
    main()
