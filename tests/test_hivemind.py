"""Two peers that know nothing but a hivemind DHT meet, exchange, lose the bridge, and leave no process of it behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from swarm_peer.identity import Identity

from swarmtrain.create import make_run
from swarmtrain.runfile import parse_run_file

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("hivemind") is None, reason="hivemind is an optional extra and not installed"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left-over processes in /proc"),
]

RUN = """
name = "tiny"
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
total-steps = 50000
warmup-steps = 5
[round]
inner-steps = 100
[admission]
mode = "open"
"""
DEADLINE_S = 240.0


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Looks every now and then whether something has become true of other processes."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.1)


class Started:
    """A process with its log."""

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self.log = folder / f"{name}.log"
        self.out = folder / name
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def says(self, words: str) -> bool:
        text = self.log.read_text(errors="replace")
        assert words in text or self.process.poll() is None, text
        return words in text

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == kind]

    def step(self) -> int:
        progress = self.events("progress")
        return int(progress[-1]["step"]) if progress else 0


@contextmanager
def processes() -> Iterator[list[Started]]:
    started: list[Started] = []
    try:
        yield started
    finally:
        for each in started:
            each.process.terminate()
        for each in started:
            try:
                each.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()


def processes_below(pid: int) -> dict[int, str]:
    """All living descendants of a process, with their command lines."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found[child] = commands[child]
            pending.append(child)
    return found


def bridge_of(node: Started) -> dict[int, str]:
    """The hivemind processes below a node: Python and p2pd."""
    below = processes_below(node.process.pid)
    return {pid: line for pid, line in below.items() if "hivemind_bridge.child" in line or "p2pd" in line}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_peers_that_know_only_a_hivemind_dht_meet_and_lose_it(tmp_path: Path) -> None:
    make_run(parse_run_file(RUN, tmp_path / "tiny.toml"), Identity.generate(), tmp_path / "tiny.run")
    with processes() as started:

        def start(name: str, *arguments: str) -> Started:
            started.append(Started(tmp_path, name, list(arguments)))
            return started[-1]

        dht = start("dht", "-m", "hivemind.hivemind_cli.run_dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0")
        wait_until(lambda: dht.says("/p2p/"), "the hivemind DHT runs")
        multiaddr = next(word for word in dht.log.read_text().split() if "/p2p/" in word)
        meet = ["--dht", "hivemind", "--initial-peers", multiaddr, "--listen", "127.0.0.1:0"]

        def swarmtrain(name: str, *arguments: str) -> Started:
            state = ["--state", str(tmp_path / f"state-{name}")]
            return start(name, "-m", "swarmtrain", *state, *arguments, *meet)

        def join(name: str) -> Started:
            return swarmtrain(name, "join", "--run-id", "tiny", "--out", str(tmp_path / name), "--device", "cpu")

        entry = swarmtrain("entry", "bootstrap", str(tmp_path / "tiny.run"))
        wait_until(lambda: entry.says("is announced in the hivemind DHT"), "the run is announced")
        first = join("first")
        wait_until(lambda: first.says("is announced in the hivemind DHT") and first.step() > 0, "the first peer trains")

        # Without the bootstrap peer, whose entry is still there, the second finds the first.
        os.killpg(entry.process.pid, signal.SIGKILL)
        second = join("second")

        def have_exchanged() -> bool:
            assert second.process.poll() is None, second.log.read_text()
            return all(
                any(event["outcome"] == "mixed" for event in peer.events("exchange")) for peer in (first, second)
            )

        wait_until(have_exchanged, "the two exchange")

        # The hivemind process dies: the node says so once and trains on.
        killed = bridge_of(first)
        assert len(killed) == 2, killed
        os.kill(next(pid for pid, line in killed.items() if "child" in line), signal.SIGKILL)
        wait_until(lambda: first.says("hivemind bridge: down: its process ended"), "the loss of the bridge is said")
        wait_until(lambda: not any(map(is_alive, killed)), "the daemon is gone too", 10)
        before = first.step()
        wait_until(lambda: first.step() > before + 200, "the first peer trains on")
        wait_until(lambda: first.says("hivemind bridge: up again"), "the bridge comes back")
        wait_until(lambda: [e["state"] for e in first.events("hivemind")][-2:] == ["down", "up"], "the state is known")

        # The daemon alone dies: the same.
        daemon = next(pid for pid, line in bridge_of(first).items() if "p2pd" in line)
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: first.says("p2pd ended with status -9"), "the loss of the daemon is noticed")
        wait_until(lambda: len(bridge_of(first)) == 2, "the bridge comes back again")

        # The node is killed, and nothing else: the kernel ends the rest.
        rest = bridge_of(first)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        wait_until(lambda: not any(map(is_alive, rest)), f"none of {rest} survives", 10)

        # The other leaves in order, and its bridge with it.
        rest = bridge_of(second)
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(timeout=60) == 130
        assert "Traceback" not in second.log.read_text()
        wait_until(lambda: not any(map(is_alive, rest)), f"none of {rest} survives", 10)


def test_unreachable_initial_peers_are_one_line(tmp_path: Path) -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWCBxTZXpwDwCFgegPmyBg2APqMgnMvhVicJ7hBy8a947C"
    state = ["--state", str(tmp_path / "state")]
    arguments = ["monitor", "--run-id", "tiny", "--dht", "hivemind", "--initial-peers", nobody, "--once"]
    done = subprocess.run(
        [sys.executable, "-m", "swarmtrain", *state, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "none of the --initial-peers answers" in done.stderr
    assert "Traceback" not in done.stderr
