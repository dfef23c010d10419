"""Certificates, revocations and redemptions under hypothesis; then the gate among real endpoints in virtual time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from swarm_peer.addresses import Address, Contact
from swarm_peer.admission import Admission, Redemptions, decode_redemptions
from swarm_peer.certificates import (
    BAD_CERTIFICATE,
    EXPIRED,
    MAX_CHAIN_BYTES,
    MAX_DEPTH,
    NO_INVITE,
    NOT_INTRODUCED,
    NOT_LISTED,
    REDEEM_SKEW_S,
    REVOKED,
    SKEW_S,
    USED,
    AdmissionMode,
    Certificate,
    Chain,
    Charter,
    Ticket,
    claim,
    decode_chain,
    decode_revocations,
    encode_chain,
    encode_revocations,
    issue,
    issue_ticket,
    parse_ticket,
    revoke,
    ticket_text,
    verify_chain,
    witness,
)
from swarm_peer.discovery import FoundRun
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import NotAMember, Refusal
from swarm_peer.gated import Gate
from swarm_peer.identity import Identity
from swarm_peer.membership import Membership, list_members
from swarm_peer.memory import MemoryNetwork
from swarm_peer.records import PeerState, RunPayload, SignedRecord
from swarm_peer.redeeming import Redeemer, redeem
from swarm_peer.rpc import Method

RUN = bytes(range(32))
OTHER_RUN = bytes(32)
NOW = 1_900_000_000
YEAR = 365 * 86400


def identity(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


CREATOR, REDEEMER, ANNA, BEN, CARA = (identity(number) for number in range(1, 6))
CHARTER = Charter(RUN, CREATOR.public_key, AdmissionMode.INVITE)
NOBODY: frozenset[bytes] = frozenset()


def invite(
    issuer: Identity, chain: Chain, number: int, *, may_invite: bool = False, uses: int = 1, not_after: int = NOW + YEAR
) -> Ticket:
    seed = (1000 + number).to_bytes(32, "big")
    return issue_ticket(
        issuer,
        chain,
        RUN,
        seed,
        not_after=not_after,
        may_invite=may_invite,
        redeemer=REDEEMER.peer_id,
        redeem_by=NOW + 3600,
        uses=uses,
    )


def admitted(ticket: Ticket, subject: Identity) -> Chain:
    return witness(REDEEMER, claim(ticket, subject.peer_id))


def denial(chain: Chain, subject: Identity, *, now: float = NOW, revoked: frozenset[bytes] = NOBODY) -> str:
    try:
        verify_chain(CHARTER, chain, subject.peer_id, now, revoked)
    except Refusal as refusal:
        return refusal.code
    return ""


# Chains.


def test_the_creator_needs_nothing_and_others_an_invite() -> None:
    assert denial((), CREATOR) == ""
    assert denial((), ANNA) == NO_INVITE
    assert denial(admitted(invite(CREATOR, (), 1), ANNA), ANNA) == ""


def test_an_invited_member_invites_as_far_as_it_may_and_no_deeper_than_four() -> None:
    issuer, chain = CREATOR, ()
    for depth in range(1, MAX_DEPTH + 2):
        member = identity(100 + depth)
        chain = admitted(invite(issuer, chain, depth, may_invite=True), member)
        assert denial(chain, member) == ("" if depth <= MAX_DEPTH else BAD_CERTIFICATE)
        issuer = member
    assert len(encode_chain(chain[:-2])) <= MAX_CHAIN_BYTES
    plain = admitted(invite(CREATOR, (), 9), ANNA)
    assert denial(admitted(invite(ANNA, plain, 10), BEN), BEN) == BAD_CERTIFICATE


def test_a_ticket_is_no_membership_and_gives_no_more_than_it_has() -> None:
    ticket = invite(CREATOR, (), 1)
    key = Identity.from_seed(ticket.seed)
    assert denial(ticket.chain, key) == BAD_CERTIFICATE
    bold = issue(key, RUN, ANNA.peer_id, not_after=NOW, may_invite=True)
    assert denial(witness(REDEEMER, (*ticket.chain, bold)), ANNA) == BAD_CERTIFICATE
    second = issue(key, RUN, BEN.peer_id, not_after=NOW, is_ticket=True)
    inner = issue(BEN, RUN, ANNA.peer_id, not_after=NOW)
    assert denial((*ticket.chain, second, inner), ANNA) == BAD_CERTIFICATE


def test_without_the_redeemers_signature_a_claim_is_worth_nothing() -> None:
    ticket = invite(CREATOR, (), 1)
    chain = claim(ticket, ANNA.peer_id)
    assert denial(chain, ANNA) == BAD_CERTIFICATE
    assert denial(witness(BEN, chain), ANNA) == BAD_CERTIFICATE
    assert denial(witness(REDEEMER, chain), ANNA) == ""
    # The signature of one claim does not fit another.
    signed = witness(REDEEMER, chain)[-1]
    other = msgspec.structs.replace(
        claim(ticket, BEN.peer_id)[-1], witness=signed.witness, witness_key=signed.witness_key
    )
    assert denial((*ticket.chain, other), BEN) == BAD_CERTIFICATE


def test_certificates_of_another_run_creator_or_peer_are_refused() -> None:
    chain = admitted(invite(CREATOR, (), 1), ANNA)
    assert denial(chain, BEN) == BAD_CERTIFICATE
    assert denial(admitted(invite(BEN, (), 2), ANNA), ANNA) == BAD_CERTIFICATE
    elsewhere = (issue(CREATOR, OTHER_RUN, ANNA.peer_id, not_after=NOW + YEAR),)
    assert denial(elsewhere, ANNA) == BAD_CERTIFICATE


@given(after=st.integers(-2 * YEAR, 2 * YEAR), clock=st.integers(-2 * YEAR, 2 * YEAR))
@settings(deadline=None, max_examples=40)
def test_expiry_allows_a_clock_that_is_a_day_off(after: int, clock: int) -> None:
    chain = admitted(invite(CREATOR, (), 1, not_after=NOW + after), ANNA)
    expected = EXPIRED if clock > after + SKEW_S else ""
    assert denial(chain, ANNA, now=NOW + clock) == expected


@given(parent=st.integers(0, YEAR), child=st.integers(0, YEAR))
@settings(deadline=None, max_examples=25)
def test_no_link_outlives_the_one_before(parent: int, child: int) -> None:
    inviter = issue(CREATOR, RUN, ANNA.peer_id, not_after=NOW + parent, may_invite=True)
    guest = issue(ANNA, RUN, BEN.peer_id, not_after=NOW + child)
    assert denial((inviter, guest), BEN) == (BAD_CERTIFICATE if child > parent else "")
    assert invite(ANNA, (inviter,), 1, not_after=NOW + child).chain[-1].not_after == NOW + min(parent, child)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_no_altered_field_of_any_link_is_believed(data: st.DataObject) -> None:
    outer = admitted(invite(CREATOR, (), 1, may_invite=True), ANNA)
    chain = list(admitted(invite(ANNA, outer, 2), BEN))
    at = data.draw(st.integers(0, len(chain) - 1))
    name = data.draw(st.sampled_from(Certificate.__struct_fields__))
    old = getattr(chain[at], name)
    new = (
        (not old)
        if isinstance(old, bool)
        else old + data.draw(st.integers(1, 1000))
        if isinstance(old, int)
        else _flipped(old, data.draw(st.integers(0, 511)))
    )
    # Only the last signature of a witness that nobody asks for may be anything.
    unasked = name in ("witness", "witness_key") and not (at % 2)
    chain[at] = msgspec.structs.replace(chain[at], **{name: new})
    if not unasked:
        assert denial(tuple(chain), BEN) == BAD_CERTIFICATE


def _flipped(data: bytes, bit: int) -> bytes:
    if not data:
        return b"\x01"
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


# Strangers' bytes.


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_nonsense_raises_value_error_and_nothing_else(data: bytes) -> None:
    for decode in (decode_chain, decode_revocations, decode_redemptions):
        with contextlib.suppress(ValueError):
            decode(data)
    with contextlib.suppress(ValueError):
        parse_ticket(data.decode("latin-1"))


def test_texts_and_bytes_come_back_and_oversized_ones_are_refused() -> None:
    ticket = invite(CREATOR, (), 1)
    assert parse_ticket(ticket_text(ticket)) == ticket
    chain = admitted(ticket, ANNA)
    assert decode_chain(encode_chain(chain)) == chain
    assert decode_revocations(encode_revocations(revoke(CREATOR, RUN, 1, [ANNA.peer_id]))).seq == 1
    with pytest.raises(ValueError, match="more than"):
        decode_chain(bytes(MAX_CHAIN_BYTES + 1))
    with pytest.raises(ValueError, match="too long"):
        parse_ticket("A" * 20_000)
    swapped = Ticket(bytes(32), ticket.chain)
    with pytest.raises(ValueError, match="belong"):
        parse_ticket(ticket_text(swapped))
    with pytest.raises(ValueError, match="1025"):
        revoke(CREATOR, RUN, 1, [number.to_bytes(32, "big") for number in range(1025)])


# Redeeming.


def test_a_ticket_is_redeemed_once_and_the_same_peer_may_ask_again() -> None:
    redemptions = Redemptions()
    ticket = invite(CREATOR, (), 1)

    def ask(peer: Identity, now: float = NOW) -> Chain:
        return redemptions.redeem(REDEEMER, CHARTER, claim(ticket, peer.peer_id), peer.peer_id, now, NOBODY)

    assert denial(ask(ANNA), ANNA) == ""
    assert ask(ANNA) == ask(ANNA)
    kept = decode_redemptions(redemptions.encode())
    for held in (redemptions, kept):
        with pytest.raises(Refusal, match=USED):
            held.redeem(REDEEMER, CHARTER, claim(ticket, BEN.peer_id), BEN.peer_id, NOW, NOBODY)
    with pytest.raises(Refusal, match=EXPIRED):
        ask(ANNA, NOW + 3600 + REDEEM_SKEW_S + 1)


def test_a_ticket_for_none_for_others_or_of_the_revoked_is_not_redeemed() -> None:
    redemptions = Redemptions()
    ticket = invite(CREATOR, (), 1)
    chain = claim(ticket, ANNA.peer_id)
    with pytest.raises(Refusal, match=BAD_CERTIFICATE):
        redemptions.redeem(BEN, CHARTER, chain, ANNA.peer_id, NOW, NOBODY)
    with pytest.raises(Refusal, match=BAD_CERTIFICATE):
        redemptions.redeem(REDEEMER, CHARTER, chain, BEN.peer_id, NOW, NOBODY)
    with pytest.raises(Refusal, match=REVOKED):
        redemptions.redeem(REDEEMER, CHARTER, chain, ANNA.peer_id, NOW, frozenset({ticket.chain[-1].subject}))
    nothing = invite(CREATOR, (), 2, uses=0)
    with pytest.raises(Refusal, match=USED):
        redemptions.redeem(REDEEMER, CHARTER, claim(nothing, ANNA.peer_id), ANNA.peer_id, NOW, NOBODY)
    assert redemptions.used == {}


class RedeemingMachine(RuleBasedStateMachine):
    """Whoever asks in whatever order: never more peers than uses, and nobody loses what was given."""

    def __init__(self) -> None:
        super().__init__()
        self.redemptions = Redemptions()
        self.tickets = [invite(CREATOR, (), number, uses=number) for number in (1, 2, 3)]
        self.given: dict[int, set[bytes]] = {0: set(), 1: set(), 2: set()}

    @rule(which=st.integers(0, 2), who=st.integers(200, 206))
    def redeem(self, which: int, who: int) -> None:
        peer = identity(who)
        may = peer.peer_id in self.given[which] or len(self.given[which]) < which + 1
        chain = claim(self.tickets[which], peer.peer_id)
        with contextlib.nullcontext() if may else pytest.raises(Refusal, match=USED):
            chain = self.redemptions.redeem(REDEEMER, CHARTER, chain, peer.peer_id, NOW, NOBODY)
            assert denial(chain, peer) == ""
            self.given[which].add(peer.peer_id)

    @rule()
    def restart(self) -> None:
        self.redemptions = decode_redemptions(self.redemptions.encode())

    @invariant()
    def counts(self) -> None:
        assert all(len(given) <= which + 1 for which, given in self.given.items())


class RevokingMachine(RuleBasedStateMachine):
    """Lists that arrive late, twice or forged: the newest genuine one holds, for members and for their guests."""

    def __init__(self) -> None:
        super().__init__()
        anna = admitted(invite(CREATOR, (), 1, may_invite=True), ANNA)
        self.chains = {
            ANNA: anna,
            BEN: admitted(invite(ANNA, anna, 2), BEN),
            CARA: admitted(invite(CREATOR, (), 3), CARA),
        }
        self.admission = Admission(CHARTER, REDEEMER.peer_id)
        self.newest = 0
        self.out: set[Identity] = set()

    @rule(seq=st.integers(1, 12), forged=st.booleans(), who=st.sets(st.sampled_from([ANNA, BEN, CARA])))
    def hear(self, seq: int, forged: bool, who: set[Identity]) -> None:
        who = who or {CARA}
        signer = BEN if forged else CREATOR
        taken = self.admission.take(revoke(signer, RUN, seq, [peer.peer_id for peer in who]))
        if forged or seq < self.newest:
            assert taken is None
        elif seq > self.newest:
            assert taken is not None
            self.newest, self.out = seq, who
        elif taken is not None:
            assert len(who) >= len(self.out)
            self.out = who

    @rule(who=st.sampled_from([ANNA, BEN, CARA]))
    def introduce(self, who: Identity) -> None:
        is_out = who in self.out or (who is BEN and ANNA in self.out)
        with pytest.raises(Refusal, match=REVOKED) if is_out else contextlib.nullcontext():
            self.admission.admit(who.peer_id, self.chains[who], NOW)
        if is_out:
            assert self.admission.may_read(who.peer_id, NOW)  # so that it learns why, from the creator's signature

    @invariant()
    def nobody_is_in_who_is_out(self) -> None:
        for who in (ANNA, BEN, CARA):
            if who in self.out or (who is BEN and ANNA in self.out):
                assert not self.admission.is_admitted(who.peer_id, NOW)


TestRedeeming = RedeemingMachine.TestCase
TestRedeeming.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestRevoking = RevokingMachine.TestCase
TestRevoking.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


def test_lists_and_open_doors_go_by_the_peer_id() -> None:
    listed = Admission(
        Charter(RUN, CREATOR.public_key, AdmissionMode.ALLOWLIST, frozenset({ANNA.peer_id})), BEN.peer_id
    )
    assert listed.is_admitted(ANNA.peer_id, NOW)
    assert listed.is_admitted(CREATOR.peer_id, NOW)
    with pytest.raises(Refusal, match=NOT_LISTED):
        listed.require_self(NOW)
    assert listed.take(revoke(CREATOR, RUN, 1, [ANNA.peer_id]))
    with pytest.raises(Refusal, match=REVOKED):
        listed.require(ANNA.peer_id, NOW)
    anyone = Admission(Charter(RUN, CREATOR.public_key, AdmissionMode.OPEN), BEN.peer_id)
    assert anyone.is_admitted(CARA.peer_id, NOW)


# The gate.


class Number(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    value: int


DOUBLE = Method("double", Number, Number)
RAW = Method("raw", bytes, bytes)


class NoDiscovery:
    """Finds what it was given."""

    def __init__(self) -> None:
        self.records: list[SignedRecord] = []

    async def announce_run(self, run: RunPayload) -> None: ...

    async def find_runs(self, name: str | None) -> list[FoundRun]:
        return []

    async def announce_peer(self, record: SignedRecord) -> None:
        self.records.append(record)

    async def find_peers(self, run_id: bytes) -> list[SignedRecord]:
        return list({record.author(): record for record in self.records}.values())


@dataclass
class Peer:
    """An endpoint with the gate of a run."""

    identity: Identity
    endpoint: Endpoint
    gate: Gate
    contact: Contact
    answered: list[bytes]


async def start(nursery: trio.Nursery, network: MemoryNetwork, who: Identity, number: int, chain: Chain = ()) -> Peer:
    host = f"10.0.0.{number}"
    endpoint = Endpoint(who, network.transport(who, host))
    [address] = await nursery.start(endpoint.run, [Address(host, 4000)])
    gate = Gate(endpoint, Admission(CHARTER, who.peer_id, chain), rng=random.Random(number), clock=lambda: NOW)
    answered: list[bytes] = []

    async def double(remote: bytes, request: Number) -> Number:
        answered.append(remote)
        return Number(2 * request.value)

    gate.handle(DOUBLE, double)
    return Peer(who, endpoint, gate, Contact(who.peer_id, (address,)), answered)


def run_virtual(scenario: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(3600):
            async with trio.open_nursery() as nursery:
                await scenario(nursery)
                nursery.cancel_scope.cancel()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))


def test_members_call_each_other_and_strangers_reach_no_handler() -> None:
    async def scenario(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        server = await start(nursery, network, CREATOR, 1)
        anna = await start(nursery, network, ANNA, 2, admitted(invite(CREATOR, (), 1), ANNA))
        ben = await start(nursery, network, BEN, 3)
        assert await anna.gate.call(server.contact, DOUBLE, Number(4)) == Number(8)
        assert await server.gate.call(anna.contact, DOUBLE, Number(5)) == Number(10)
        with pytest.raises(Refusal, match=NO_INVITE):
            await ben.gate.call(server.contact, DOUBLE, Number(4))
        with pytest.raises(Refusal, match=NOT_INTRODUCED):  # without a word of introduction
            await ben.endpoint.call(server.contact, DOUBLE, Number(4))
        with pytest.raises(NotAMember, match=NO_INVITE):  # and nobody gives anything to one
            await anna.gate.call(ben.contact, DOUBLE, Number(4))
        assert server.answered == [ANNA.peer_id]
        assert ben.answered == []

    run_virtual(scenario)


def test_a_peer_that_restarts_is_introduced_again() -> None:
    async def scenario(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        server = await start(nursery, network, CREATOR, 1)
        anna = await start(nursery, network, ANNA, 2, admitted(invite(CREATOR, (), 1), ANNA))
        await anna.gate.call(server.contact, DOUBLE, Number(1))
        await server.endpoint.aclose()
        again = await start(nursery, network, CREATOR, 1)
        assert await anna.gate.call(again.contact, DOUBLE, Number(2)) == Number(4)

    run_virtual(scenario)


def test_a_stream_to_a_peer_that_restarted_fails_once() -> None:
    async def scenario(nursery: trio.Nursery) -> None:
        async def take(anna: Peer, server: Peer) -> bytes:
            async with anna.gate.stream(server.contact, RAW, b"x") as parts:
                return b"".join([part async for part in parts])

        async def echo(remote: bytes, request: bytes) -> bytes:
            return request

        network = MemoryNetwork()
        server = await start(nursery, network, CREATOR, 1)
        server.gate.handle(RAW, echo)
        anna = await start(nursery, network, ANNA, 2, admitted(invite(CREATOR, (), 1), ANNA))
        assert await take(anna, server) == b"x"
        await server.endpoint.aclose()
        again = await start(nursery, network, CREATOR, 1)
        again.gate.handle(RAW, echo)
        with pytest.raises(Refusal, match=NOT_INTRODUCED):
            await take(anna, again)
        assert await take(anna, again) == b"x"

    run_virtual(scenario)


def test_an_invite_is_redeemed_over_the_wire_once() -> None:
    async def scenario(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        door = issue_ticket(CREATOR, (), RUN, bytes([7]) * 32, not_after=NOW + YEAR)
        server = await start(nursery, network, REDEEMER, 1, claim(door, REDEEMER.peer_id))
        saved: list[bytes] = []

        async def save(data: bytes) -> None:
            saved.append(data)

        Redeemer(server.endpoint, REDEEMER, server.gate.admission, Redemptions(), save=save, clock=lambda: float(NOW))
        anna, ben = [await start(nursery, network, who, n) for n, who in ((2, ANNA), (3, BEN))]
        ticket = invite(CREATOR, (), 1)
        with pytest.raises(Refusal, match=NO_INVITE):
            await anna.gate.call(server.contact, DOUBLE, Number(1))
        anna.gate.admission.chain = await redeem(anna.endpoint, server.contact, CHARTER, ticket)
        assert await anna.gate.call(server.contact, DOUBLE, Number(1)) == Number(2)
        with pytest.raises(Refusal, match=USED):
            await redeem(ben.endpoint, server.contact, CHARTER, ticket)
        assert len(saved) == 1
        assert ticket.seed not in saved[0]

    run_virtual(scenario)


def test_gossip_is_among_members_and_a_revoked_one_is_forgotten_within_an_interval() -> None:
    async def scenario(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        members = [CREATOR] + [identity(300 + number) for number in range(5)]
        discovery = NoDiscovery()
        peers: list[Peer] = []
        tables: list[Membership] = []
        for number, who in enumerate(members, 1):
            chain = () if who is CREATOR else admitted(invite(CREATOR, (), number), who)
            peers.append(await start(nursery, network, who, number, chain))
        stranger = await start(nursery, network, ANNA, 50)
        for peer in [*peers, stranger]:
            table = Membership(
                peer.gate,
                peer.identity,
                RUN,
                discovery=discovery,
                rng=random.Random(peer.identity.peer_id),
                addresses=peer.contact.addresses,
                vouch=peer.gate.vouch,
            )
            peer.gate.on_out = table.forget
            table.publish(PeerState.TRAINING, b"")
            await nursery.start(table.run)
            nursery.start_soon(peer.gate.run, lambda table=table: [m.contact for m in table.live()])
            tables.append(table)
        await trio.sleep(60)
        ids = {peer.identity.peer_id for peer in peers}
        for peer, table in zip(peers, tables, strict=False):
            assert {m.contact.peer_id for m in table.live()} == ids - {peer.identity.peer_id}
        assert tables[-1].members() == []
        with pytest.raises(Refusal, match=NO_INVITE):
            await list_members(stranger.gate, peers[0].contact, RUN)

        out = peers[-1]
        expelled = trio.Event()
        out.gate.on_expelled = expelled.set
        peers[1].gate.take_news(revoke(CREATOR, RUN, 1, [out.identity.peer_id]))
        await trio.sleep(6)
        for table in tables[: len(peers) - 1]:
            assert out.identity.peer_id not in {m.contact.peer_id for m in table.members()}
        with pytest.raises((Refusal, NotAMember)):
            await out.gate.call(peers[0].contact, DOUBLE, Number(1))
        await expelled.wait()
        with pytest.raises(NotAMember, match=REVOKED):
            await peers[2].gate.call(out.contact, DOUBLE, Number(1))
        assert await peers[2].gate.call(peers[3].contact, DOUBLE, Number(1)) == Number(2)
        await trio.sleep(120)  # nobody brings it back
        assert out.identity.peer_id not in {m.contact.peer_id for m in tables[0].members()}

    run_virtual(scenario)
