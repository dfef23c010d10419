"""Donor and joiner over the in-memory network: weights arrive, or the joiner learns from everybody why not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.blobs import BlobExchange, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import BlobUnavailable, PeerError, Refusal
from swarm_peer.identity import Identity
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link

from swarmtrain.donor import (
    GET_SNAPSHOT,
    KEPT_PAYLOADS,
    Donation,
    Donor,
    Joiner,
    NoDonor,
    SnapshotReply,
    SnapshotRequest,
)
from swarmtrain.layout import FlatLayout, fp32_to_bf16
from swarmtrain.node import NodeBlobs
from swarmtrain.snapshots import Payload, Snapshot, SnapshotLibrary, encode_payload, take_snapshot

LAYOUT = FlatLayout.of([("model.embed_tokens.weight", (512, 64)), ("model.norm.weight", (64,))])
RUN_ID = bytes(range(32))


async def inline(function: Callable[..., Any], /, *args: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


def replica(seed: int) -> Snapshot:
    values = np.random.default_rng(seed).standard_normal(LAYOUT.size).astype(np.float32)
    return take_snapshot(LAYOUT, fp32_to_bf16(values))


def near(base: Snapshot, changes: int) -> Snapshot:
    bits = base.bits.copy()
    bits[:: max(1, bits.size // changes)] ^= 1
    return take_snapshot(LAYOUT, bits)


GENESIS = replica(0)


class Peer:
    """One peer with a library, blobs and both roles; `donation` is what it has to give."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.identity = Identity.from_seed(bytes([number] * 32))
        self.host = f"10.0.0.{number}"
        self.endpoint = Endpoint(self.identity, network.transport(self.identity, self.host))
        self.contact = Contact(self.identity.peer_id, (Address(self.host, 7000),))
        self.store = BlobStore(1 << 26)
        self.blobs = NodeBlobs(self.store, BlobExchange(self.endpoint, self.store, offload=inline))
        self.library = SnapshotLibrary(LAYOUT)
        self.library.add(GENESIS, permanent=True)
        self.donation: Donation | None = None
        self.encodings = 0
        self.donor: Donor | None = None
        self.joiner = Joiner(self.endpoint, run_id=RUN_ID, library=self.library, blobs=self.blobs, offload=inline)

    def give(self, run_id: bytes = RUN_ID) -> None:
        self.donor = Donor(
            self.endpoint,
            run_id=run_id,
            library=self.library,
            blobs=self.blobs,
            offload=self._counting,
            newest=self._newest,
        )

    async def _newest(self) -> Donation | None:
        await trio.lowlevel.checkpoint()
        return self.donation

    async def _counting(self, function: Callable[..., Any], /, *args: Any) -> Any:
        self.encodings += function is encode_payload
        await trio.sleep(0.5)
        return function(*args)


class Bench:
    def __init__(self, nursery: trio.Nursery, network: MemoryNetwork) -> None:
        self.nursery, self.network = nursery, network
        self.count = 0

    async def peer(self) -> Peer:
        self.count += 1
        peer = Peer(self.network, self.count)
        await self.nursery.start(peer.endpoint.run, [Address(peer.host, 7000)])
        return peer


def virtually(body: Callable[[Bench], Awaitable[None]], *, bandwidth: float | None = None) -> None:
    async def main() -> None:
        link = Link(latency_s=0.02, bandwidth_bytes_per_s=bandwidth)
        async with trio.open_nursery() as nursery:
            await body(Bench(nursery, MemoryNetwork(seed=1, link=link)))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_joiner_gets_the_donors_weights_and_place() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        donor.donation = Donation(replica(1), step=120, tokens=4000)
        seen: list[tuple[int, int]] = []
        donation = await joiner.joiner.fetch(
            [donor.contact], deadline_s=60, progress=lambda done, total: seen.append((done, total))
        )
        assert donation.snapshot.hash == replica(1).hash
        np.testing.assert_array_equal(donation.snapshot.bits, replica(1).bits)
        assert (donation.step, donation.tokens) == (120, 4000)
        assert seen[-1][0] == seen[-1][1] > 0
        assert joiner.store.size_bytes == 0  # payloads are read once

    virtually(body)


