"""The DHT driver in virtual swarms: real endpoints over the in-memory network, under a virtual clock."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.connection import ConnectionLimits
from swarm_peer.dht import FIND_NODES, FIND_RECORDS, STORE, FindNodes, FindRecords, Records, StoreRecord
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.errors import ConnectionRefused, PeerError, RecordInvalid, Refusal
from swarm_peer.identity import Identity
from swarm_peer.kademlia import Kademlia, KademliaParams
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.records import (
    AgedRecord,
    PeerPayload,
    PeerState,
    RunPayload,
    SignedRecord,
    encode_payload,
    make_record,
    peers_key,
    run_key,
)
from swarm_peer.routing import RoutingParams
from swarm_peer.storage import PutOutcome

RUN_ID = hashlib.sha256(b"a run").digest()
PORT = 4000
# Idle connections end soon: what a virtual swarm costs is mostly their keepalives.
LIMITS = EndpointLimits(connection=ConnectionLimits(idle_s=8.0))


def identity_of(number: int) -> Identity:
    return Identity.from_seed(hashlib.sha256(b"peer %d" % number).digest())


@dataclass
class Peer:
    identity: Identity
    host: str
    endpoint: Endpoint
    dht: Kademlia
    scope: trio.CancelScope

    @property
    def address(self) -> Address:
        return Address(self.host, PORT)

    @property
    def contact(self) -> Contact:
        return Contact(self.identity.peer_id, (self.address,))

    def record(self, state: PeerState = PeerState.TRAINING, seq: int = 1) -> SignedRecord:
        payload = encode_payload(PeerPayload(RUN_ID, (self.address,), state, b""))
        return make_record(self.identity, "peer", peers_key(RUN_ID), seq, 1200, payload)

    def run_payload(self, name: str, run_id: bytes = RUN_ID) -> RunPayload:
        return RunPayload(run_id, name, self.identity.public_key, bytes(32), (self.address,))


class Swarm:
    """Peers 0, 1, 2… on hosts of their own; peer 0 is the bootstrap peer of the others."""

    def __init__(self, nursery: trio.Nursery, seed: int = 0, params: KademliaParams | None = None) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(seed=seed, link=Link(latency_s=0.02, jitter_s=0.01))
        self.params = params or KademliaParams(check_s=60.0, refresh_s=1200.0)
        self.peers: list[Peer] = []

    async def start(self, number: int, *, serve: bool = True) -> Peer:
        identity, host = identity_of(number), f"10.0.{number // 250}.{number % 250 + 1}"
        endpoint = Endpoint(identity, self.network.transport(identity, host), limits=LIMITS)
        dht = Kademlia(endpoint, identity, rng=random.Random(number), serve=serve, params=self.params)
        peer = Peer(identity, host, endpoint, dht, trio.CancelScope())

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with peer.scope:
                async with trio.open_nursery() as inner:
                    await inner.start(endpoint.run, [peer.address])
                    await inner.start(dht.run)
                    dht.advertise([peer.address])
                    task_status.started()

        await self.nursery.start(live)
        self.peers.append(peer)
        return peer

    async def grow(self, count: int) -> None:
        for number in range(len(self.peers), count):
            peer = await self.start(number)
            if number:
                assert await peer.dht.bootstrap([(None, self.peers[0].address)]) == [(self.peers[0].address, None)]
        await trio.sleep(5)  # virtual seconds: dial-backs settle

    def crash(self, peer: Peer) -> None:
        self.network.crash(peer.host)
        peer.scope.cancel()


def simulate(scenario: Callable[[Swarm], Awaitable[None]], seed: int = 0, params: KademliaParams | None = None) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(7 * 24 * 3600):
                await scenario(Swarm(nursery, seed, params))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_two_peers_find_a_run_and_each_other() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        first, second = swarm.peers
        await first.dht.announce_run(first.run_payload("tiny"))
        await second.dht.announce_peer(second.record())
        [found] = await second.dht.find_runs("tiny")
        assert found.payload.run_id == RUN_ID
        assert found.announcer == first.contact
        assert await second.dht.find_runs("other") == []
        assert [r.author() for r in await first.dht.find_peers(RUN_ID)] == [second.identity.peer_id]

    simulate(scenario)


def test_fifty_peers_also_after_a_third_and_the_bootstrap_peer_crashed() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(50)
        for peer in swarm.peers[10:40]:
            await peer.dht.announce_peer(peer.record())
        await swarm.peers[7].dht.announce_run(swarm.peers[7].run_payload("wiki"))
        everyone = {peer.identity.peer_id for peer in swarm.peers[10:40]}
        for asker in (swarm.peers[1], swarm.peers[25], swarm.peers[49]):
            assert [run.payload.name for run in await asker.dht.find_runs("wiki")] == ["wiki"]
            assert {r.author() for r in await asker.dht.find_peers(RUN_ID)} == everyone

        victims = [swarm.peers[0], *random.Random(1).sample(swarm.peers[1:], 15)]
        for victim in victims:
            swarm.crash(victim)
        alive = [peer for peer in swarm.peers if peer not in victims]
        for asker in alive[::12]:
            assert [run.payload.name for run in await asker.dht.find_runs("wiki")] == ["wiki"]
            found = {r.author() for r in await asker.dht.find_peers(RUN_ID)}
            assert found >= everyone - {victim.identity.peer_id for victim in victims}

        # After its time, nobody's record is there who did not renew it.
        await trio.sleep(1300)
        found = {r.author() for r in await alive[0].dht.find_peers(RUN_ID)}
        assert found == everyone - {victim.identity.peer_id for victim in victims}
        dead = {victim.identity.peer_id for victim in victims}
        assert not any(contact.peer_id in dead for contact in alive[0].dht.table.contacts())

    simulate(scenario)


def test_a_newcomer_joins_through_a_living_entry_and_learns_what_was_wrong_with_the_others() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(3)
        swarm.crash(swarm.peers[0])
        late = await swarm.start(90)
        wrong = identity_of(77).peer_id
        entries = [
            (None, swarm.peers[0].address),
            (None, Address("10.9.9.9", PORT)),
            (wrong, swarm.peers[1].address),
            (swarm.peers[2].identity.peer_id, swarm.peers[2].address),
        ]
        results = await late.dht.bootstrap(entries)
        assert [address for address, _ in results] == [address for _, address in entries]
        assert [type(error).__name__ for _, error in results] == [
            "ConnectionRefused",
            "Unreachable",
            "WrongIdentity",
            "NoneType",
        ]
        await trio.sleep(5)
        assert swarm.peers[1].identity.peer_id in late.dht.table

    simulate(scenario)


def test_a_lone_peer_tries_its_entries_until_one_is_there_and_then_publishes() -> None:
    async def scenario(swarm: Swarm) -> None:
        lone = await swarm.start(5)
        where = Address("10.0.0.1", PORT)
        [(_, error)] = await lone.dht.bootstrap([(None, where)])
        assert isinstance(error, PeerError)
        await lone.dht.announce_peer(lone.record())
        await trio.sleep(3000)
        bootstrap = await swarm.start(0)
        await trio.sleep(90)
        assert lone.identity.peer_id in bootstrap.dht.table
        assert [r.author() for r in await bootstrap.dht.find_peers(RUN_ID)] == [lone.identity.peer_id]

    simulate(scenario)


def test_a_bootstrap_peer_comes_back_empty_with_its_old_identity() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(6)
        first = swarm.peers[0]
        await first.dht.announce_run(first.run_payload("wiki"))
        swarm.crash(first)
        await trio.sleep(100)
        again = await swarm.start(0)
        await trio.sleep(120)
        assert len(again.dht.table) > 0
        # Its sequence numbers start anew; holders of the old record make it jump above.
        await again.dht.announce_run(again.run_payload("wiki", run_id=bytes(32)))
        [found] = await swarm.peers[3].dht.find_runs("wiki")
        assert found.payload.run_id == bytes(32)

    simulate(scenario)


def test_runs_with_one_name_are_all_found_and_the_index_has_every_run() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(12)
        for number, name in ((1, "same"), (2, "same"), (3, "third")):
            run_id = bytes([number]) * 32
            await swarm.peers[number].dht.announce_run(swarm.peers[number].run_payload(name, run_id))
        found = await swarm.peers[9].dht.find_runs("same")
        assert {run.payload.run_id for run in found} == {bytes([1]) * 32, bytes([2]) * 32}
        index = await swarm.peers[9].dht.find_runs(None)
        assert sorted(run.payload.name for run in index) == ["same", "same", "third"]

    simulate(scenario)


def test_one_author_announces_several_runs_and_all_stay_in_the_index() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(8)
        author = swarm.peers[2]
        for number in range(5):
            await author.dht.announce_run(author.run_payload(f"run {number}", bytes([number]) * 32))
        for wait_s in (0, 1000, 3000):  # as announced, and after several renewals
            await trio.sleep(wait_s)
            index = await swarm.peers[6].dht.find_runs(None)
            assert sorted(run.payload.name for run in index) == [f"run {number}" for number in range(5)]
        # Two creators' runs of one name from one announcer are both found under it.
        for creator in (b"a" * 32, b"b" * 32):
            await author.dht.announce_run(RunPayload(creator, "same", creator, bytes(32), (author.address,)))
        assert {run.payload.creator for run in await swarm.peers[5].dht.find_runs("same")} == {b"a" * 32, b"b" * 32}

    simulate(scenario)


def test_a_goodbye_takes_a_peer_out_of_the_answers() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(8)
        peer = swarm.peers[4]
        await peer.dht.announce_peer(peer.record())
        await peer.dht.announce_peer(peer.record(PeerState.LEFT))
        assert await swarm.peers[6].dht.find_peers(RUN_ID) == []
        await trio.sleep(2000)
        assert await swarm.peers[6].dht.find_peers(RUN_ID) == []

    simulate(scenario)


def test_a_client_finds_and_announces_but_enters_no_table() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(5)
        client = await swarm.start(60, serve=False)
        await client.dht.bootstrap([(None, swarm.peers[0].address)])
        await client.dht.announce_peer(client.record())
        assert [r.author() for r in await swarm.peers[3].dht.find_peers(RUN_ID)] == [client.identity.peer_id]
        await trio.sleep(600)
        assert all(client.identity.peer_id not in peer.dht.table for peer in swarm.peers[:5])
        with pytest.raises(Refusal) as caught:
            await swarm.peers[0].endpoint.call(client.contact, FIND_NODES, FindNodes(None, bytes(32)))
        assert caught.value.code == "unknown-method"

    simulate(scenario)


def test_a_sender_that_cannot_be_dialled_back_enters_no_table() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        behind_nat = await swarm.start(61)
        behind_nat.dht.advertise([Address("10.7.7.7", PORT)])
        await behind_nat.dht.bootstrap([(None, swarm.peers[0].address)])
        await trio.sleep(60)
        assert behind_nat.identity.peer_id not in swarm.peers[0].dht.table
        assert swarm.peers[0].identity.peer_id in behind_nat.dht.table

    simulate(scenario)


def test_requests_under_a_false_name_and_invalid_records_are_refused() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        honest, attacker = swarm.peers

        async def refusal_code(method: object, request: object) -> str:
            with pytest.raises(Refusal) as caught:
                await attacker.endpoint.call(honest.contact, method, request)  # type: ignore[arg-type]
            return caught.value.code

        assert await refusal_code(FIND_NODES, FindNodes(honest.contact, bytes(32))) == "wrong-sender"
        good = attacker.record()
        forged = SignedRecord(good.kind, good.key, honest.identity.public_key, 9, 60, good.payload, good.signature)
        assert await refusal_code(STORE, StoreRecord(None, AgedRecord(forged, 0))) == "invalid-record"
        elsewhere = make_record(attacker.identity, "peer", bytes(32), 1, 60, good.payload)
        assert await refusal_code(STORE, StoreRecord(None, AgedRecord(elsewhere, 0))) == "invalid-record"
        assert len(honest.dht.store) == 0

    simulate(scenario)


def test_floods_run_into_the_rate_limit() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        server, flooder = swarm.peers
        codes: list[str] = []

        async def flood() -> None:
            for _ in range(40):
                try:
                    await flooder.endpoint.call(server.contact, FIND_NODES, FindNodes(None, bytes(32)))
                except Refusal as refusal:
                    codes.append(refusal.code)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(flood)
        assert len(codes) > 200
        assert set(codes) == {"rate-limited"}
        await trio.sleep(60)
        await flooder.endpoint.call(server.contact, FIND_NODES, FindNodes(None, bytes(32)))

    simulate(scenario)


def test_only_our_own_well_placed_records_are_announced() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        with pytest.raises(RecordInvalid):
            await swarm.peers[0].dht.announce_peer(swarm.peers[1].record())

    simulate(scenario)


def test_a_lookup_pushes_the_newest_record_to_holders_of_an_older_one() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(4)
        author = swarm.peers[3]
        old, new = author.record(seq=1), author.record(PeerState.FINISHED, seq=2)
        for holder, record in ((swarm.peers[0], old), (swarm.peers[1], new)):
            reply = await author.endpoint.call(holder.contact, STORE, StoreRecord(None, AgedRecord(record, 0)))
            assert reply.outcome is PutOutcome.STORED
        [found] = await swarm.peers[2].dht.find_peers(RUN_ID)
        assert found == new
        await trio.sleep(5)
        [held] = swarm.peers[0].dht.store.get(peers_key(RUN_ID), trio.current_time())
        assert held.record == new

    simulate(scenario)


def test_a_holder_with_a_forged_record_is_ignored_altogether() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(3)
        await swarm.peers[1].dht.announce_run(swarm.peers[1].run_payload("wiki"))
        liar = Endpoint(identity_of(80), swarm.network.transport(identity_of(80), "10.0.5.1"))
        payload = encode_payload(swarm.peers[1].run_payload("wiki", run_id=bytes(32)))
        honest = make_record(identity_of(80), "run", run_key("wiki"), 1, 60, payload)
        forged = SignedRecord(
            "run", run_key("wiki"), swarm.peers[1].identity.public_key, 99, 60, payload, honest.signature
        )

        async def lie(remote: object, request: FindRecords) -> Records:
            return Records((AgedRecord(forged, 0),), ())

        liar.handle(FIND_RECORDS, lie)
        await swarm.nursery.start(liar.run, [Address("10.0.5.1", PORT)])
        swarm.peers[2].dht.table.offer(
            Contact(identity_of(80).peer_id, (Address("10.0.5.1", PORT),)), trio.current_time()
        )
        [found] = await swarm.peers[2].dht.find_runs("wiki")
        assert found.payload.run_id == RUN_ID

    simulate(scenario)


def test_an_entry_that_refuses_is_named_and_the_next_one_is_used() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(1)
        late = await swarm.start(90)
        nobody = Address(swarm.peers[0].host, PORT + 1)
        results = await late.dht.bootstrap([(None, nobody), (None, swarm.peers[0].address)])
        assert isinstance(results[0][1], ConnectionRefused)
        assert results[1][1] is None

    simulate(scenario)


def test_small_buckets_still_reach_everyone() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(40)
        await swarm.peers[33].dht.announce_run(swarm.peers[33].run_payload("wiki"))
        for asker in swarm.peers[::9]:
            assert len(await asker.dht.find_runs("wiki")) == 1

    simulate(scenario, params=KademliaParams(routing=RoutingParams(k=6, replacements=3)))
