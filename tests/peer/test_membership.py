"""Membership: the view by itself, then gossip among up to fifty real endpoints under a virtual clock."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from swarm_peer.addresses import Address, Contact
from swarm_peer.connection import ConnectionLimits
from swarm_peer.discovery import FoundRun
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.errors import RecordInvalid, Refusal
from swarm_peer.identity import Identity
from swarm_peer.members import Digest, MemberTable, Merge
from swarm_peer.membership import Membership, MembershipParams, Trade, list_members
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.records import (
    AgedRecord,
    PeerPayload,
    PeerState,
    RunPayload,
    SignedRecord,
    age_record,
    decode_peer,
    encode_payload,
    make_record,
    members_key,
)

RUN_ID = hashlib.sha256(b"a run").digest()
PORT = 4000
IDENTITIES = [Identity.from_seed(hashlib.sha256(b"member %d" % n).digest()) for n in range(130)]


def record(
    number: int, seq: int = 1, state: PeerState = PeerState.TRAINING, ttl_s: int = 45, status: bytes = b""
) -> SignedRecord:
    payload = encode_payload(PeerPayload(RUN_ID, (Address("10.0.0.1", PORT),), state, status))
    return make_record(IDENTITIES[number], "peer", members_key(RUN_ID), seq, ttl_s, payload)


RECORDS = {number: record(number) for number in range(1, 100)}


def table(params: MembershipParams | None = None) -> MemberTable:
    made = MemberTable(IDENTITIES[0].peer_id, RUN_ID, params or MembershipParams(), random.Random(0))
    made.put_own(record(0), now=0.0)
    return made


STRANGER = IDENTITIES[99].peer_id


# The view.


class TableMachine(RuleBasedStateMachine):
    """Records of five peers arrive in any order, fresh and stale, from authors and others, while time passes."""

    @initialize()
    def begin(self) -> None:
        self.table = table(MembershipParams(members=5, lost_shown_s=30.0))
        self.now = 0.0
        self.seen: dict[bytes, int] = {}
        self.latest_end: dict[bytes, float] = {}

    @rule(
        number=st.integers(1, 6),
        seq=st.integers(1, 5),
        state=st.sampled_from(list(PeerState)),
        age_s=st.floats(0, 50),
        by_author=st.booleans(),
    )
    def arrive(self, number: int, seq: int, state: PeerState, age_s: float, by_author: bool) -> None:
        made = record(number, seq, state)
        aged = age_record(made, age_s)
        before = {m.contact.peer_id: m for m in self.table.members(self.now)}
        outcome = self.table.merge(aged, IDENTITIES[number].peer_id if by_author else STRANGER, self.now)
        after = {m.contact.peer_id: m for m in self.table.members(self.now)}
        author = made.author()
        end = self.now + aged.remaining_s
        if outcome is Merge.NEWER or by_author:
            content = made.content_hash()
            self.latest_end[content] = max(end, self.latest_end.get(content, end))
        if author in before and author in after:
            assert after[author].seq >= before[author].seq
            if outcome is Merge.KNOWN and not by_author:
                assert after[author] == before[author]
        if author in before and before[author].seq == seq and before[author].state is PeerState.LEFT:
            assert author in after
            assert after[author].state is PeerState.LEFT

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)

    @rule()
    def echo(self) -> None:
        """Our own answers, told back to us, change nothing."""
        digests = tuple(Digest(identity.peer_id, 0) for identity in IDENTITIES[1:7])
        for aged in self.table.newer_than(digests, True, STRANGER, self.now):
            if aged.record.author() != IDENTITIES[0].peer_id:
                assert self.table.merge(aged, STRANGER, self.now) is Merge.KNOWN

    @invariant()
    def it_is_bounded_and_nobody_lives_too_long(self) -> None:
        assert len(self.table) <= 5
        for aged in self.table.page(b"", 40, self.now):
            if aged.remaining_s > 0.01 and aged.record.author() != IDENTITIES[0].peer_id:
                assert self.now + aged.remaining_s <= self.latest_end[aged.record.content_hash()] + 0.01


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_silence_makes_a_member_lost_and_then_forgotten() -> None:
    view = table()
    view.merge(AgedRecord(record(1), 5_000), STRANGER, now=0.0)
    assert [m.state for m in view.members(39.0)] == [PeerState.TRAINING]
    assert [m.state for m in view.members(41.0)] == ["lost"]
    # A slower peer's copy does not bring it back; news of its own does.
    assert view.merge(AgedRecord(record(1), 44_000), STRANGER, now=41.0) is Merge.KNOWN
    assert [m.state for m in view.members(41.0)] == ["lost"]
    assert view.merge(AgedRecord(record(1, seq=2), 0), STRANGER, now=42.0) is Merge.NEWER
    assert [m.is_live for m in view.members(42.0)] == [True]
    view.expire(42.0 + 45 + 599)
    assert len(view) == 2
    view.expire(42.0 + 45 + 601)
    assert len(view) == 1


def test_a_goodbye_stays_for_its_own_life() -> None:
    view = table()
    view.merge(AgedRecord(record(1, seq=3, state=PeerState.LEFT, ttl_s=600), 0), STRANGER, now=0.0)
    assert view.merge(AgedRecord(record(1, seq=2), 0), STRANGER, now=1.0) is Merge.KNOWN
    view.expire(599.0)
    assert [m.state for m in view.members(599.0)] == [PeerState.LEFT]
    view.expire(601.0)
    assert view.members(601.0) == []


def test_invalid_records_are_refused_and_change_nothing() -> None:
    view = table()
    good = record(1)
    forged = SignedRecord("peer", good.key, IDENTITIES[2].public_key, 9, 45, good.payload, good.signature)
    elsewhere = make_record(IDENTITIES[1], "peer", bytes(32), 1, 45, good.payload)
    other_run = encode_payload(PeerPayload(bytes(32), (), PeerState.TRAINING, b""))
    other = make_record(IDENTITIES[1], "peer", members_key(RUN_ID), 1, 45, other_run)
    run = encode_payload(RunPayload(RUN_ID, "x", bytes(32), bytes(32), ()))
    kind = make_record(IDENTITIES[1], "run", members_key(RUN_ID), 1, 45, run)
    for bad in (forged, elsewhere, other, kind):
        with pytest.raises(RecordInvalid):
            view.merge(AgedRecord(bad, 0), STRANGER, now=0.0)
    assert view.members(0.0) == []


def test_messages_stay_within_their_caps_and_a_full_table_keeps_the_living() -> None:
    view = table(MembershipParams(members=110))
    for number in range(1, 120):
        view.merge(AgedRecord(record(number), 0), STRANGER, now=0.0)
    assert len(view) == 110
    digests, is_complete = view.digests(0.0)
    assert (len(digests), is_complete) == (64, False)
    assert len(view.newer_than((), True, STRANGER, 0.0)) == 32
    assert len(view.wanted(tuple(Digest(i.peer_id, 9) for i in IDENTITIES[:64]), 0.0)) == 32
    assert len(view.rumours(0.0)) == 16
    assert len(view.page(b"", 40, 0.0)) == 40
    # A lost one gives way to a new one.
    view.merge(AgedRecord(record(1, seq=2, ttl_s=1), 0), STRANGER, now=1.0)
    view.expire(3.0)
    assert view.merge(AgedRecord(record(125), 0), STRANGER, now=3.0) is Merge.NEWER
    with pytest.raises(ValueError, match="at most"):
        MembershipParams(digests=65)


def test_a_full_view_is_a_sample_that_repetition_does_not_bend() -> None:
    honest, loud = range(1, 61), range(61, 81)
    kept = {"honest": 0, "loud": 0}
    for seed in range(30):
        view = MemberTable(IDENTITIES[0].peer_id, RUN_ID, MembershipParams(members=21), random.Random(seed))
        view.put_own(record(0), now=0.0)
        for number in honest:
            view.merge(AgedRecord(RECORDS[number], 0), STRANGER, now=0.0)
            for shouting in loud:  # each of the loud is told sixty times
                view.merge(AgedRecord(RECORDS[shouting], 0), STRANGER, now=0.0)
        assert len(view) == 21
        names = {member.contact.peer_id for member in view.members(0.0)}
        kept["honest"] += sum(IDENTITIES[number].peer_id in names for number in honest)
        kept["loud"] += sum(IDENTITIES[number].peer_id in names for number in loud)
    # 20 of 80 are the loud ones: a quarter of 600 places, give or take four standard deviations.
    assert 150 - 43 < kept["loud"] < 150 + 43, kept


def test_one_sender_introduces_a_burst_and_then_few() -> None:
    view = table(MembershipParams(introductions_burst=5))
    for number in range(1, 20):
        view.merge(AgedRecord(RECORDS[number], 0), STRANGER, now=0.0)
    assert len(view) == 1 + 5
    # Others can still name the same peers, the peers themselves can, and ten seconds later the sender one more.
    assert view.merge(AgedRecord(RECORDS[10], 0), IDENTITIES[90].peer_id, now=0.0) is Merge.NEWER
    assert view.merge(AgedRecord(RECORDS[11], 0), IDENTITIES[11].peer_id, now=0.0) is Merge.NEWER
    outcomes = [view.merge(AgedRecord(RECORDS[number], 0), STRANGER, now=10.5) for number in (12, 13)]
    assert outcomes == [Merge.NEWER, Merge.KNOWN]


def test_rumours_cool_down() -> None:
    view = table()
    view.merge(AgedRecord(record(1), 0), STRANGER, now=0.0)
    told = [len(view.rumours(0.0)) for _ in range(10)]
    assert told[0] == 2
    assert told[-1] == 0


def test_records_live_longer_in_a_large_swarm() -> None:
    view = table(MembershipParams(scale_members=20))
    assert view.lifetime_s(0.0) == 45
    for number in range(1, 100):
        view.merge(AgedRecord(record(number), 0), STRANGER, now=0.0)
    assert view.lifetime_s(0.0) == 45 * 5


# Gossip.


@dataclass
class Directory:
    """A `Discovery` that everybody shares and that always works."""

    records: dict[bytes, SignedRecord] = field(default_factory=dict)
    is_down: bool = False
    questions: int = 0

    async def announce_run(self, run: RunPayload) -> None:
        raise AssertionError

    async def find_runs(self, name: str | None) -> list[FoundRun]:
        raise AssertionError

    async def announce_peer(self, record: SignedRecord) -> None:
        await trio.lowlevel.checkpoint()
        self.records[record.author()] = record

    async def find_peers(self, run_id: bytes) -> list[SignedRecord]:
        await trio.lowlevel.checkpoint()
        self.questions += 1
        if self.is_down:
            return []
        return [r for r in self.records.values() if decode_peer(r).state is not PeerState.LEFT]


@dataclass
class Peer:
    identity: Identity
    host: str
    endpoint: Endpoint
    membership: Membership
    scope: trio.CancelScope

    @property
    def contact(self) -> Contact:
        return Contact(self.identity.peer_id, (Address(self.host, PORT),))

    def knows(self, other: Peer) -> object:
        states = [m.state for m in self.membership.members() if m.contact.peer_id == other.identity.peer_id]
        return states[0] if states else None


class Swarm:
    def __init__(self, nursery: trio.Nursery, params: MembershipParams) -> None:
        self.nursery = nursery
        self.params = params
        self.network = MemoryNetwork(link=Link(latency_s=0.03, jitter_s=0.02))
        self.directory = Directory()
        self.peers: list[Peer] = []

    async def start(self, number: int, *, host: str | None = None) -> Peer:
        identity, where = IDENTITIES[number], host or f"10.0.1.{number + 1}"
        limits = EndpointLimits(connection=ConnectionLimits(idle_s=8.0))
        endpoint = Endpoint(identity, self.network.transport(identity, where), limits=limits)
        membership = Membership(
            endpoint,
            identity,
            RUN_ID,
            discovery=self.directory,
            rng=random.Random(where),
            addresses=[Address(where, PORT)],
            params=self.params,
        )
        membership.publish(PeerState.TRAINING, b"")
        peer = Peer(identity, where, endpoint, membership, trio.CancelScope())

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with peer.scope:
                async with trio.open_nursery() as inner:
                    await inner.start(endpoint.run, [Address(where, PORT)])
                    await inner.start(membership.run)
                    task_status.started()

        await self.nursery.start(live)
        self.peers.append(peer)
        return peer

    async def grow(self, count: int) -> None:
        for number in range(count):
            await self.start(number)

    def crash(self, peer: Peer) -> None:
        self.network.crash(peer.host)
        peer.scope.cancel()
        self.peers.remove(peer)


def simulate(scenario: Callable[[Swarm], Awaitable[None]], params: MembershipParams | None = None) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(24 * 3600):
                await scenario(Swarm(nursery, params or MembershipParams()))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_fifty_peers_learn_of_joins_goodbyes_and_crashes() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(50)
        await trio.sleep(30)
        assert all(len(peer.membership.live()) == 49 for peer in swarm.peers)

        newcomer = await swarm.start(60)
        await trio.sleep(20)  # four intervals
        others = swarm.peers[:50]
        assert all(peer.knows(newcomer) is PeerState.TRAINING for peer in others)
        assert len(newcomer.membership.live()) == 50

        leaver, victim = swarm.peers[5], swarm.peers[7]
        began = trio.current_time()
        await leaver.membership.goodbye()
        assert trio.current_time() - began <= 2
        swarm.crash(leaver)
        swarm.crash(victim)
        await trio.sleep(20)
        assert all(peer.knows(leaver) is PeerState.LEFT for peer in swarm.peers)
        await trio.sleep(30)  # 50 s after the crash, its ttl of 45 s is over everywhere
        assert all(peer.knows(victim) == "lost" for peer in swarm.peers)
        # And nobody else was taken for lost.
        assert all(len(peer.membership.live()) == 48 for peer in swarm.peers)

        lines = await list_members(newcomer.endpoint, swarm.peers[3].contact, RUN_ID)
        assert len(lines) == 51
        assert sum(m.is_live for m in lines) == 49
        assert {m.state for m in lines} == {PeerState.TRAINING, PeerState.LEFT, "lost"}

    simulate(scenario)


def test_a_change_of_state_is_known_to_some_at_once_and_to_all_soon() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(12)
        await trio.sleep(30)
        changed = swarm.peers[4]
        changed.membership.publish(PeerState.FINISHED, b"done")
        await trio.sleep(0.5)
        others = [peer for peer in swarm.peers if peer is not changed]
        assert sum(peer.knows(changed) is PeerState.FINISHED for peer in others) >= 3
        await trio.sleep(20)
        assert all(peer.knows(changed) is PeerState.FINISHED for peer in others)
        [member] = [m for m in others[0].membership.members() if m.contact == changed.contact]
        assert member.status == b"done"

    simulate(scenario)


def test_a_peer_that_moves_is_found_at_its_new_place() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(6)
        await trio.sleep(30)
        moved, *others = swarm.peers
        moved.membership.move([Address("10.0.9.9", PORT)])
        await trio.sleep(15)
        for other in others:
            (contact,) = [m.contact for m in other.membership.members() if m.contact.peer_id == moved.contact.peer_id]
            assert contact.addresses == (Address("10.0.9.9", PORT),)
        announced = decode_peer(swarm.directory.records[moved.identity.peer_id])
        assert announced.addresses == (Address("10.0.9.9", PORT),)

    simulate(scenario)


def test_status_alone_is_renewed_at_most_once_per_interval() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        first, second = swarm.peers
        await trio.sleep(20)
        for step in range(100):
            first.membership.publish(PeerState.TRAINING, b"%d" % step)
            await trio.sleep(0.2)
        await trio.sleep(15)
        [member] = second.membership.members()
        assert member.status == b"99"
        assert member.seq <= 15
        with pytest.raises(RecordInvalid):
            first.membership.publish(PeerState.TRAINING, bytes(513))

    simulate(scenario)


def test_a_restarted_peer_takes_its_place_again_without_alarm() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(6)
        old = swarm.peers[2]
        for step in range(8):
            old.membership.publish(PeerState.TRAINING, b"%d" % step)
            await trio.sleep(6)
        swarm.crash(old)
        await trio.sleep(2)
        again = await swarm.start(2)
        alarms: list[None] = []
        again.membership.on_duplicate = lambda: alarms.append(None)
        again.membership.publish(PeerState.WATCHING, b"")
        await trio.sleep(25)
        others = [peer for peer in swarm.peers if peer is not again]
        assert all(peer.knows(again) is PeerState.WATCHING for peer in others)
        await trio.sleep(120)
        assert alarms == []

    simulate(scenario)


def test_two_processes_with_one_identity_notice_it_once() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(5)
        await trio.sleep(20)
        twin = await swarm.start(3, host="10.0.2.2")
        alarms: list[str] = []
        swarm.peers[3].membership.on_duplicate = lambda: alarms.append("first")
        twin.membership.on_duplicate = lambda: alarms.append("twin")
        await trio.sleep(300)
        assert sorted(alarms) == ["first", "twin"], "both are told, and once"

    simulate(scenario)


def test_a_lonely_peer_asks_the_discovery_again_with_back_off() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.directory.is_down = True
        await swarm.grow(2)
        await trio.sleep(1000)
        assert swarm.peers[0].membership.live() == []
        assert 20 < swarm.directory.questions < 80
        swarm.directory.is_down = False
        await trio.sleep(80)
        assert len(swarm.peers[0].membership.live()) == 1

    simulate(scenario)


def test_two_halves_that_took_each_other_for_lost_find_together_again() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(8)
        await trio.sleep(30)
        halves = swarm.peers[:4], swarm.peers[4:]
        swarm.network.partition([p.host for p in halves[0]], [p.host for p in halves[1]])
        await trio.sleep(200)
        assert all(len(peer.membership.live()) == 3 for peer in swarm.peers)
        swarm.network.heal()
        await trio.sleep(200)
        assert all(len(peer.membership.live()) == 7 for peer in swarm.peers)

    simulate(scenario)


def test_goodbye_is_bounded_when_nobody_answers() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(4)
        await trio.sleep(20)
        for peer in swarm.peers[1:]:
            swarm.network.crash(peer.host, silent=True)
        began = trio.current_time()
        with trio.CancelScope() as scope:
            scope.cancel()
            await swarm.peers[0].membership.goodbye()
        assert trio.current_time() - began <= 2
        swarm.peers[0].membership.publish(PeerState.TRAINING, b"")
        assert decode_peer(swarm.directory.records[IDENTITIES[0].peer_id]).state is PeerState.LEFT

    simulate(scenario)


def test_forged_gossip_is_refused_and_counted() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(2)
        await trio.sleep(20)
        first, attacker = swarm.peers
        good = record(50)
        forged = SignedRecord("peer", good.key, IDENTITIES[51].public_key, 9, 45, good.payload, good.signature)
        method = attacker.membership._trade
        with pytest.raises(Refusal) as caught:
            await attacker.endpoint.call(first.contact, method, Trade((AgedRecord(forged, 0),), ()))
        assert caught.value.code == "invalid-record"
        assert first.membership.invalid == {attacker.identity.peer_id: 1}
        assert len(first.membership.members()) == 1

    simulate(scenario)


def test_bytes_per_peer_do_not_grow_with_the_swarm() -> None:
    """With caps low enough to bite, three times the members cost each peer hardly more."""
    params = MembershipParams(digests=8, records=4, rumours=4, scale_members=8)
    cost: dict[int, float] = {}

    def measure(count: int) -> None:
        async def scenario(swarm: Swarm) -> None:
            await swarm.grow(count)
            await trio.sleep(40)
            before = sum(peer.endpoint.stats.bytes_sent for peer in swarm.peers)
            await trio.sleep(60)
            cost[count] = (sum(peer.endpoint.stats.bytes_sent for peer in swarm.peers) - before) / count

        simulate(scenario, params)

    measure(10)
    measure(30)
    assert cost[30] < 1.5 * cost[10], cost