def test_a_common_base_makes_it_small() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        donor.donation = Donation(near(GENESIS, 50), 1, 1)
        sizes: list[int] = []
        donation = await joiner.joiner.fetch(
            [donor.contact], deadline_s=60, progress=lambda done, total: sizes.append(total)
        )
        assert donation.snapshot.hash == donor.donation.snapshot.hash
        assert sizes[-1] < 2000

    virtually(body)


def test_a_joiner_without_our_bases_gets_dense_and_spoils_nothing_for_the_others() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        donor.donation = Donation(near(GENESIS, 50), 1, 1)
        request = SnapshotRequest(RUN_ID, (bytes(32),))
        reply = await joiner.endpoint.call(donor.contact, GET_SNAPSHOT, request, deadline_s=60)
        assert reply.payload.base == b""
        reply = await joiner.endpoint.call(
            donor.contact, GET_SNAPSHOT, SnapshotRequest(RUN_ID, (GENESIS.hash,)), deadline_s=60
        )
        assert reply.payload.base == GENESIS.hash

    virtually(body)


def test_many_joiners_at_once_cost_one_encoding() -> None:
    async def body(bench: Bench) -> None:
        donor = await bench.peer()
        donor.give()
        donor.donation = Donation(replica(1), 1, 1)
        done: list[bytes] = []

        async def join(joiner: Peer) -> None:
            donation = await joiner.joiner.fetch([donor.contact], deadline_s=60)
            done.append(donation.snapshot.hash)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(join, await bench.peer())
        assert done == [replica(1).hash] * 6
        assert donor.encodings == 1

    virtually(body)


def test_a_new_round_does_not_break_a_transfer_under_way() -> None:
    async def body(bench: Bench) -> None:
        donor, slow, late = await bench.peer(), await bench.peer(), await bench.peer()
        donor.give()
        donor.donation = Donation(replica(1), 1, 1)
        result: list[Donation] = []

        async def join() -> None:
            result.append(await slow.joiner.fetch([donor.contact], deadline_s=600))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await trio.sleep(5)
            assert not result
            donor.donation = Donation(replica(2), 2, 2)
            await late.endpoint.call(donor.contact, GET_SNAPSHOT, SnapshotRequest(RUN_ID, ()), deadline_s=60)
        assert result[0].snapshot.hash == replica(1).hash

    virtually(body, bandwidth=4000)


def test_what_is_kept_for_joiners_is_bounded() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        for seed in range(3 * KEPT_PAYLOADS):
            donor.donation = Donation(replica(seed), seed, seed)
            await joiner.endpoint.call(donor.contact, GET_SNAPSHOT, SnapshotRequest(RUN_ID, ()), deadline_s=60)
        assert len(donor.store) == KEPT_PAYLOADS

    virtually(body)


def test_refusals_name_their_reason() -> None:
    async def body(bench: Bench) -> None:
        early, other, joiner = await bench.peer(), await bench.peer(), await bench.peer()
        early.give()
        other.give(run_id=bytes(32))
        with pytest.raises(NoDonor) as caught:
            await joiner.joiner.fetch([early.contact, other.contact], deadline_s=60)
        assert [("not-ready" in reason, "other-run" in reason) for reason in caught.value.reasons] == [
            (True, False),
            (False, True),
        ]
        assert early.contact.peer_id.hex()[:8] in str(caught.value)

    virtually(body)


def test_nobody_to_ask_is_said() -> None:
    async def body(bench: Bench) -> None:
        joiner = await bench.peer()
        with pytest.raises(NoDonor, match="nobody to ask"):
            await joiner.joiner.fetch([], deadline_s=60)

    virtually(body)


class LyingDonor:
    def __init__(self, peer: Peer, kind: str) -> None:
        self.peer, self.kind = peer, kind
        peer.endpoint.handle(GET_SNAPSHOT, self.on_get)

    async def on_get(self, remote: bytes, request: SnapshotRequest) -> SnapshotReply:
        good = replica(1)
        if self.kind == "mute":
            await trio.sleep_forever()
        bits = good.bits.copy()
        if self.kind == "not-finite":
            bits[3] = 0x7F80
        sent = take_snapshot(LAYOUT, bits)
        data = encode_payload(LAYOUT, sent, []).data
        if self.kind == "malformed-payload":
            data = data[:-5]
        name = bytes(32) if self.kind == "wrong-snapshot-hash" else sent.hash
        base = b"b" * 32 if self.kind == "unknown-base" else b""
        blob = b"n" * 32 if self.kind == "unknown-blob" else self.peer.blobs.put(data)
        size = {"oversized-payload": 1 << 50, "empty": 0, "allowed": len(data) - 1}.get(self.kind, len(data))
        return SnapshotReply(Payload(name, base, blob, size), 1, 1)


