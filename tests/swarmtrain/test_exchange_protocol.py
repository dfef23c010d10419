"""Peers meet over the in-memory network: what an exchange does, and what every broken one leaves behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from numpy.typing import NDArray
from swarm_peer.addresses import Address, Contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import BlobUnavailable, Disconnected, PeerError, Refusal
from swarm_peer.identity import Identity
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link

from swarmtrain.exchange import MAX_COUNTED_OUTCOMES, Exchanger
from swarmtrain.exchange_messages import (
    APPLY,
    CANCEL,
    COMMIT,
    OPEN,
    ApplyRequest,
    CancelRequest,
    CommitRequest,
    Done,
    Offer,
    OpenReply,
    OpenRequest,
)
from swarmtrain.exchange_session import ExchangeConfig, ExchangeFailed, Report
from swarmtrain.layout import FlatLayout, bf16_to_fp32, fp32_to_bf16
from swarmtrain.mixing import Effort
from swarmtrain.partner_standing import MAX_BACKOFFS
from swarmtrain.snapshots import Payload, SnapshotLibrary, encode_payload, take_snapshot
from swarmtrain.trainer_link import ClosedRound, MixOrder, TrainerGone

LAYOUT = FlatLayout.of([("model.embed_tokens.weight", (64, 16)), ("model.norm.weight", (16,))])
RUN_ID = bytes(range(32))
GENESIS = take_snapshot(LAYOUT, np.zeros(LAYOUT.size, np.uint16))
BOUNDARY_S, TRANSFER_S, BACKOFF_S = 10.0, 60.0, 15.0


async def inline(function: Callable[..., Any], /, *args: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


class SteeredTrainer:
    """A `TrainerPort` whose replica is still, and whose rounds end when a test or a partner says so."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        self.phi = weights.astype(np.float32)
        self.round, self.step, self.round_steps = 0, 100, 10
        self.effort = Effort(1000, 10)
        self.drift = 1.0
        self.answers = True  # False: the trainer never reaches its step boundary
        self.gone = False
        self.mix_gate: trio.Event | None = None
        self.pins: Counter[int] = Counter()
        self.closed_for_partner = self.abandoned = 0
        self.mixes: list[MixOrder] = []
        self._latest: ClosedRound | None = None
        self._changed = trio.Condition()

    async def end_round(self) -> None:
        self.round += 1
        bits = fp32_to_bf16(self.phi)
        norms = dict.fromkeys(LAYOUT.groups(), self.drift)
        self._latest = ClosedRound(self.round, self.step, self.round_steps, self.effort, norms, bits, slot=self.round)
        async with self._changed:
            self._changed.notify_all()

    async def die(self) -> None:
        self.gone = True
        async with self._changed:
            self._changed.notify_all()

    async def next_round(self, after: int) -> ClosedRound:
        async with self._changed:
            while self._latest is None or self._latest.round <= after:
                if self.gone:
                    raise TrainerGone
                await self._changed.wait()
            self.pins[self._latest.slot] += 1
            return self._latest

    async def close_round(self) -> ClosedRound:
        if self.gone:
            raise TrainerGone
        if not self.answers:
            await trio.sleep_forever()
        self.closed_for_partner += 1
        after = self.round
        await self.end_round()
        return await self.next_round(after)

    def release(self, closed: ClosedRound) -> None:
        self.pins[closed.slot] -= 1
        assert self.pins[closed.slot] >= 0, "released twice"

    def abandon(self, closed: ClosedRound) -> None:
        assert self.pins[closed.slot] > 0
        self.abandoned += 1

    async def mix(self, closed: ClosedRound, partner: NDArray[np.uint16], order: MixOrder) -> None:
        assert self.pins[closed.slot] > 0
        if self.mix_gate is not None:
            await self.mix_gate.wait()
        if self.gone:
            raise TrainerGone
        D = bf16_to_fp32(partner) - bf16_to_fp32(closed.bits)
        for group, parts in LAYOUT.groups().items():
            for part in parts:
                self.phi[part] += np.float32(order.weight * order.factors[group]) * D[part]
        self.step = max(self.step, order.partner_step)
        self.mixes.append(order)

    async def adopt(self, bits: NDArray[np.uint16], step: int) -> None:
        raise NotImplementedError


class SharedBlobs:
    """`Blobs` that travel through a dictionary, with the time that a link would take.  `lies` replaces contents."""

    def __init__(self, board: dict[bytes, dict[bytes, bytes]], owner: bytes) -> None:
        self.board, self.owner = board, owner
        self.mine = board.setdefault(owner, {})
        self.pins: Counter[bytes] = Counter()
        self.seconds = 1.0
        self.fail: BaseException | None = None

    def put(self, data: bytes) -> bytes:
        if self.fail:
            raise self.fail
        name = len(self.pins).to_bytes(32, "big")
        self.mine[name] = data
        self.pins[name] += 1
        return name

    def discard(self, blob_id: bytes) -> None:
        self.pins[blob_id] -= 1
        assert self.pins[blob_id] == 0, "discarded twice"
        del self.mine[blob_id]

    async def fetch(self, blob_id: bytes, holder: Contact, *, max_size_bytes: int, deadline_s: float) -> bytes:
        with trio.move_on_after(deadline_s):
            await trio.sleep(self.seconds)
            data = self.board.get(holder.peer_id, {}).get(blob_id)
            if data is None or len(data) > max_size_bytes:
                raise BlobUnavailable("not there")
            return data
        raise BlobUnavailable("too slow")


