"""Links that are lost and come back, peers that are killed and restarted, clocks that are wrong: in virtual time."""

from __future__ import annotations

import ast
import random
import time
from pathlib import Path

import pytest
import trio
from virtual_swarm import VirtualPeer, VirtualSwarm, run_virtually

RECONNECTED_WITHIN_S = 15.0
STEP_S = 2.0
ROOT = Path(__file__).resolve().parent.parent


def is_connected(swarm: VirtualSwarm, peer: VirtualPeer, since_s: float) -> bool:
    """True if the peer and somebody else know of each other what was said after `since_s`."""
    assert peer.membership is not None
    fresh_s = trio.current_time() - since_s
    for other in swarm.alive():
        if other is peer or other.membership is None:
            continue
        theirs = [m for m in peer.membership.live() if m.contact.peer_id == other.identity.peer_id]
        ours = [m for m in other.membership.live() if m.contact.peer_id == peer.identity.peer_id]
        if theirs and ours and theirs[0].age_s < fresh_s and ours[0].age_s < fresh_s:
            return True
    return False


async def reconnect_s(swarm: VirtualSwarm, peer: VirtualPeer) -> float:
    """Waits until the peer is among others again, at most two minutes; returns how long it took."""
    began = trio.current_time()
    with trio.move_on_after(120):
        while not is_connected(swarm, peer, began):  # noqa: ASYNC110  # by the records' ages, which are time
            await trio.sleep(0.1)
    return trio.current_time() - began


def meetings(peer: VirtualPeer) -> int:
    """Exchanges that came to a verdict: mixed, or stale, whereupon a peer fetches newer weights."""
    return sum(report.outcome in ("mixed", "stale") for report in peer.reports)


@pytest.mark.parametrize(("outage_s", "seed"), [(5, 1), (20, 2), (45, 3), (180, 4), (1000, 5)])
def test_a_lost_link_costs_fifteen_seconds_and_no_local_step(outage_s: float, seed: int) -> None:
    swarm = VirtualSwarm(seed=seed, step_s=STEP_S)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery, 3)
            await trio.sleep(60)
            cut = swarm.peers[2]
            step = cut.trainer.step
            swarm.network.partition([cut.host], [peer.host for peer in swarm.peers if peer is not cut])
            await trio.sleep(outage_s)
            assert cut.trainer.step - step >= outage_s / (1.2 * STEP_S) - 1, "the trainer went on"
            swarm.network.heal()
            assert await reconnect_s(swarm, cut) <= RECONNECTED_WITHIN_S
            before = meetings(cut)
            await trio.sleep(60)
            assert meetings(cut) > before, "and it exchanges again"
            nursery.cancel_scope.cancel()

    run_virtually(main, seed=seed)


@pytest.mark.parametrize("away_s", [2, 30, 600])
def test_a_killed_peer_comes_back_under_its_own_name(away_s: float) -> None:
    swarm = VirtualSwarm(seed=away_s, step_s=STEP_S)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery, 3)
            await trio.sleep(60)
            killed = swarm.peers[2]
            swarm.crash(killed)
            await trio.sleep(away_s)
            again = VirtualPeer(killed.index, killed.host, killed.identity, killed.trainer)
            swarm.peers[2] = again
            nursery.start_soon(swarm._run, again)
            await trio.sleep(1)
            assert await reconnect_s(swarm, again) <= RECONNECTED_WITHIN_S
            await trio.sleep(90)
            assert meetings(again) > 0
            for other in swarm.peers[:2]:
                assert other.membership is not None
                known = [m for m in other.membership.members() if m.contact.peer_id == again.identity.peer_id]
                assert [member.is_live for member in known] == [True], "one entry, and not its stale one"
            nursery.cancel_scope.cancel()

    run_virtually(main, seed=1)


def test_the_first_exchange_after_half_an_hour_of_local_steps_works() -> None:
    swarm = VirtualSwarm(seed=7, step_s=190.0, inner_steps=10)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery, 2)
            await trio.sleep(1500)
            assert [peer.reports for peer in swarm.peers] == [[], []], "nothing to exchange yet"
            await trio.sleep(1500)
            assert all(any(report.outcome == "mixed" for report in peer.reports) for peer in swarm.peers)
            nursery.cancel_scope.cancel()

    run_virtually(main, seed=7)


def test_nobody_is_lost_when_the_wall_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = time.time, random.Random(5)
    monkeypatch.setattr(time, "time", lambda: real() + rng.choice([-600.0, 7200.0, 300.0, -1e9, 1e9]))
    swarm = VirtualSwarm(seed=8, step_s=STEP_S)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery, 3)
            await trio.sleep(40)
            for _ in range(20):
                await trio.sleep(5)
                assert all(peer.membership and len(peer.membership.live()) == 2 for peer in swarm.peers)
            assert all(meetings(peer) > 0 for peer in swarm.peers)
            nursery.cancel_scope.cancel()

    run_virtually(main, seed=8)


def test_only_logs_and_file_names_read_the_wall_clock() -> None:
    # doctor compares clocks to show the difference; hivemind's records and the certificates of admission carry an
    # absolute end, these with a day to spare.
    allowed = {"events.py", "logfile.py", "node.py", "doctor.py", "rendezvous.py"}
    allowed |= {"admission.py", "door.py", "gated.py", "inviting.py", "redeeming.py"}
    for folder in ("swarmtrain", "peer/swarm_peer", "compression/swarm_compression"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = {
                ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            read = names & {"time.time", "time.time_ns", "datetime.datetime.now", "datetime.now", "time.strftime"}
            assert not read or path.name in allowed, f"{path} compares or keeps wall-clock time: {read}"