LIES = [
    "mute",
    "not-finite",
    "malformed-payload",
    "wrong-snapshot-hash",
    "unknown-base",
    "unknown-blob",
    "oversized-payload",
    "empty",
    "allowed",
]


@pytest.mark.parametrize("kind", LIES)
def test_after_a_bad_donor_the_next_one_is_asked(kind: str) -> None:
    async def body(bench: Bench) -> None:
        liar, donor, joiner = await bench.peer(), await bench.peer(), await bench.peer()
        LyingDonor(liar, kind)
        with pytest.raises(NoDonor) as caught:
            await joiner.joiner.fetch([liar.contact], deadline_s=30)
        expected = {"mute": "", "empty": "oversized-payload"}.get(kind, kind)
        assert expected in caught.value.reasons[0]
        donor.give()
        donor.donation = Donation(replica(7), 9, 9)
        donation = await joiner.joiner.fetch([liar.contact, donor.contact], deadline_s=30)
        assert donation.snapshot.hash == replica(7).hash
        assert joiner.store.size_bytes == 0

    virtually(body)


def test_a_donor_that_dies_during_the_transfer_is_replaced() -> None:
    async def body(bench: Bench) -> None:
        dying, donor, joiner = await bench.peer(), await bench.peer(), await bench.peer()
        for peer in (dying, donor):
            peer.give()
            peer.donation = Donation(replica(1), 1, 1)
        result: list[Donation] = []

        async def join() -> None:
            result.append(await joiner.joiner.fetch([dying.contact, donor.contact], deadline_s=600))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await trio.sleep(8)
            bench.network.crash(dying.host)
        assert result[0].snapshot.hash == replica(1).hash

    virtually(body, bandwidth=5000)


def test_a_stall_ends_with_the_deadline() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        donor.donation = Donation(replica(1), 1, 1)
        started = trio.current_time()
        with pytest.raises(NoDonor):
            await joiner.joiner.fetch([donor.contact], deadline_s=20)
        assert trio.current_time() - started < 60 + 20 + 1

    virtually(body, bandwidth=100)


def test_an_exchange_meanwhile_does_not_take_the_base_away() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        base = replica(3)
        for peer in (donor, joiner):
            peer.library.add(base)
        donor.give()
        donor.donation = Donation(near(base, 20_000), 1, 1)
        result: list[Donation] = []

        async def join() -> None:
            result.append(await joiner.joiner.fetch([donor.contact], deadline_s=600))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await trio.sleep(4)
            assert not result
            for seed in range(10, 16):
                joiner.library.add(replica(seed))
            assert joiner.library.get(base.hash) is None
        assert result[0].snapshot.hash == donor.donation.snapshot.hash

    virtually(body, bandwidth=1000)


def test_a_final_payload_can_be_fetched_by_name() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        assert donor.donor is not None
        payload = await donor.donor.encode(replica(5), [])
        assert await donor.donor.encode(replica(5), []) == payload
        assert donor.encodings == 1
        snapshot = await joiner.joiner.fetch_payload(payload, donor.contact, deadline_s=60)
        assert snapshot.hash == replica(5).hash
        gone = Payload(payload.snapshot, b"", bytes(32), payload.size_bytes)
        with pytest.raises(BlobUnavailable):
            await joiner.joiner.fetch_payload(gone, donor.contact, deadline_s=60)

    virtually(body)


def test_malformed_requests_cost_the_donor_nothing() -> None:
    async def body(bench: Bench) -> None:
        donor, joiner = await bench.peer(), await bench.peer()
        donor.give()
        donor.donation = Donation(replica(1), 1, 1)
        for request in (
            SnapshotRequest(b"", ()),
            SnapshotRequest(RUN_ID, (b"x",)),
            SnapshotRequest(RUN_ID, (bytes(32),) * 9),
        ):
            with pytest.raises(PeerError):
                await joiner.endpoint.call(donor.contact, GET_SNAPSHOT, request)
        with pytest.raises(Refusal, match="other-run"):
            await joiner.endpoint.call(donor.contact, GET_SNAPSHOT, SnapshotRequest(bytes(32), ()))
        assert donor.encodings == 0

    virtually(body)
