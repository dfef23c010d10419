"""`swarmtrain demo`: the whole product on one machine, as a user would run it, and what came of it.

One bootstrap peer and three training peers are started as processes of their own, through the same commands that a
user types; a fourth process trains alone, in a run of its own, on as many tokens as one of the peers.  The text is
what ships with Python.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from swarm_peer.identity import Identity

from swarmtrain.create import make_run
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.manifest import SignedManifest
from swarmtrain.options import DemoOptions
from swarmtrain.progress import bar
from swarmtrain.runfile import parse_run_file

MARKER = "demo.json"
DEFAULT_STEPS = 400
QUICK_STEPS = 40
START_DEADLINE_S = 60.0
END_DEADLINE_S = 900.0
PLAIN_INTERVAL_S = 10.0
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
"""


@dataclass(slots=True)
class PeerProcess:
    """One `swarmtrain join` and what its event log has told so far."""

    label: str
    folder: Path
    process: subprocess.Popen[bytes]
    events: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0

    def read_events(self) -> None:
        """Takes in what the event log has gained."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self.events += [json.loads(line) for line in whole.splitlines()]

    def last(self, event: str) -> dict[str, Any]:
        """Returns the newest event of a kind, empty if there is none."""
        return next((found for found in reversed(self.events) if found["event"] == event), {})

    def first_loss(self) -> float:
        return float(self.last("ready").get("validation_loss", "nan"))

    def final_loss(self) -> float:
        return float(self.last("finished").get("validation_loss", "nan"))

    def exchanges(self) -> list[dict[str, Any]]:
        """Returns the exchanges in which this peer has mixed."""
        return [event for event in self.events if event["event"] == "exchange" and event["outcome"] == "mixed"]


def run_demo(options: DemoOptions) -> int:
    """Runs the demo.  Returns 0; raises UserError with one line when a part of it failed."""
    console = Console(stderr=True, highlight=False)
    steps = options.steps or (QUICK_STEPS if options.quick else DEFAULT_STEPS)
    out = options.out
    _prepare_folder(out)
    console.print(
        Text(
            f"One bootstrap peer and {options.peers} training peers, each a process of its own, talk TLS over\n"
            "loopback.  "
            f"They train one byte-level transformer on the text that ships with Python, {steps} steps each;\n"
            f"another process trains alone on as many tokens as one peer.  Everything goes to {out}/"
        )
    )
    identity = Identity.load_or_create(out / "creator.pem")
    together = _make_run(out, "demo", steps, identity)
    alone = _make_run(out, "demo-alone", steps, identity)
    started_s = time.monotonic()
    with _processes() as start:
        address = _start_bootstrap(start, out, options)
        peers = [
            _start_peer(start, f"peer {number}", out / f"peer-{number}", together, address, out)
            for number in range(1, options.peers + 1)
        ]
        lone = _start_peer(start, "alone", out / "alone", alone, address, out)
        _watch([*peers, lone], steps, console)
    report(peers, lone, out, console, time.monotonic() - started_s)
    return int(ExitCode.OK)


# ------------------------------------------------------------------------------------------------------------ processes


class _Start:
    """Starts processes that end with the demo."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []

    def __call__(self, arguments: Sequence[str], log: Path, *, stdout: int | None = None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "swarmtrain", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout if stdout is not None else file,
                stderr=file,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends them in order
            )
        self.running.append(process)
        return process


@contextmanager
def _processes() -> Iterator[_Start]:
    start = _Start()
    try:
        yield start
    finally:
        for process in start.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        for process in start.running:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _start_bootstrap(start: _Start, out: Path, options: DemoOptions) -> str:
    process = start(
        ["bootstrap", str(out / "demo.run"), str(out / "demo-alone.run"), "--listen", "127.0.0.1:0", "--json",
         "--identity", str(out / "bootstrap.pem")],
        out / "bootstrap.log",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        return str(json.loads(line)["peer"])
    except (ValueError, KeyError):
        raise UserError(f"the bootstrap peer did not start; see {out / 'bootstrap.log'}") from None


def _start_peer(start: _Start, label: str, folder: Path, run: SignedManifest, address: str, out: Path) -> PeerProcess:
    process = start(
        ["join", "--run-id", run.manifest.name, "--peer", address, "--listen", "127.0.0.1:0",
         "--out", str(folder), "--identity", str(out / f"{folder.name}.pem"), "--threads", "1", "--device", "cpu"],
        out / f"{folder.name}.log",
    )  # fmt: skip
    return PeerProcess(label, folder, process)


def _watch(peers: Sequence[PeerProcess], steps: int, console: Console) -> None:
    """Shows progress until all have ended.  Raises UserError when one fails or nothing moves any more."""
    deadline = time.monotonic() + END_DEADLINE_S
    last_plain_s = time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else _NoLive() as live:
        while any(peer.process.poll() is None for peer in peers):
            for peer in peers:
                peer.read_events()
                if peer.process.poll() not in (None, 0):
                    raise UserError(f"{peer.label} failed; see {peer.folder.parent / peer.folder.name}.log")
            lines = [_progress_line(peer, steps) for peer in peers]
            live.update(Group(*(Text(line, no_wrap=True) for line in lines)))
            if not console.is_terminal and time.monotonic() - last_plain_s >= PLAIN_INTERVAL_S:
                last_plain_s = time.monotonic()
                console.print(Text(" | ".join(_short_line(peer) for peer in peers)), soft_wrap=True)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the demo took more than {END_DEADLINE_S:.0f} s; see the logs in {peers[0].folder.parent}"
                )
            time.sleep(0.25)
    for peer in peers:
        peer.read_events()