@dataclass
class Known:
    """`Partners` from a list."""

    contacts: list[Contact] = field(default_factory=list)
    median: int | None = None

    def candidates(self) -> list[Contact]:
        return self.contacts

    def contact(self, peer_id: bytes) -> Contact:
        return next((c for c in self.contacts if c.peer_id == peer_id), Contact(peer_id, ()))

    def swarm_step(self) -> int | None:
        return self.median


class Peer:
    """An honest peer, and what can be asked of it afterwards."""

    def __init__(self, bench: Bench, name: str, weights: NDArray[np.float32]) -> None:
        self.bench, self.name = bench, name
        self.identity = Identity.from_seed(name.encode().ljust(32, b"\0"))
        self.host = f"10.0.0.{len(bench.peers) + 1}"
        self.endpoint = Endpoint(self.identity, bench.network.transport(self.identity, self.host))
        self.contact = Contact(self.identity.peer_id, (Address(self.host, 7000),))
        self.trainer = SteeredTrainer(weights)
        self.blobs = SharedBlobs(bench.board, self.identity.peer_id)
        self.known = Known()
        self.library = SnapshotLibrary(LAYOUT)
        self.library.add(GENESIS)
        self.reports: list[Report] = []
        self.reported = trio.Condition()
        self.scope = trio.CancelScope()
        self.exchanger: Exchanger | None = None

    async def run(self, *, honest: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, [Address(self.host, 7000)])
                if honest:
                    self.exchanger = Exchanger(
                        self.endpoint,
                        config=ExchangeConfig(
                            run_id=RUN_ID,
                            staleness_cutoff=4,
                            outer_gain=1.4,
                            boundary_deadline_s=BOUNDARY_S,
                            transfer_deadline_s=TRANSFER_S,
                            backoff_s=BACKOFF_S,
                        ),
                        trainer=self.trainer,
                        partners=self.known,
                        blobs=self.blobs,
                        library=self.library,
                        rng=random.Random(self.name),
                        offload=inline,
                    )
                    self.exchanger.on_report = self.reports.append
                    await nursery.start(self.exchanger.run)
                task_status.started()
                await trio.sleep_forever()

    async def wait_for_reports(self, count: int) -> list[str]:
        with trio.fail_after(1000):
            while len(self.reports) < count:  # noqa: ASYNC110  # virtual time
                await trio.sleep(0.1)
        return [report.outcome for report in self.reports]

    def is_idle(self) -> bool:
        exchanger = self.exchanger
        assert exchanger is not None
        return not exchanger._busy and exchanger._incoming is None and not +self.trainer.pins and not +self.blobs.pins

    # As an adversary, speaking the messages directly.

    def offer(self, bits: NDArray[np.uint16], **changes: Any) -> Offer:
        values = {
            "run_id": RUN_ID,
            "snapshot": take_snapshot(LAYOUT, bits).hash,
            "step": 100,
            "round_steps": 10,
            "tokens": 1000,
            "steps": 10,
            "haves": (GENESIS.hash,),
        }
        return Offer(**{**values, **changes})

    def payload(self, bits: NDArray[np.uint16], *, name: bytes | None = None) -> Payload:
        snapshot = take_snapshot(LAYOUT, bits)
        data = encode_payload(LAYOUT, snapshot, []).data
        return Payload(name or snapshot.hash, b"", self.blobs.put(data), len(data))

    async def open(self, other: Peer, bits: NDArray[np.uint16], **changes: Any) -> tuple[bytes, OpenReply]:
        session = random.Random(repr(trio.current_time())).randbytes(16)
        request = OpenRequest(session, self.offer(bits, **changes))
        return session, await self.endpoint.call(other.contact, OPEN, request, deadline_s=BOUNDARY_S)

    async def commit(self, other: Peer, session: bytes, payload: Payload) -> None:
        await self.endpoint.call(other.contact, COMMIT, CommitRequest(session, payload), deadline_s=TRANSFER_S)

    async def apply(self, other: Peer, session: bytes) -> None:
        await self.endpoint.call(other.contact, APPLY, ApplyRequest(session), deadline_s=BOUNDARY_S)


