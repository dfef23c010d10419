"""Whole swarms, DHT and membership, in virtual time: a long partition, many who stay for seconds, and repetition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from hostile_nodes import KINDS, Conspiracy, turn_hostile
from large_swarm import LargePeer, LargeSwarm, shared_verification
from swarm_peer.kademlia import KademliaParams
from swarm_peer.membership import MembershipParams
from swarm_peer.records import run_key
from virtual_swarm import run_virtually


def simulate(scenario: Callable[[LargeSwarm], Awaitable[None]], seed: int, params: KademliaParams) -> LargeSwarm:
    swarms: list[LargeSwarm] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            gossip = MembershipParams(interval_s=10.0, ttl_s=90)
            swarms.append(LargeSwarm(nursery, seed, params=params, members=gossip))
            await scenario(swarms[0])
            nursery.cancel_scope.cancel()

    with shared_verification():
        run_virtually(main, seed=seed)
    return swarms[0]


async def until(condition: Callable[[], bool], limit_s: int) -> None:
    """Waits for the condition, asking every ten seconds. Raises `AssertionError` if it does not come true in time."""
    for _ in range(0, limit_s, 10):
        if condition():
            return
        await trio.sleep(10)
    raise AssertionError(f"not within {limit_s} s")


def test_two_halves_cut_off_for_twenty_minutes_are_one_again_within_ten() -> None:
    async def scenario(swarm: LargeSwarm) -> None:
        await swarm.grow(24)
        await swarm.grow(34, is_member=True)
        members = swarm.peers[24:]
        side = {peer.endpoint.address.host: peer.number % 2 for peer in swarm.peers}

        def live(peer: LargePeer) -> int:
            assert peer.membership
            return len(peer.membership.live())

        await until(lambda: all(live(peer) == 9 for peer in members), 200)
        swarm.network.is_cut = lambda a, b: side[a] != side[b]
        await trio.sleep(1200)
        assert all(live(peer) == 4 for peer in members)
        await swarm.peers[6].dht.announce_run(swarm.peers[6].run("even"))
        await swarm.peers[7].dht.announce_run(swarm.peers[7].run("odd"))
        assert await swarm.peers[9].dht.find_runs("even") == []

        swarm.network.is_cut = lambda a, b: False
        await until(lambda: all(live(peer) == 9 for peer in members), 600)
        for number, name in ((9, "even"), (10, "odd"), (15, "even"), (30, "odd")):
            assert len(await swarm.peers[number].dht.find_runs(name)) == 1

    simulate(scenario, 3, KademliaParams(check_s=30.0, refresh_s=1200.0))


def test_two_hundred_who_stayed_five_seconds_leave_no_trace() -> None:
    async def scenario(swarm: LargeSwarm) -> None:
        await swarm.grow(16)
        await swarm.grow(20, is_member=True)
        survivors = list(swarm.peers)
        gone: set[bytes] = set()

        async def visit(number: int) -> None:
            peer = await swarm.start(number, is_member=True)
            gone.add(peer.identity.peer_id)
            await trio.sleep(5)
            swarm.crash(peer)

        async with trio.open_nursery() as nursery:
            for number in range(1000, 1200):
                nursery.start_soon(visit, number)
                await trio.sleep(0.5)

        def traces(peer: LargePeer) -> set[bytes]:
            buckets = peer.dht.table._buckets
            known = {peer_id for bucket in buckets for peer_id in (*bucket.contacts, *bucket.replacements)}
            known |= {author for places in peer.dht.store._keys.values() for author, _ in places}
            if peer.membership:
                known |= {member.contact.peer_id for member in peer.membership.members()}
            return known & gone

        assert len(gone) == 200
        assert all(len(traces(peer)) > 20 for peer in survivors)
        # A record in the DHT lives 1200 s, and its tombstone as long again.
        await trio.sleep(2500)
        left = {peer.number: len(traces(peer)) for peer in survivors}
        assert not any(left.values()), left

    simulate(scenario, 4, KademliaParams(refresh_s=1200.0))


def test_the_same_seed_gives_the_same_history() -> None:
    async def scenario(swarm: LargeSwarm) -> None:
        await swarm.grow(30)
        conspiracy = Conspiracy(swarm.rng, run_key("wiki"))
        for index, peer in enumerate(swarm.rng.sample(swarm.peers[4:], 9)):
            turn_hostile(KINDS[index % len(KINDS)], conspiracy, peer.identity, peer.endpoint)
        await swarm.peers[2].dht.announce_run(swarm.peers[2].run())
        await swarm.grow(36, is_member=True)
        await trio.sleep(20)

    params = KademliaParams()
    digests = [simulate(scenario, seed, params).network.history.hexdigest() for seed in (5, 5, 6)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
