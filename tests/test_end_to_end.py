"""Real processes on loopback, started through the command line, killed and interrupted as users and networks do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from swarm_peer.identity import Identity

from swarmtrain.create import make_run
from swarmtrain.local_swarm import LocalSwarm, PeerProcess
from swarmtrain.pretrained import load_export
from swarmtrain.runfile import parse_run_file

pytestmark = pytest.mark.processes

RUN = """
name = "{name}"
[model]
hidden-size = 32
intermediate-size = 64
num-layers = 1
num-heads = 2
num-kv-heads = 2
context-length = 64
[optimizer]
learning-rate = 3e-3
batch-size = 4
total-steps = {steps}
warmup-steps = 5
[round]
inner-steps = {inner}
[admission]
mode = "open"
"""
DEADLINE_S = 300.0


@contextmanager
def swarm_of(folder: Path, *, steps: int, inner: int) -> Iterator[tuple[LocalSwarm, str]]:
    """A local swarm with its bootstrap peer running; gives the address for `--peer` too."""
    out = folder / "swarm"
    with LocalSwarm(out, Console(stderr=True)) as swarm:
        path = out / "tiny.run"
        text = RUN.format(name="tiny", steps=steps, inner=inner)
        make_run(parse_run_file(text, out / "tiny.toml"), Identity.generate(), path)
        yield swarm, swarm.bootstrap([path])


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Looks every now and then whether something has become true of other processes."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.1)


def step_of(peer: PeerProcess) -> int:
    peer.read_events()
    return int(peer.last("progress").get("step", 0))


def last_evaluated(peer: PeerProcess) -> int:
    peer.read_events()
    return int(peer.last("evaluated").get("step", 0))


def loss_at(step: int, peer: PeerProcess) -> float:
    """The validation loss between two measurements, on the straight line: early in a run it falls too fast to take
    the nearest."""
    measured = [event for event in peer.events if event["event"] in {"ready", "evaluated"}]
    steps = [event["step"] for event in measured]
    return float(np.interp(step, steps, [event["validation_loss"] for event in measured]))


def has_ended(peer: PeerProcess) -> bool:
    return peer.process.poll() is not None


def command(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmtrain", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )


def test_join_late_kill_two_and_the_bootstrap_and_the_rest_finish(tmp_path: Path) -> None:
    with swarm_of(tmp_path, steps=5000, inner=30) as (swarm, entry):
        peers = [swarm.join(f"peer {number}", "tiny", entry) for number in range(1, 4)]
        wait_until(lambda: all(step_of(peer) > 800 for peer in peers), "three peers train")

        # A fourth joins half-way: it starts where its donor is, in weights and in the schedule.
        late = swarm.join("late", "tiny", entry)
        wait_until(lambda: step_of(late) > 0, "the late peer trains")
        ready = late.last("ready")
        assert ready["step"] > 600
        wait_until(lambda: all(last_evaluated(peer) >= ready["step"] for peer in peers), "all are measured beyond it")
        swarm_loss = max(loss_at(ready["step"], peer) for peer in peers)
        assert ready["validation_loss"] <= swarm_loss + 0.05

        # The monitor and the export see the swarm from outside.
        shown = command("monitor", "--run-id", "tiny", "--peer", entry, "--once", "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["counts"]["training"] == 4
        taken = command("export", "--run-id", "tiny", "--peer", entry, "--out", str(tmp_path / "taken"))
        assert taken.returncode == 0, taken.stderr
        load_export(tmp_path / "taken")

        # Two peers and the bootstrap peer die without a word, in the middle of training.
        assert not any(has_ended(peer) or peer.last("finished") for peer in [*peers, late])
        for victim in (peers[0].process, peers[1].process, swarm.bootstrap_process):
            assert victim is not None
            os.killpg(victim.pid, signal.SIGKILL)
        rest = [peers[2], late]
        wait_until(lambda: all(has_ended(peer) for peer in rest), "the others finish")
        for peer in rest:
            peer.read_events()
            assert peer.process.returncode == 0, peer.log.read_text()
            assert peer.last("merged")["replicas"] == 2
            assert peer.end_loss() < swarm_loss
        after = rest[0].exchanges()[-1]
        assert after["partner"] != ""


def test_ctrl_c_saves_and_resume_goes_on_there(tmp_path: Path) -> None:
    with swarm_of(tmp_path, steps=4000, inner=40) as (swarm, entry):
        stays = swarm.join("stays", "tiny", entry)
        leaves = swarm.join("leaves", "tiny", entry)
        wait_until(lambda: step_of(leaves) > 100 and step_of(stays) > 100, "both train")
        leaves.process.send_signal(signal.SIGINT)
        wait_until(lambda: has_ended(leaves), "the interrupted peer leaves")
        assert leaves.process.returncode == 130
        assert "Traceback" not in leaves.log.read_text()
        leaves.read_events()
        saved = int(leaves.last("saved")["step"])
        wait_until(lambda: states_of(entry)["left"] == 1, "its goodbye is known")

        refused = swarm.join("leaves", "tiny", entry)
        wait_until(lambda: has_ended(refused), "a second start without --resume ends")
        assert refused.process.returncode == 7
        assert "--resume" in refused.log.read_text()

        # The bootstrap peer is gone for good: the way back is by the peers that were saved.
        assert swarm.bootstrap_process is not None
        os.killpg(swarm.bootstrap_process.pid, signal.SIGKILL)
        again = swarm.join("leaves", "tiny", entry, resume=True)
        wait_until(lambda: step_of(again) > saved, "the resumed peer trains")
        assert again.last("ready")["step"] >= saved
        assert again.last("ready")["resumed_from"]
        wait_until(lambda: bool(again.last("exchange")), "the resumed peer exchanges")

        # Nobody at all is there: it goes on alone, and says so.
        os.killpg(stays.process.pid, signal.SIGKILL)
        again.process.send_signal(signal.SIGINT)
        wait_until(lambda: has_ended(again), "the interrupted peer leaves again")
        again.read_events()
        saved = int(again.last("saved")["step"])
        alone = swarm.join("leaves", "tiny", entry, resume=True)
        wait_until(lambda: step_of(alone) > saved, "the peer trains alone")
        assert "training goes on alone" in alone.log.read_text()


def states_of(entry: str) -> dict[str, int]:
    shown = command("monitor", "--run-id", "tiny", "--peer", entry, "--once", "--json")
    assert shown.returncode == 0, shown.stderr
    counts: dict[str, int] = json.loads(shown.stdout)["counts"]
    return counts


def test_bad_input_gets_one_line_and_its_exit_code(tmp_path: Path) -> None:
    with swarm_of(tmp_path, steps=100, inner=10) as (_, entry):
        identity, _, address = entry.partition("@")
        port = address.rpartition(":")[2]
        state = ["--state", str(tmp_path / "state")]
        join = [*state, "join", "--out", str(tmp_path / "out"), "--listen", "127.0.0.1:0"]
        cases = [
            (["--run-id", "nosuch", "--peer", entry], 4, "runs that exist: tiny@"),
            (["--run-id", "tiny", "--peer", "127.0.0.1:1"], 3, "127.0.0.1:1"),
            (["--run-id", "tiny", "--peer", "no-such-host.invalid:1"], 3, "no-such-host.invalid:1"),
            (["--run-id", "tiny", "--peer", f"{'00' * 32}@{address}"], 3, identity[:8]),
            (["--run-id", "tiny", "--peer", entry, "--data", str(tmp_path)], 2, "--data"),
            (["--run-id", "Tiny!", "--peer", entry], 2, "Tiny!"),
            (["swarm://nonsense"], 2, "invite link"),
        ]
        for arguments, code, words in cases:
            done = command(*join, *arguments)
            assert done.returncode == code, (arguments, done.stderr)
            assert words in done.stderr, (arguments, done.stderr)
            assert "Traceback" not in done.stderr
        busy = command(*state, "bootstrap", "--listen", f"127.0.0.1:{port}")
        assert busy.returncode == 8
        assert f"port {port}" in busy.stderr

        # A folder that holds something else is refused, and stays as it is.
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious.txt").write_text("mine")
        done = command(*join, "--run-id", "tiny", "--peer", entry)
        assert done.returncode == 7
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]

        # One address that fails is said, and the next one is tried.
        shown = command("monitor", "--run-id", "tiny", "--peer", "127.0.0.1:1", "--peer", entry, "--once")
        assert shown.returncode == 0, shown.stderr
        assert "127.0.0.1:1" in shown.stderr