class Bench:
    """A network, a board of blobs, and peers."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(seed=1, link=Link(latency_s=0.02))
        self.board: dict[bytes, dict[bytes, bytes]] = {}
        self.peers: list[Peer] = []

    async def peer(self, name: str, seed: int, *, honest: bool = True) -> Peer:
        peer = Peer(self, name, weights(seed))
        self.peers.append(peer)
        await self.nursery.start(_start(peer, honest))
        for one in self.peers:
            one.known.contacts = [other.contact for other in self.peers if other is not one]
        return peer


def _start(peer: Peer, honest: bool) -> Callable[..., Awaitable[None]]:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        await peer.run(honest=honest, task_status=task_status)

    return start


def weights(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(LAYOUT.size).astype(np.float32) * np.float32(0.02)


def bits_of(seed: int) -> NDArray[np.uint16]:
    return fp32_to_bf16(weights(seed))


def virtually(body: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await body(Bench(nursery))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(Refusal) as caught:
        yield
    assert caught.value.code == code


async def assert_can_exchange(initiator: Peer, responder: Peer) -> None:
    """The proof that nothing was left behind: the next exchange works."""
    assert responder.is_idle()
    await trio.sleep(1000)  # beyond every pause and ration
    before = len(responder.trainer.mixes)
    for peer in (initiator, responder):
        peer.known.contacts = [other.contact for other in (initiator, responder) if other is not peer]
    await initiator.trainer.end_round()
    with trio.fail_after(200):
        while len(responder.trainer.mixes) == before or not initiator.is_idle():  # noqa: ASYNC110  # virtual time
            await trio.sleep(0.1)
    assert responder.is_idle()


# ------------------------------------------------------------------------------------------------------- as it should


def test_both_apply_the_mirror_image_and_the_mean_stays() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        before = a.trainer.phi.copy(), b.trainer.phi.copy()
        D = bf16_to_fp32(fp32_to_bf16(before[1])) - bf16_to_fp32(fp32_to_bf16(before[0]))
        await a.trainer.end_round()
        assert await a.wait_for_reports(1) == ["mixed"]
        assert await b.wait_for_reports(1) == ["mixed"]
        order_a, order_b = a.trainer.mixes[0], b.trainer.mixes[0]
        assert order_a.weight == order_b.weight == 0.5
        assert order_a.factors == order_b.factors
        factors = np.concatenate(
            [np.full(s.stop - s.start, order_a.factors[s.group], np.float32) for s in LAYOUT.spans]
        )
        np.testing.assert_array_equal(a.trainer.phi, before[0] + np.float32(0.5) * factors * D)
        np.testing.assert_array_equal(b.trainer.phi, before[1] - np.float32(0.5) * factors * D)
        np.testing.assert_allclose(a.trainer.phi + b.trainer.phi, before[0] + before[1], atol=1e-8)
        assert (a.reports[0].initiated, b.reports[0].initiated) == (True, False)
        assert a.reports[0].partner == b.identity.peer_id
        assert a.reports[0].payload_bytes_sent == b.reports[0].payload_bytes_received > 0
        assert a.is_idle()
        assert b.is_idle()
        # Both now hold the pair, so the next meeting can patch.
        assert set(a.library.names()) == set(b.library.names())
        assert len(a.library.names()) == 3

    virtually(body)


def test_the_second_meeting_sends_a_patch_against_the_first() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 1)
        b.trainer.phi[::50] += np.float32(0.01)
        for count in (1, 2):
            await trio.sleep(100)
            a.trainer.phi[::40] += np.float32(0.001)
            await a.trainer.end_round()
            assert await a.wait_for_reports(count) == ["mixed"] * count
        assert a.reports[1].patch
        assert a.reports[1].payload_bytes_sent < a.reports[0].payload_bytes_sent / 3

    virtually(body)


def test_unequal_effort_and_staleness_set_the_weight() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        a.trainer.effort, b.trainer.effort = Effort(3000, 10), Effort(1000, 10)
        a.trainer.step = 120
        await a.trainer.end_round()
        await a.wait_for_reports(1)
        await b.wait_for_reports(1)
        assert a.reports[0].staleness == 2
        assert b.reports[0].staleness == 0
        assert a.trainer.mixes[0].weight == pytest.approx(0.5 * 0.25 / 3)  # rel 0.2, capped to 0.25; two rounds stale
        assert b.trainer.mixes[0].weight == pytest.approx(0.5 * 1.5)  # rel 1.8, capped

    virtually(body)


def test_simultaneous_opens_end_with_an_exchange() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.trainer.end_round)
            nursery.start_soon(b.trainer.end_round)
        with trio.fail_after(60):
            while not (a.trainer.mixes and b.trainer.mixes):  # noqa: ASYNC110  # virtual time
                await trio.sleep(0.1)
        await trio.sleep(30)
        assert a.exchanger is not None
        assert b.exchanger is not None
        assert a.exchanger.counts["busy"] >= 1
        assert b.exchanger.counts["busy"] >= 1
        assert len(a.trainer.mixes) == len(b.trainer.mixes)
        assert a.is_idle()
        assert b.is_idle()

    virtually(body)


def test_without_partners_a_round_is_abandoned() -> None:
    async def body(bench: Bench) -> None:
        a = await bench.peer("a", 1)
        await a.trainer.end_round()
        await trio.sleep(1)
        assert a.trainer.abandoned == 1
        assert a.is_idle()

    virtually(body)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_busy_peer_refuses_at_once() -> None:
    async def body(bench: Bench) -> None:
        a = await bench.peer("a", 1)
        b, c = await bench.peer("b", 2, honest=False), await bench.peer("c", 3, honest=False)
        session, _ = await b.open(a, bits_of(2))
        started = trio.current_time()
        with refused("busy"):
            await c.open(a, bits_of(3))
        assert trio.current_time() - started < 1.0
        assert a.trainer.closed_for_partner == 1
        await b.endpoint.call(a.contact, CANCEL, CancelRequest(session, "enough"))
        assert a.is_idle()

    virtually(body)


def test_another_run_is_refused_before_the_round_is_closed() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        with refused("other-run"):
            await b.open(a, bits_of(2), run_id=bytes(32))
        assert a.trainer.closed_for_partner == 0
        assert a.is_idle()

    virtually(body)


def test_others_may_not_close_rounds_more_often_than_the_ration_allows() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        a.known.contacts = []
        await trio.sleep(100)
        await a.trainer.end_round()  # a round takes 100 s here, the ration is a quarter of that
        await trio.sleep(1)
        assert a.exchanger is not None
        assert a.exchanger._pace.seconds == pytest.approx(100, abs=1)
        attempts, codes = 0, set()
        for _ in range(200):
            try:
                session, _ = await b.open(a, bits_of(2))
                await b.endpoint.call(a.contact, CANCEL, CancelRequest(session, "enough"))
                attempts += 1
            except Refusal as refusal:
                codes.add(refusal.code)
            await trio.sleep(1)
        assert codes == {"too-soon"}
        assert a.trainer.closed_for_partner == attempts <= 9
        # What partners do to our rounds must not make them look short.
        assert a.exchanger._pace.seconds == pytest.approx(100, abs=1)

    virtually(body)


def test_a_stale_partner_learns_it_and_wants_to_catch_up() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        b.trainer.step = 100 + 5 * 10
        await a.trainer.end_round()
        assert (await a.wait_for_reports(1))[0] == "stale"
        assert a.exchanger is not None
        assert a.exchanger.catch_up_wanted.is_set()
        assert not b.trainer.mixes
        assert b.trainer.abandoned >= 1
        await trio.sleep(10)
        a.trainer.step = 150
        await assert_can_exchange(a, b)

    virtually(body)


def test_a_stale_partner_is_not_mixed_and_is_let_go() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        a.trainer.step = 150
        await a.trainer.end_round()
        assert (await a.wait_for_reports(1))[0] == "partner-stale"
        await trio.sleep(1)
        assert b.is_idle()
        assert b.exchanger is not None
        assert b.exchanger.catch_up_wanted.is_set()
        assert not a.trainer.mixes
        assert not b.trainer.mixes

    virtually(body)


def test_a_peer_ahead_of_all_others_still_meets_them() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        a.trainer.step, a.known.median = 1000, 110
        await a.trainer.end_round()
        assert await a.wait_for_reports(1) == ["mixed"]
        assert a.reports[0].staleness == 1  # behind the median
        assert b.trainer.mixes[0].partner_step == 110  # and it cannot drag others along
        assert a.trainer.mixes[0].partner_step == 100

    virtually(body)


def test_a_claimed_round_length_does_not_hide_staleness() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        a.known.contacts = []
        a.trainer.step = 1000
        await trio.sleep(10)
        await a.trainer.end_round()
        await trio.sleep(10)
        with refused("stale"):
            await b.open(a, bits_of(2), step=0, round_steps=2**60)
        assert a.is_idle()

    virtually(body)


@pytest.mark.parametrize(
    ("own", "median", "expected"), [(100, 100, 110), (100, None, 110), (100, 150, 160), (300, 150, 300)]
)
def test_an_absurd_step_moves_the_schedule_at_most_a_round_past_the_median(
    own: int, median: int | None, expected: int
) -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        a.known.median, a.trainer.step = median, own
        session, _ = await b.open(a, bits_of(2), step=2**60)
        await b.commit(a, session, b.payload(bits_of(2)))
        await b.apply(a, session)
        assert a.trainer.mixes[0].partner_step == expected

    virtually(body)


# ------------------------------------------------------------------------------------- hostile or unlucky initiators


@pytest.mark.parametrize("when", ["opened", "committed"])
@pytest.mark.parametrize("how", ["silent", "crash", "cancel"])
def test_an_initiator_that_goes_away_is_forgotten_in_time(when: str, how: str) -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        before = a.trainer.phi.copy()
        session, _ = await mallory.open(a, bits_of(3))
        if when == "committed":
            await mallory.commit(a, session, mallory.payload(bits_of(3)))
        if how == "crash":
            bench.network.crash(mallory.host)
            mallory.scope.cancel()
        elif how == "cancel":
            await mallory.endpoint.call(a.contact, CANCEL, CancelRequest(session, "enough"))
        limit_s = 1.0 if how == "cancel" else BOUNDARY_S + (TRANSFER_S if when == "committed" else 0.0) + 1.0
        with trio.fail_after(limit_s):
            assert await a.wait_for_reports(1) == ["cancelled" if how == "cancel" else "initiator-vanished"]
        assert a.is_idle()
        assert a.trainer.abandoned >= 1
        np.testing.assert_array_equal(a.trainer.phi, before)
        if how == "silent":
            with refused("no-session"):
                await mallory.apply(a, session)
            with refused("too-soon"):
                await mallory.open(a, bits_of(3))
        await assert_can_exchange(b, a)

    virtually(body)


def test_an_initiator_that_dies_during_the_transfer_frees_its_partner_at_once() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        a.blobs.seconds = 30.0
        session, _ = await mallory.open(a, bits_of(3))
        with trio.move_on_after(5.0):
            await mallory.commit(a, session, mallory.payload(bits_of(3)))
        await trio.sleep(1)
        assert [report.outcome for report in a.reports] == ["commit-interrupted"]
        assert a.is_idle()
        a.blobs.seconds = 1.0
        await assert_can_exchange(b, a)

    virtually(body)


def _payload_that_is(kind: str, mallory: Peer) -> tuple[NDArray[np.uint16], Payload]:
    good = bits_of(3)
    if kind == "wrong-snapshot-hash":
        return good, mallory.payload(bits_of(4), name=take_snapshot(LAYOUT, good).hash)
    if kind == "not-finite":
        bad = good.copy()
        bad[7] = 0x7FC0
        return bad, mallory.payload(bad)
    payload = mallory.payload(good)
    if kind == "oversized-payload":
        return good, Payload(payload.snapshot, b"", payload.blob, 1 << 40)
    if kind == "malformed-payload":
        mallory.blobs.mine[payload.blob] = mallory.blobs.mine[payload.blob][:-3]
        return good, payload
    if kind == "unknown-base":
        return good, Payload(payload.snapshot, bytes(32), payload.blob, payload.size_bytes)
    if kind == "inconsistent-commit":
        return good, Payload(bytes(32), b"", payload.blob, payload.size_bytes)
    if kind == "blobunavailable":
        return good, Payload(payload.snapshot, b"", b"x" * 32, payload.size_bytes)
    raise AssertionError(kind)


BAD_PAYLOADS = [
    "wrong-snapshot-hash",
    "not-finite",
    "oversized-payload",
    "malformed-payload",
    "unknown-base",
    "inconsistent-commit",
    "blobunavailable",
]


@pytest.mark.parametrize("kind", BAD_PAYLOADS)
def test_a_bad_commit_ends_the_session_and_nothing_else(kind: str) -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        before = a.trainer.phi.copy()
        bits, payload = _payload_that_is(kind, mallory)
        session, _ = await mallory.open(a, bits)
        with refused(kind):
            await mallory.commit(a, session, payload)
        assert [report.outcome for report in a.reports] == [kind]
        assert a.exchanger is not None
        assert a.exchanger.counts[kind] == 1
        with refused("no-session"):
            await mallory.apply(a, session)
        np.testing.assert_array_equal(a.trainer.phi, before)
        await assert_can_exchange(b, a)

    virtually(body)


def test_a_huge_norm_is_clipped_first_and_refused_once_there_is_a_history() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        a.known.contacts = [b.contact]
        for count in range(1, 21):
            a.trainer.phi, b.trainer.phi = weights(2 * count), weights(2 * count + 1)
            await trio.sleep(100)
            await a.trainer.end_round()
            assert (await a.wait_for_reports(count))[-1] == "mixed"
        before = a.trainer.phi.copy()
        huge = fp32_to_bf16(weights(3) * np.float32(1000))
        await trio.sleep(100)
        session, _ = await mallory.open(a, huge)
        with refused("norm-outlier"):
            await mallory.commit(a, session, mallory.payload(huge))
        np.testing.assert_array_equal(a.trainer.phi, before)
        await assert_can_exchange(b, a)

    virtually(body)


def test_a_snapshot_is_applied_once_however_often_it_is_asked_for() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        session, _ = await mallory.open(a, bits_of(3))
        await mallory.commit(a, session, mallory.payload(bits_of(3)))
        a.trainer.mix_gate = trio.Event()
        outcomes: list[str] = []

        async def attempt() -> None:
            try:
                await mallory.apply(a, session)
                outcomes.append("applied")
            except PeerError as error:
                outcomes.append(getattr(error, "code", "?"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(attempt)
            await trio.sleep(1)
            with refused("no-session"):
                await mallory.endpoint.call(a.contact, CANCEL, CancelRequest(session, "enough"))
            with refused("no-session"):
                await mallory.commit(a, session, mallory.payload(bits_of(3)))
            a.trainer.mix_gate.set()
        a.trainer.mix_gate = None
        assert sorted(outcomes) == ["applied"] + ["no-session"] * 4
        assert len(a.trainer.mixes) == 1
        await assert_can_exchange(b, a)

    virtually(body)


def test_a_second_commit_in_parallel_ends_the_session() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        session, _ = await mallory.open(a, bits_of(3))
        payload = mallory.payload(bits_of(3))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mallory.commit, a, session, payload)
            await trio.sleep(0.5)
            with refused("inconsistent-commit"):
                await mallory.commit(a, session, payload)
        with refused("no-session"):
            await mallory.apply(a, session)
        assert not a.trainer.mixes
        await assert_can_exchange(b, a)

    virtually(body)


def test_apply_before_commit_ends_the_session() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        session, _ = await mallory.open(a, bits_of(3))
        with refused("not-committed"):
            await mallory.apply(a, session)
        await assert_can_exchange(b, a)

    virtually(body)


def test_a_session_belongs_to_the_peer_that_opened_it() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        mallory = await bench.peer("mallory", 3, honest=False)
        session, _ = await b.open(a, bits_of(2))
        with refused("no-session"):
            await mallory.endpoint.call(a.contact, CANCEL, CancelRequest(session, "enough"))
        with refused("no-session"):
            await mallory.commit(a, session, mallory.payload(bits_of(2)))
        await b.commit(a, session, b.payload(bits_of(2)))
        with refused("no-session"):
            await mallory.apply(a, session)
        await b.apply(a, session)
        assert len(a.trainer.mixes) == 1

    virtually(body)


def test_an_initiator_that_dies_before_the_mix_has_begun_leaves_no_trace() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        session, _ = await mallory.open(a, bits_of(3))
        await mallory.commit(a, session, mallory.payload(bits_of(3)))
        a.trainer.mix_gate = trio.Event()
        with trio.move_on_after(2.0):
            await mallory.apply(a, session)
        await trio.sleep(1)
        a.trainer.mix_gate = None
        assert [report.outcome for report in a.reports] == ["apply-interrupted"]
        assert not a.trainer.mixes
        await assert_can_exchange(b, a)

    virtually(body)


def test_an_open_that_its_caller_gives_up_leaves_nothing() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        mallory = await bench.peer("mallory", 3, honest=False)
        a.trainer.answers = False
        with trio.move_on_after(2.0):
            await mallory.open(a, bits_of(3))
        await trio.sleep(1)
        assert a.is_idle()
        with refused("not-training"):  # now the trainer takes longer than the deadline
            await b.endpoint.call(
                a.contact, OPEN, OpenRequest(bytes(16), b.offer(bits_of(2))), deadline_s=BOUNDARY_S + 5
            )
        a.trainer.answers = True
        await assert_can_exchange(b, a)

    virtually(body)


# ---------------------------------------------------------------------------------- hostile or unlucky responders


class LyingResponder:
    """Answers as told."""

    def __init__(self, peer: Peer, kind: str) -> None:
        self.peer, self.kind = peer, kind
        self.cancelled = trio.Event()
        peer.endpoint.handle(OPEN, self.on_open)
        peer.endpoint.handle(COMMIT, self.on_commit)
        peer.endpoint.handle(APPLY, self.on_apply)
        peer.endpoint.handle(CANCEL, self.on_cancel)

    async def on_open(self, remote: bytes, request: OpenRequest) -> OpenReply:
        if self.kind == "mute-open":
            await trio.sleep_forever()
        if self.kind == "strange-refusal":
            raise Refusal(f"code-{random.Random(repr(trio.current_time())).randrange(10**9)}")
        if self.kind in (
            "mute-commit",
            "mute-apply",
            "refuse-commit",
            "crash-commit",
            "other-run",
            "inconsistent-offer",
        ):
            bits, payload = bits_of(3), self.peer.payload(bits_of(3))
        else:
            bits, payload = _payload_that_is(self.kind, self.peer)
        offer = self.peer.offer(bits, **({"run_id": bytes(32)} if self.kind == "other-run" else {}))
        if self.kind == "inconsistent-offer":
            payload = Payload(bytes(32), b"", payload.blob, payload.size_bytes)
        return OpenReply(offer, payload)

    async def on_commit(self, remote: bytes, request: CommitRequest) -> Done:
        if self.kind == "refuse-commit":
            raise Refusal("norm-outlier")
        if self.kind == "crash-commit":
            self.peer.bench.network.crash(self.peer.host)
        if self.kind == "mute-commit":
            await trio.sleep_forever()
        return Done()

    async def on_apply(self, remote: bytes, request: ApplyRequest) -> Done:
        await trio.sleep_forever()
        raise AssertionError

    async def on_cancel(self, remote: bytes, request: CancelRequest) -> Done:
        self.cancelled.set()
        return Done()


LIES = {
    "wrong-snapshot-hash": "wrong-snapshot-hash",
    "not-finite": "not-finite",
    "oversized-payload": "oversized-payload",
    "malformed-payload": "malformed-payload",
    "unknown-base": "unknown-base",
    "blobunavailable": "blobunavailable",
    "other-run": "inconsistent-offer",
    "inconsistent-offer": "inconsistent-offer",
    "mute-open": "deadlineexpired",
    "mute-commit": "deadlineexpired",
    "mute-apply": "deadlineexpired",
    "refuse-commit": "norm-outlier",
    "crash-commit": "disconnected",
}


@pytest.mark.parametrize("kind", list(LIES))
def test_a_bad_partner_costs_one_attempt(kind: str) -> None:
    async def body(bench: Bench) -> None:
        a = await bench.peer("a", 1)
        mallory = await bench.peer("mallory", 3, honest=False)
        liar = LyingResponder(mallory, kind)
        before = a.trainer.phi.copy()
        await a.trainer.end_round()
        with trio.fail_after(BOUNDARY_S + TRANSFER_S + BOUNDARY_S + 5.0):
            outcomes = await a.wait_for_reports(1)
            await trio.sleep(3)
        assert outcomes == [LIES[kind]]  # and then it is left alone for a while
        assert a.exchanger is not None
        assert a.exchanger.counts == {LIES[kind]: 1}
        np.testing.assert_array_equal(a.trainer.phi, before)
        assert a.trainer.abandoned == 1
        assert a.is_idle()
        if kind not in ("refuse-commit", "crash-commit", "mute-open"):
            assert liar.cancelled.is_set()
        b = await bench.peer("b", 2)
        await assert_can_exchange(b, a)
        await assert_can_exchange(a, b)

    virtually(body)


def test_a_partner_that_cannot_be_reached_costs_one_attempt() -> None:
    async def body(bench: Bench) -> None:
        a = await bench.peer("a", 1)
        a.known.contacts = [Contact(bytes(32), (Address("10.9.9.9", 1),))]
        await a.trainer.end_round()
        await a.wait_for_reports(1)
        await trio.sleep(5)
        assert len(a.reports) == 1
        assert a.is_idle()

    virtually(body)


def test_a_failed_partner_is_left_alone_for_a_round_and_longer_each_time() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        assert a.exchanger is not None
        a.known.contacts = []
        for _ in range(20):  # rounds of 0.5 s
            await trio.sleep(0.5)
            await a.trainer.end_round()
        bench.network.crash(b.host)
        error = Disconnected("gone")
        pauses = []
        for _ in range(12):
            a.exchanger._note_failure(b.contact.peer_id, error)
            pauses.append(a.exchanger._standing.backed_off_until(b.contact.peer_id) - trio.current_time())
        assert pauses[0] == pytest.approx(0.5, abs=0.1)
        assert pauses[:5] == pytest.approx([pauses[0] * 2**number for number in range(5)])
        assert max(pauses) == 64 * BACKOFF_S

    virtually(body)


def test_refusal_codes_and_failing_peers_fill_no_memory() -> None:
    async def body(bench: Bench) -> None:
        a = await bench.peer("a", 1)
        mallory = await bench.peer("mallory", 3, honest=False)
        LyingResponder(mallory, "strange-refusal")
        for _ in range(MAX_COUNTED_OUTCOMES + 20):
            await trio.sleep(2000)
            await a.trainer.end_round()
            await trio.sleep(1)
        assert a.exchanger is not None
        assert len(a.exchanger.counts) <= MAX_COUNTED_OUTCOMES + 1
        assert a.exchanger.counts["other"] >= 20
        for index in range(2 * MAX_BACKOFFS):
            a.exchanger._note_failure(index.to_bytes(32, "big"), ExchangeFailed("not-finite"))
        assert len(a.exchanger._standing) == MAX_BACKOFFS

    virtually(body)


# ------------------------------------------------------------------------------------------- our own side's troubles


def test_a_defect_of_ours_ends_the_exchange_and_not_the_training() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        a.blobs.fail = KeyError("lost")
        await a.trainer.end_round()
        assert (await a.wait_for_reports(1))[0] == "internal"
        await trio.sleep(1)
        assert a.is_idle()
        assert b.is_idle()
        a.blobs.fail = None
        await assert_can_exchange(a, b)
        a.blobs.fail = KeyError("lost")
        await trio.sleep(1000)
        await b.trainer.end_round()
        assert (await b.wait_for_reports(len(b.reports) + 1))[-1] == "internal"
        a.blobs.fail = None
        await assert_can_exchange(b, a)

    virtually(body)


@pytest.mark.parametrize("side", ["initiator", "responder"])
def test_the_trainers_end_ends_the_exchange_quietly(side: str) -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        dying = a if side == "initiator" else b
        dying.trainer.mix_gate = trio.Event()
        await a.trainer.end_round()
        await trio.sleep(5)  # the mix has begun
        await dying.trainer.die()
        dying.trainer.mix_gate.set()
        await trio.sleep(100)
        assert dying.is_idle()
        other = b if dying is a else a
        assert other.is_idle()
        c = await bench.peer("c", 3)
        with refused("not-ready"):
            await c.open(dying, bits_of(3))
        assert c.is_idle()

    virtually(body)


def test_cancelling_the_initiator_frees_the_responder() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2)
        c = await bench.peer("c", 3)
        a.known.contacts = [b.contact]
        b.blobs.seconds = 30.0
        await a.trainer.end_round()
        await trio.sleep(5)
        assert not b.is_idle()
        a.scope.cancel()
        await trio.sleep(1)
        assert not +a.trainer.pins
        assert not +a.blobs.pins
        assert b.is_idle()
        b.blobs.seconds = 1.0
        await assert_can_exchange(c, b)

    virtually(body)


def test_a_stopped_peer_refuses() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        assert a.exchanger is not None
        a.exchanger.stopped = True
        with refused("not-training"):
            await b.open(a, bits_of(2))
        await a.trainer.end_round()
        await trio.sleep(10)
        assert not a.reports
        assert a.is_idle()

    virtually(body)


def test_malformed_requests_reach_no_trainer() -> None:
    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 2, honest=False)
        good = b.offer(bits_of(2))
        for bad in (
            OpenRequest(b"short", good),
            OpenRequest(bytes(16), b.offer(bits_of(2), step=-1)),
            OpenRequest(bytes(16), b.offer(bits_of(2), haves=(b"x",))),
            OpenRequest(bytes(16), b.offer(bits_of(2), haves=(bytes(32),) * 9)),
            OpenRequest(bytes(16), b.offer(bits_of(2), tokens=2**61)),
        ):
            with pytest.raises(PeerError):
                await b.endpoint.call(a.contact, OPEN, bad)
            assert a.is_idle()
        assert a.trainer.closed_for_partner == 0

    virtually(body)


def test_many_meetings_with_chaos_leave_every_peer_usable() -> None:
    """Peers that end rounds at random while a hostile one opens, commits, cancels and applies at random."""

    async def body(bench: Bench) -> None:
        honest = [await bench.peer(name, seed) for seed, name in enumerate("abc")]
        mallory = await bench.peer("mallory", 9, honest=False)
        for peer in honest:
            peer.known.contacts = [other.contact for other in honest if other is not peer]
        numbers = random.Random(5)

        async def train(peer: Peer) -> None:
            while True:
                await trio.sleep(5 + 10 * numbers.random())
                peer.trainer.step += 10
                peer.trainer.phi += weights(numbers.randrange(10**6)) * np.float32(0.1)
                await peer.trainer.end_round()

        async def attack() -> None:
            while True:
                await trio.sleep(numbers.random())
                with trio.move_on_after(3 * numbers.random()):
                    try:
                        victim = numbers.choice(honest)
                        bits = bits_of(numbers.randrange(100))
                        session, _ = await mallory.open(victim, bits, step=numbers.choice([0, 100, 10**6]))
                        if numbers.random() < 0.7:
                            await mallory.commit(victim, session, mallory.payload(bits))
                        if numbers.random() < 0.5:
                            await mallory.apply(victim, session)
                        elif numbers.random() < 0.5:
                            await mallory.endpoint.call(victim.contact, CANCEL, CancelRequest(session, "enough"))
                    except PeerError:
                        pass

        async with trio.open_nursery() as nursery:
            for peer in honest:
                nursery.start_soon(train, peer)
            nursery.start_soon(attack)
            await trio.sleep(600)
            nursery.cancel_scope.cancel()
        mixed = [sum(report.outcome == "mixed" for report in peer.reports) for peer in honest]
        assert min(mixed) > 5, [peer.exchanger.counts for peer in honest]
        await trio.sleep(BOUNDARY_S + TRANSFER_S + 5)
        for peer in honest:
            assert peer.is_idle()
            assert np.isfinite(peer.trainer.phi).all()

    virtually(body)


def test_snapshot_equality_needs_no_transfer_of_meaning() -> None:
    """Identical replicas meet: nothing to do, and nothing breaks."""

    async def body(bench: Bench) -> None:
        a, b = await bench.peer("a", 1), await bench.peer("b", 1)
        before = a.trainer.phi.copy()
        await a.trainer.end_round()
        assert await a.wait_for_reports(1) == ["mixed"]
        np.testing.assert_array_equal(a.trainer.phi, before)
        np.testing.assert_array_equal(b.trainer.phi, before)

    virtually(body)
