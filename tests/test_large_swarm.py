"""The DHT and membership at scale, in virtual time and over `direct_network`: hostile nodes, partitions, churn.

The swarm of a thousand takes about a minute of one core. A larger one runs on request: SWARMTRAIN_SWARM_PEERS=5000.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
import trio
from hostile_nodes import KINDS, Conspiracy, flood, turn_hostile
from large_swarm import NAME, RUN_ID, LargePeer, LargeSwarm, identity_of, shared_verification
from swarm_peer.dht import STORE, StoreRecord
from swarm_peer.records import AgedRecord, encode_payload, make_record, run_key
from swarm_peer.routing import shared_bits
from virtual_swarm import run_virtually

LARGER = int(os.environ.get("SWARMTRAIN_SWARM_PEERS", "0"))
on_request = pytest.mark.skipif(
    not LARGER, reason="takes many minutes of a core: set SWARMTRAIN_SWARM_PEERS=5000 to run 5,000 peers"
)
SEED = 7
# Peer numbers whose ids under SEED share at least 11 bits with the key of the run's name, found by trying 48,000: at
# 1,000 peers they are nearer to it than any honest one.
BESIDE_THE_KEY = [
    *(100085, 100368, 101556, 102175, 102186, 109715, 111195, 120909, 121699, 124712, 125612, 126457),
    *(126815, 129369, 133210, 133733, 136237, 136453, 141894, 142467, 142810, 145086, 146901, 148103),
]


def simulate(scenario: Callable[[LargeSwarm], Awaitable[None]], seed: int, **options: object) -> LargeSwarm:
    swarms: list[LargeSwarm] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            swarms.append(LargeSwarm(nursery, seed, **options))  # type: ignore[arg-type]
            with trio.fail_after(24 * 3600):
                await scenario(swarms[0])
            nursery.cancel_scope.cancel()

    with shared_verification():
        run_virtually(main, seed=seed)
    return swarms[0]


async def eclipse(swarm: LargeSwarm, conspiracy: Conspiracy) -> list[LargePeer]:
    """Surrounds the key with ids that are nearer to it than any honest one, out of two subnets."""
    made = []
    for index, number in enumerate(BESIDE_THE_KEY):
        assert shared_bits(identity_of(SEED, number).peer_id, conspiracy.target) >= 11
        peer = await swarm.start(number, host=f"198.51.{index % 2}.{index + 1}")
        turn_hostile("liar", conspiracy, peer.identity, peer.endpoint)
        made.append(peer)
    return made


async def share_found(askers: list[LargePeer], ask: Callable[[LargePeer], Awaitable[bool]], at_once: int = 20) -> float:
    """The share of askers whose question was answered, `at_once` of them asking at a time."""
    found = 0
    slots = trio.CapacityLimiter(at_once)

    async def one(asker: LargePeer) -> None:
        nonlocal found
        async with slots:
            if await ask(asker):
                found += 1

    async with trio.open_nursery() as nursery:
        for asker in askers:
            nursery.start_soon(one, asker)
    return found / len(askers)


@pytest.mark.parametrize("peers", [1000, pytest.param(LARGER, marks=on_request, id="larger")])
def test_a_run_is_found_although_a_third_of_all_nodes_is_hostile(peers: int) -> None:
    async def scenario(swarm: LargeSwarm) -> None:
        await swarm.grow(peers - len(BESIDE_THE_KEY))
        conspiracy = Conspiracy(swarm.rng, run_key(NAME))
        # The entries stay honest; 30 % of all others turn.
        hostile = swarm.rng.sample(swarm.peers[4:], peers * 3 // 10 - len(BESIDE_THE_KEY))
        for index, peer in enumerate(hostile):
            turn_hostile(KINDS[index % len(KINDS)], conspiracy, peer.identity, peer.endpoint)
        enemies = {*hostile, *await eclipse(swarm, conspiracy)}
        assert len(enemies) >= 0.3 * len(swarm.peers)
        honest = [peer for peer in swarm.peers if peer not in enemies]

        author = honest[10]
        payload = encode_payload(author.run(run_id=bytes(32)))
        conspiracy.genuine = make_record(author.identity, "run", run_key(NAME), 1, 1200, payload)
        await author.dht.announce_run(author.run(run_id=bytes(32)))
        await author.dht.announce_run(author.run())  # what the replayers' record is older than
        members = swarm.rng.sample(honest, 50)
        assert await share_found(members, announce) == 1.0

        # Valid records of the enemies' own at every honest node, as many as it takes.
        for peer in hostile[:40]:
            decoy = AgedRecord(conspiracy.decoy(peer.identity, peer.endpoint.address), 0)
            for holder in swarm.rng.sample(honest, 5):
                await peer.endpoint.call(holder.endpoint.contact, STORE, StoreRecord(None, decoy))
        floods = [await flood(peer.endpoint, author.endpoint.contact, 600) for peer in hostile[:2]]
        assert all(refused >= 100 for refused in floods), floods

        async def finds_the_run(asker: LargePeer) -> bool:
            found = await asker.dht.find_runs(NAME)
            by_author = [run for run in found if run.announcer.peer_id == author.identity.peer_id]
            assert all(run.payload.run_id == RUN_ID for run in by_author), "an old or forged record was believed"
            return bool(by_author)

        async def finds_peers(asker: LargePeer) -> bool:
            found = await asker.dht.find_peers(RUN_ID)
            return len({record.author() for record in found}) >= 30

        share = await share_found(swarm.rng.sample(honest, 100), finds_the_run)
        assert share >= 0.99, share
        share = await share_found(swarm.rng.sample(honest, 25), finds_peers)
        assert share >= 0.99, share

    async def announce(peer: LargePeer) -> bool:
        await peer.dht.announce_peer(peer.record())
        return True

    simulate(scenario, SEED)
