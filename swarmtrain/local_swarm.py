"""Several peers as processes of their own on one machine: what the demo and the examples run.

Each process is started through the command line that a user types, and watched through the event log that it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.progress import bar

END_DEADLINE_S = 900.0
GOODBYE_S = 10.0
PLAIN_INTERVAL_S = 10.0
POLL_INTERVAL_S = 0.25
MARKER = "local-swarm.json"


@dataclass(slots=True)
class PeerProcess:
    """One `swarmtrain join`, and what its event log has told so far."""

    label: str
    folder: Path
    log: Path
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

    def exchanges(self) -> list[dict[str, Any]]:
        """Returns the exchanges in which this peer has mixed."""
        return [event for event in self.events if event["event"] == "exchange" and event["outcome"] == "mixed"]

    def start_loss(self) -> float:
        """Returns the validation loss before the first step, nats per token."""
        return float(self.last("ready").get("validation_loss", "nan"))

    def end_loss(self) -> float:
        """Returns the validation loss of the peer's own replica after the last step."""
        return float(self.last("finished").get("validation_loss", "nan"))

    def newest_loss(self) -> float:
        """Returns the validation loss that was measured last."""
        newest = self.last("finished") or self.last("evaluated") or self.last("ready")
        return float(newest.get("validation_loss", "nan"))


class LocalSwarm:
    """A context manager: whatever it has started ends with it."""

    def __init__(self, out: Path, console: Console) -> None:
        """Clears what an earlier swarm has left in `out`; refuses any other folder with a UserError."""
        self._out = out
        self._console = console
        self._processes: list[subprocess.Popen[bytes]] = []
        self.bootstrap_process: subprocess.Popen[bytes] | None = None
        try:
            if out.exists() and any(out.iterdir()):
                if not (out / MARKER).exists():
                    raise UserError(
                        f"{out} is not empty and was not made here; choose another --out", ExitCode.BAD_FOLDER
                    )
                shutil.rmtree(out)
            out.mkdir(parents=True, exist_ok=True)
            (out / MARKER).write_text("{}\n")
        except OSError as error:
            raise UserError(f"{out}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None

    def bootstrap(self, runs: Sequence[Path]) -> str:
        """Starts a bootstrap peer that serves `runs`; returns what to give to `--peer`."""
        log = self._out / "bootstrap.log"
        key = str(self._out / "bootstrap.pem")
        arguments = ["bootstrap", *map(str, runs), "--listen", "127.0.0.1:0", "--json", "--identity", key]
        self.bootstrap_process = process = self._start(arguments, log, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            return str(json.loads(process.stdout.readline())["peer"])
        except (ValueError, KeyError):
            raise UserError(f"the bootstrap peer did not start; see {log}") from None

    def join(
        self,
        label: str,
        run: str,
        peer: str,
        *,
        data: Sequence[Path] = (),
        resume: bool = False,
        options: Sequence[str] = (),
    ) -> PeerProcess:
        """Starts a training peer of `run`, one thread of computation on the CPU."""
        folder = self._out / label.replace(" ", "-")
        log = folder.with_suffix(".log")
        arguments = ["join", "--run-id", run, "--peer", peer, "--listen", "127.0.0.1:0", "--out", str(folder)]
        arguments += ["--identity", str(folder.with_suffix(".pem")), "--threads", "1", "--device", "cpu"]
        for path in data:
            arguments += ["--data", str(path)]
        if resume:
            arguments.append("--resume")
        arguments += options
        return PeerProcess(label, folder, log, self._start(arguments, log))

    def watch(self, peers: Sequence[PeerProcess], steps: int) -> None:
        """Shows progress until all have ended.  Raises UserError when one fails or it takes too long."""
        deadline = time.monotonic() + END_DEADLINE_S
        last_plain_s = time.monotonic()
        shows = self._console.is_terminal
        with Live(console=self._console, transient=True) if shows else contextlib.nullcontext() as live:
            while any(peer.process.poll() is None for peer in peers):
                for peer in peers:
                    peer.read_events()
                    if peer.process.poll() not in (None, 0):
                        raise UserError(f"{peer.label} failed; see {peer.log}")
                if live is not None:
                    live.update(Group(*(Text(progress_line(peer, steps), no_wrap=True) for peer in peers)))
                elif time.monotonic() - last_plain_s >= PLAIN_INTERVAL_S:
                    last_plain_s = time.monotonic()
                    line = " | ".join(
                        f"{peer.label}: step {peer.last('progress').get('step', 0)} loss {peer.newest_loss():.3f}"
                        for peer in peers
                    )
                    self._console.print(Text(line), soft_wrap=True)
                if time.monotonic() > deadline:
                    raise UserError(f"not done after {END_DEADLINE_S:.0f} s; see the logs in {self._out}")
                time.sleep(POLL_INTERVAL_S)
        for peer in peers:
            peer.read_events()

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GOODBYE_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, arguments: Sequence[str], log: Path, *, stdout: int | None = None) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "swarmtrain", "--state", str(self._out / "state"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends them in order
            )
        self._processes.append(process)
        return process


def progress_line(peer: PeerProcess, steps: int) -> str:
    """Returns one line of at most 80 columns about a peer."""
    progress = peer.last("progress")
    step = int(progress.get("step", 0))
    state = "done" if peer.process.poll() == 0 else "merging" if peer.last("finished") else f"{step}/{steps}"
    speed = float(progress.get("tokens_per_s") or 0.0)
    return (
        f"{peer.label:<7} {bar(step / steps)} {state:<8} loss {peer.newest_loss():.3f}"
        f"  {speed:5.0f} tok/s  exchanges {len(peer.exchanges())}"
    )


def summary_table(peers: Sequence[PeerProcess], alone: PeerProcess | None, weights: int) -> Table:
    """Returns the table of what came of it.  `weights` is the size of the model.

    "vs FP32" compares all bytes that a peer has sent with what its exchanges would have taken as dense FP32.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("", "start", "end", "tokens", "exchanges", "MB sent", "vs FP32", "time lost"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for peer in peers:
        sent = int(peer.last("left").get("bytes_sent", 0))
        dense = 4 * weights * len(peer.exchanges())
        traffic = (str(len(peer.exchanges())), f"{sent / 1e6:.1f}", f"{sent / dense:.0%}" if dense else "-")
        table.add_row(*_losses_and_tokens(peer), *traffic, time_lost(peer))
    table.add_row("merged", "", f"{float(peers[0].last('merged')['validation_loss']):.3f}")
    if alone is not None:
        table.add_row(*_losses_and_tokens(alone), "-", "-", "-", "-")
    return table


def time_lost(peer: PeerProcess) -> str:
    """Returns the share of the trainer's time that went into closing rounds and mixing, as measured by it."""
    progress = peer.last("progress")
    spent = progress["exchange_s"] + progress["train_s"]
    return f"{progress['exchange_s'] / spent:.1%}" if spent else "-"


def _losses_and_tokens(peer: PeerProcess) -> tuple[str, str, str, str]:
    tokens = int(peer.last("progress")["tokens_total"])
    return peer.label, f"{peer.start_loss():.3f}", f"{peer.end_loss():.3f}", f"{tokens:,}"
