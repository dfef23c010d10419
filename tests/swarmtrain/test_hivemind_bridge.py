"""The bridge against a real process that speaks its protocol; hivemind itself is in tests/test_hivemind.py."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from swarm_peer.identity import Identity
from swarm_peer.records import RunPayload

from swarmtrain.errors import UserError
from swarmtrain.hivemind_bridge.bridge import Bridge, BridgeDown, BridgeTimes
from swarmtrain.hivemind_bridge.entries import keys_of
from swarmtrain.hivemind_bridge.rendezvous import Rendezvous, RendezvousTimes, open_rendezvous
from swarmtrain.hivemind_bridge.sockets import socket_folder
from swarmtrain.naming import RunReference
from swarmtrain.node import Node, NodeConfig, open_node

pytestmark = pytest.mark.processes

STAND_IN = Path(__file__).with_name("hivemind_stand_in.py")
QUICK = BridgeTimes(open_s=60.0, request_s=60.0, probe_every_s=0.1, retry_s=(0.05, 0.2), stable_s=60.0)
KEY, AUTHOR = b"k" * 32, b"a" * 32


def command(folder: Path) -> list[str]:
    return [sys.executable, str(STAND_IN), str(folder)]


@asynccontextmanager
async def bridge_to(folder: Path, times: BridgeTimes = QUICK) -> AsyncIterator[tuple[Bridge, list[str]]]:
    said: list[str] = []
    bridge = Bridge(["/x"], say=said.append, rng=random.Random(0), command=command(folder), times=times)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.run)
        yield bridge, said
        nursery.cancel_scope.cancel()


def lives(folder: Path) -> list[list[int]]:
    """Process ids of child and helper, life by life."""
    path = folder / "lives"
    return [list(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not holds():  # noqa: ASYNC110  # other processes and files
            await trio.sleep(0.02)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(120):
            await test()

    trio.run(bounded)


def test_it_stores_finds_and_leaves_no_process_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with bridge_to(tmp_path) as (bridge, said):
            assert bridge.state == "starting"
            with pytest.raises(BridgeDown):
                await bridge.get(KEY)
            assert await bridge.settled()
            assert await bridge.get(KEY) == ()
            assert await bridge.put(KEY, AUTHOR, b"value", 60.0)
            assert await bridge.put(KEY, b"b" * 32, b"other", 60.0)
            assert await bridge.get(KEY) == (b"value", b"other")
            assert await bridge.probe() == 1
            assert said == []
        await until(lambda: all(is_gone(pid) for life in lives(tmp_path) for pid in life))

    run(test)


def test_a_killed_child_is_said_once_and_comes_back_without_its_helper(tmp_path: Path) -> None:
    async def test() -> None:
        async with bridge_to(tmp_path) as (bridge, said):
            await bridge.settled()
            pid = bridge.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: bridge.state == "down")
            await bridge.wait_until_up()
            assert await bridge.put(KEY, AUTHOR, b"value", 60.0)
            assert [line.split(";")[0] for line in said] == [
                "hivemind bridge: down: its process ended",
                "hivemind bridge: up again",
            ]
            first, second = lives(tmp_path)
            await until(lambda: all(map(is_gone, first)))
            assert not any(map(is_gone, second))

    run(test)


def test_a_child_that_does_not_answer_is_replaced_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async def test() -> None:
        times = BridgeTimes(open_s=60.0, request_s=0.3, probe_every_s=60.0, retry_s=(0.05, 0.2))
        async with bridge_to(tmp_path, times) as (bridge, _):
            await bridge.settled()
            (tmp_path / "mute").touch()
            outcomes: list[str] = []

            async def ask() -> None:
                with pytest.raises(BridgeDown) as caught:
                    await bridge.get(KEY)
                outcomes.append(str(caught.value))

            async with trio.open_nursery() as nursery:
                for _ in range(3):  # one waits for the answer, the others for their turn
                    nursery.start_soon(ask)
            assert "did not answer" in outcomes[0]
            assert len(outcomes) == 3
            (tmp_path / "mute").unlink()
            # A life that began mute is never opened; it ends after `open_s` or here by our hand.
            await until(lambda: bridge.pid is not None and bridge.lives == 2)
            assert bridge.pid is not None
            os.kill(bridge.pid, signal.SIGKILL)
            await bridge.wait_until_up()

    run(test)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("garbage", "broke the protocol"), ("refuse", "nobody answers"), ("lonely", "none of its peers is there")],
)
def test_a_bad_child_is_ended_and_tried_again_with_one_line_said(tmp_path: Path, mode: str, reason: str) -> None:
    async def test() -> None:
        (tmp_path / mode).touch()
        async with bridge_to(tmp_path) as (bridge, said):
            await until(lambda: reason in bridge.reason)
            await until(lambda: bridge.lives >= 3)
            (tmp_path / mode).unlink()
            await bridge.wait_until_up()
            if mode == "lonely":  # it does come up in between
                assert said[:2] == [said[0], "hivemind bridge: up again"]
            else:
                assert len(said) == 2
            assert reason in said[0]
        await until(lambda: all(is_gone(pid) for life in lives(tmp_path) for pid in life))

    run(test)


def test_a_command_that_cannot_be_started_is_a_bridge_that_is_down(tmp_path: Path) -> None:
    async def test() -> None:
        said: list[str] = []
        bridge = Bridge(["/x"], say=said.append, rng=random.Random(0), command=[str(tmp_path / "nothing")], times=QUICK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.run)
            assert not await bridge.settled()
            assert "cannot start the process" in said[0]
            nursery.cancel_scope.cancel()

    run(test)


def test_the_real_child_says_why_it_cannot_open(tmp_path: Path) -> None:
    async def test() -> None:
        said: list[str] = []
        # Without hivemind it is the import that fails, with it the address.
        bridge = Bridge(["/nowhere"], say=said.append, rng=random.Random(0), times=QUICK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.run)
            assert not await bridge.settled()
            assert bridge.reason not in ("", "its process ended")
            assert bridge.reason in said[0]
            nursery.cancel_scope.cancel()

    run(test)


def test_socket_folders_of_dead_nodes_are_swept_and_those_of_live_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "swarmtrain-hivemind-old"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    (abandoned / "p2pd.sock").touch()
    with socket_folder() as first, socket_folder() as second:
        assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
        assert first.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ rendezvous

RUN = RunPayload(b"r" * 32, "tiny", b"c" * 32, b"m" * 32, ())
LOCAL = NodeConfig(listen="127.0.0.1:0")


@asynccontextmanager
async def peer(folder: Path, seed: int) -> AsyncIterator[tuple[Node, Rendezvous]]:
    async with (
        open_node(Identity.from_seed(bytes([seed]) * 32), LOCAL) as node,
        open_rendezvous(
            node,
            ["/x"],
            lambda line: None,
            command=command(folder),
            bridge_times=QUICK,
            times=RendezvousTimes(announce_every_s=0.5, look_every_s=0.2, patience_s=0.1),
        ) as rendezvous,
    ):
        assert rendezvous is not None
        yield node, rendezvous


def test_two_nodes_that_share_nothing_but_the_dht_meet_over_their_own_connections(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, 1) as (node, rendezvous), peer(tmp_path, 2) as (other, others):
            with pytest.raises(UserError, match="nobody in this hivemind DHT") as caught:
                await others.enter(RunReference("tiny"), lambda line: None)
            assert caught.value.exit_code == 4
            run_here = RunPayload(RUN.run_id, RUN.name, RUN.creator, RUN.manifest_blob, node.addresses)
            rendezvous.announce(run_here)
            # The third key of three is written last.
            await until(lambda: bool(list((tmp_path / keys_of(run_here)[2].hex()).glob("*"))))
            said: list[str] = []
            await others.enter(RunReference("tiny"), said.append)
            assert "1 peers announce run tiny, 1 of those tried answer" in said[0]
            assert node.identity.peer_id in other.discovery.table
            # A forged entry costs nothing but a line in the log.
            (tmp_path / keys_of(run_here)[0].hex() / "junk").write_bytes(b"junk")
            await others.enter(RunReference(run_id=RUN.run_id), said.append)
            # Nobody has the fingerprint that is asked for.
            with pytest.raises(UserError, match="nobody"):
                await others.enter(RunReference("tiny", "00000000"), said.append)

    run(test)


def test_an_entry_whose_address_leads_to_somebody_else_is_no_way_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, 1) as (node, _), peer(tmp_path, 2) as (_, others), peer(tmp_path, 3) as (_, liar):
            # A valid signature over an address that is not one's own.
            false = RunPayload(RUN.run_id, RUN.name, RUN.creator, RUN.manifest_blob, node.addresses)
            liar.announce(false)
            await until(lambda: bool(list((tmp_path / keys_of(false)[2].hex()).glob("*"))))
            with pytest.raises(UserError, match="can be reached") as caught:
                await others.enter(RunReference("tiny"), lambda line: None)
            assert caught.value.exit_code == 3

    run(test)


def test_peers_that_announce_at_the_same_time_find_each_other_later(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, 1) as (node, first), peer(tmp_path, 2) as (other, second):
            for here, rendezvous in ((node, first), (other, second)):
                payload = RunPayload(RUN.run_id, RUN.name, RUN.creator, RUN.manifest_blob, here.addresses)
                rendezvous.announce(payload)
            await until(lambda: other.identity.peer_id in node.discovery.table)
            await until(lambda: node.identity.peer_id in other.discovery.table)

    run(test)


def test_a_bridge_that_does_not_come_up_is_one_line_with_its_reason(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "refuse").touch()
        async with peer(tmp_path, 1) as (_, rendezvous):
            with pytest.raises(UserError, match="nobody answers") as caught:
                await rendezvous.enter(RunReference("tiny"), lambda line: None)
            assert caught.value.exit_code == 3
            assert rendezvous.state == "down"

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG and /proc are Linux's")
def test_no_process_outlives_a_killed_node(tmp_path: Path) -> None:
    node = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import random, sys, trio\n"
            "from swarmtrain.hivemind_bridge.bridge import Bridge\n"
            "async def main():\n"
            "    bridge = Bridge(['/x'], say=print, rng=random.Random(0), command=sys.argv[1:])\n"
            "    async with trio.open_nursery() as nursery:\n"
            "        nursery.start_soon(bridge.run)\n"
            "        await bridge.settled()\n"
            "        print('up', flush=True)\n"
            "trio.run(main)",
            *command(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    assert node.stdout is not None
    assert node.stdout.readline() == b"up\n"
    child, _ = lives(tmp_path)[0]
    node.kill()
    node.wait()
    node.stdout.close()

    async def test() -> None:
        await until(lambda: is_gone(child))

    run(test)
    os.killpg(child, signal.SIGKILL)  # the stand-in's helper: only the real child ties its daemon to itself
