"""A state folder that was copied to another machine, key and all: real processes on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_end_to_end import has_ended, step_of, swarm_of, wait_until

from swarmtrain.local_swarm import PeerProcess

pytestmark = pytest.mark.processes


@contextmanager
def join_with_state(state: Path, entry: str) -> Iterator[PeerProcess]:
    """A `swarmtrain join` as a user types it: the key is whichever the state folder holds."""
    folder, log = state.with_suffix(".out"), state.with_suffix(".log")
    command = [sys.executable, "-m", "swarmtrain", "--state", str(state), "join", "--run-id", "tiny", "--peer", entry]
    command += ["--listen", "127.0.0.1:0", "--out", str(folder), "--threads", "1", "--device", "cpu"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield PeerProcess(state.name, folder, log, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lines_of(peer: PeerProcess, words: str) -> list[str]:
    return [line for line in peer.log.read_text().splitlines() if words in line]


def test_both_owners_of_a_copied_state_folder_are_told_once_which_file_it_is(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    with swarm_of(tmp_path, steps=100_000, inner=20) as (_, entry), join_with_state(original, entry) as first:
        wait_until(lambda: step_of(first) > 0, "the first trains")
        shutil.copytree(original, copy)
        with join_with_state(copy, entry) as second:
            pair = ((first, original), (second, copy))

            def both_are_told() -> bool:
                assert not any(has_ended(peer) for peer, _ in pair)
                return all(lines_of(peer, "runs twice") for peer, _ in pair)

            wait_until(both_are_told, "both are told")
            steps = [step_of(peer) for peer, _ in pair]
            wait_until(lambda: all(step_of(peer) > step for (peer, _), step in zip(pair, steps, strict=True)), "go on")
            for peer, state in pair:
                (line,) = lines_of(peer, "runs twice")
                assert str(state / "identity.pem") in line
                assert "Traceback" not in peer.log.read_text()
                peer.read_events()
                assert [event["event"] for event in peer.events].count("duplicate-identity") == 1