class _NoLive:
    """Stands in for rich's live display where there is no terminal."""

    def __enter__(self) -> _NoLive:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to restore."""

    def update(self, renderable: object) -> None:
        """Nothing to draw on."""


def _progress_line(peer: PeerProcess, steps: int) -> str:
    progress, evaluated = peer.last("progress"), peer.last("evaluated") or peer.last("ready")
    step = int(progress.get("step", 0))
    loss = evaluated.get("validation_loss")
    state = "done" if peer.process.poll() == 0 else "merging" if peer.last("finished") else f"{step}/{steps}"
    shown = "-" if loss is None else f"{loss:.3f}"
    return (
        f"{peer.label:<8} {bar(step / steps)} {state:<8} validation loss {shown}"
        f"  {progress.get('tokens_per_s', 0):6.0f} tokens/s  exchanges {len(peer.exchanges())}"
    )


def _short_line(peer: PeerProcess) -> str:
    evaluated = peer.last("evaluated") or peer.last("ready")
    loss = evaluated.get("validation_loss")
    return f"{peer.label}: step {peer.last('progress').get('step', 0)} loss {'-' if loss is None else f'{loss:.3f}'}"


# --------------------------------------------------------------------------------------------------------------- report


def report(peers: Sequence[PeerProcess], lone: PeerProcess, out: Path, console: Console, seconds: float) -> None:
    """Prints the table, a sample and where the model lies, on stdout."""
    from swarmtrain.pretrained import load_export

    model_folder = peers[0].folder / "model"
    merged = peers[0].last("merged")
    state, config = load_export(model_folder)
    weights = sum(array.size for array in state.values())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "start", "end", "tokens", "exchanges", "MB sent", "vs dense FP32", "time lost"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for peer in peers:
        progress, left = peer.last("progress"), peer.last("left")
        dense_bytes = 4 * weights * len(peer.exchanges())
        sent = int(left.get("bytes_sent", 0))
        table.add_row(
            peer.label,
            f"{peer.first_loss():.3f}",
            f"{peer.final_loss():.3f}",
            f"{progress['tokens_total']:,}",
            str(len(peer.exchanges())),
            f"{sent / 1e6:.1f}",
            f"{sent / dense_bytes:.0%}" if dense_bytes else "-",
            f"{progress['exchange_s'] / (progress['exchange_s'] + progress['train_s']):.1%}",
        )
    table.add_row("merged", "", f"{merged['validation_loss']:.3f}", "", "", "", "", "")
    progress = lone.last("progress")
    table.add_row(
        "alone",
        f"{lone.first_loss():.3f}",
        f"{lone.final_loss():.3f}",
        f"{progress['tokens_total']:,}",
        "-",
        "-",
        "-",
        "-",
    )
    printer = Console(highlight=False, width=80 if not sys.stdout.isatty() else None)
    printer.print(Text("Validation loss (nats per byte), traffic and time:"))
    printer.print(table)
    gain = lone.final_loss() - merged["validation_loss"]
    printer.print(
        Text(
            f"Merged model {'beats' if gain > 0 else 'does not beat'} the lone peer by {gain:+.3f}; "
            f"spread of the replicas {merged['spread']:.2%}; {seconds:.0f} s in all."
        )
    )
    printer.print(Text(f"Sample: {_sample(state, config)}"), soft_wrap=True)
    printer.print(Text(f"Model:  {model_folder}"), soft_wrap=True)


def _sample(state: dict[str, Any], config: Any) -> str:  # noqa: ANN401  # torch-side types, imported late
    import torch

    from swarmtrain.model import LanguageModel, load_weights
    from swarmtrain.sampling import SamplingConfig, printable_line, sample
    from swarmtrain.tokenizer import ByteTokenizer

    model = LanguageModel(config)
    load_weights(model, {name: torch.from_numpy(array) for name, array in state.items()})
    text = sample(model, ByteTokenizer(), PROMPT, SamplingConfig(max_tokens=100, temperature=0.7, seed=1))
    return printable_line(PROMPT + text)


# ---------------------------------------------------------------------------------------------------------- preparation


def _prepare_folder(out: Path) -> None:
    """Clears what an earlier demo has left; refuses any other folder."""
    try:
        if out.exists() and any(out.iterdir()):
            if not (out / MARKER).exists():
                raise UserError(f"{out} is not empty and no demo's folder; choose another --out", ExitCode.BAD_FOLDER)
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).write_text("{}\n")
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None


def _make_run(out: Path, name: str, steps: int, identity: Identity) -> SignedManifest:
    text = RUN_FILE.format(name=name, steps=steps, warmup=max(1, steps // 20), inner=max(2, steps // 20))
    return make_run(parse_run_file(text, out / f"{name}.toml"), identity, out / f"{name}.run")
