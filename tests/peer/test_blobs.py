"""Blobs: descriptors from strangers, the bounded store, and fetches from honest, slow, dying and lying holders."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import trio
import trio.testing
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_peer.addresses import Address, Contact
from swarm_peer.blob_store import (
    MIN_CHUNK_BYTES,
    BlobId,
    BlobStore,
    Descriptor,
    blob_id_of,
    decode_descriptor,
    describe,
    encode_descriptor,
)
from swarm_peer.blobs import CHUNK, DESCRIPTOR, BlobExchange, BlobParams, ChunkRequest, DescriptorRequest
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.errors import BlobInvalid, BlobUnavailable, Refusal
from swarm_peer.identity import Identity, PeerId
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.pacing import DownloadLimit

MIB = 1024 * 1024
Result = TypeVar("Result")


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def inline(sync_fn: Callable[..., Result], /, *args: Any) -> Result:
    """Threads would let the virtual clock run ahead of them."""
    await trio.lowlevel.checkpoint()
    return sync_fn(*args)


# Descriptors.


@pytest.mark.parametrize("size", [0, 1, MIN_CHUNK_BYTES, MIN_CHUNK_BYTES + 1, 3 * MIN_CHUNK_BYTES])
def test_a_descriptor_names_every_chunk(size: int) -> None:
    data = noise(size)
    body = encode_descriptor(describe(data, MIN_CHUNK_BYTES))
    descriptor = decode_descriptor(blob_id_of(body), body, size)
    assert descriptor.size == size
    assert len(descriptor.hashes) == -(-size // MIN_CHUNK_BYTES)
    for index in range(len(descriptor.hashes)):
        start, end = descriptor.span(index)
        assert descriptor.check_chunk(index, data[start:end])
        assert not descriptor.check_chunk(index, data[start:end] + b"x")


@pytest.mark.parametrize(
    "fields",
    [
        [100, MIN_CHUNK_BYTES - 1, [bytes(32)]],
        [100, 16 * MIB + 1, [bytes(32)]],
        [100, MIN_CHUNK_BYTES, []],
        [100, MIN_CHUNK_BYTES, [bytes(32)] * 2],
        [100, MIN_CHUNK_BYTES, [bytes(31)]],
        [-1, MIN_CHUNK_BYTES, []],
        [MIB + 1, MIB, [bytes(32)] * 2],
        [100, MIN_CHUNK_BYTES, [bytes(32)], 0],
        [100, MIN_CHUNK_BYTES],
        "text",
    ],
)
def test_bad_descriptors_are_refused(fields: object) -> None:
    body = msgspec.msgpack.encode(fields)
    with pytest.raises(BlobInvalid):
        decode_descriptor(blob_id_of(body), body, MIB)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_descriptors_raise_only_blob_invalid(body: bytes) -> None:
    with pytest.raises(BlobInvalid):
        decode_descriptor(blob_id_of(body), body, MIB)
    with pytest.raises(BlobInvalid):
        decode_descriptor(bytes(32), body, MIB)


# The store.


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return BlobStore(MIB, tmp_path if request.param == "directory" else None)


def test_what_is_put_comes_back(store: BlobStore) -> None:
    data = noise(300_000)
    blob_id = store.put(data, chunk_size=MIN_CHUNK_BYTES)
    assert store.put(memoryview(data), chunk_size=MIN_CHUNK_BYTES) == blob_id
    assert len(store) == 1
    assert store.has(blob_id)
    assert store.get(blob_id) == data
    assert store.read_chunk(blob_id, 0) == data[:MIN_CHUNK_BYTES]
    assert store.read_chunk(blob_id, 4) == data[4 * MIN_CHUNK_BYTES :]
    assert store.read_chunk(blob_id, 5) is None
    assert blake3(store.descriptor_bytes(blob_id) or b"").digest() == blob_id
    store.discard(blob_id)
    assert not store.has(blob_id)
    assert store.size_bytes == 0
    assert store.get(blob_id) is None
    assert store.read_chunk(blob_id, 0) is None


def test_the_empty_blob_is_a_blob(store: BlobStore) -> None:
    assert store.get(store.put(b"")) == b""


def test_the_quota_holds_and_the_least_recently_used_leaves(store: BlobStore) -> None:
    first, second, third = (store.put(noise(300_000, seed)) for seed in range(3))
    assert store.get(first) is not None
    fourth = store.put(noise(300_000, 3))
    assert [store.has(b) for b in (first, second, third, fourth)] == [True, False, True, True]
    assert store.size_bytes <= MIB
    with pytest.raises(BlobInvalid, match="does not fit"):
        store.put(noise(MIB))
    assert len(store) == 3


def test_pinned_blobs_stay_until_every_pin_is_gone(store: BlobStore) -> None:
    pinned = store.put(noise(600_000, 1))
    store.pin(pinned)
    store.pin(pinned)
    with pytest.raises(BlobInvalid, match="pinned"):
        store.put(noise(600_000, 2))
    store.unpin(pinned)
    store.discard(pinned)
    assert store.has(pinned)
    store.unpin(pinned)
    store.put(noise(600_000, 2))
    assert not store.has(pinned)
    store.unpin(pinned)


def test_a_directory_survives_restarts_and_drops_remains(tmp_path: Path) -> None:
    store = BlobStore(MIB, tmp_path)
    whole, torn, headless = (store.put(noise(200_000, seed)) for seed in range(3))
    (tmp_path / f"{torn.hex()}.data").write_bytes(b"short")
    (tmp_path / f"{headless.hex()}.blob").unlink()
    (tmp_path / f"{whole.hex()}.data.123.tmp").write_bytes(b"left by a crash")
    (tmp_path / "notes.txt").write_text("not ours")
    again = BlobStore(MIB, tmp_path)
    assert [again.has(b) for b in (whole, torn, headless)] == [True, False, False]
    assert again.get(whole) == noise(200_000, 0)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{whole.hex()}.data", f"{whole.hex()}.blob", "notes.txt"}
    assert len(BlobStore(100_000, tmp_path)) == 0


def test_damage_on_disk_is_noticed_and_never_served(tmp_path: Path) -> None:
    def get(store: BlobStore, blob_id: BlobId) -> bytes | None:
        return store.get(blob_id)

    def read_second_chunk(store: BlobStore, blob_id: BlobId) -> bytes | None:
        return store.read_chunk(blob_id, 1)

    for read in (get, read_second_chunk):
        store = BlobStore(MIB, tmp_path)
        blob_id = store.put(noise(200_000), chunk_size=MIN_CHUNK_BYTES)
        path = tmp_path / f"{blob_id.hex()}.data"
        damaged = bytearray(path.read_bytes())
        damaged[MIN_CHUNK_BYTES + 5] ^= 1
        path.write_bytes(damaged)
        assert read(store, blob_id) is None
        assert not store.has(blob_id)


# Fetching.


class Fleet:
    """One fetcher and several holders of the same blobs, over the in-memory network."""

    def __init__(self, nursery: trio.Nursery, link: Link | None = None) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(link=link or Link(latency_s=0.02, bandwidth_bytes_per_s=4 * MIB))
        self.asked: dict[PeerId, list[int]] = {}
        self.holders: list[Contact] = []

    async def endpoint(self, number: int) -> tuple[Endpoint, Contact]:
        identity = Identity.from_seed(bytes([number]) * 32)
        address = Address(f"10.0.0.{number}", 4000)
        endpoint = Endpoint(identity, self.network.transport(identity, address.host))
        await self.nursery.start(endpoint.run, [address])
        return endpoint, Contact(identity.peer_id, (address,))

    async def fetcher(self, params: BlobParams | None = None, quota_bytes: int = 64 * MIB) -> BlobExchange:
        endpoint, _ = await self.endpoint(100)
        return BlobExchange(endpoint, BlobStore(quota_bytes), offload=inline, params=params)

    async def holder(self, data: bytes, spoil: Callable[[int, bytes], Awaitable[bytes]] | None = None) -> Contact:
        """Adds a holder; `spoil` may delay, change or refuse its chunks."""
        endpoint, contact = await self.endpoint(len(self.holders) + 1)
        store = BlobStore(64 * MIB)
        store.put(data, chunk_size=MIN_CHUNK_BYTES)
        asked = self.asked.setdefault(PeerId(contact.peer_id), [])

        async def on_descriptor(remote: PeerId, request: DescriptorRequest) -> bytes:
            body = store.descriptor_bytes(request.blob_id)
            if body is None:
                raise Refusal("unknown-blob")
            return body

        async def on_chunk(remote: PeerId, request: ChunkRequest) -> bytes:
            asked.append(request.index)
            chunk = store.read_chunk(request.blob_id, request.index) or b""
            return await spoil(request.index, chunk) if spoil else chunk

        endpoint.handle(DESCRIPTOR, on_descriptor)
        endpoint.handle(CHUNK, on_chunk)
        self.holders.append(contact)
        return contact


def with_fleet(scenario: Callable[[Fleet], Awaitable[None]], link: Link | None = None) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(3600):
                await scenario(Fleet(nursery, link))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


DATA = noise(2 * MIB + 7)
BLOB = blob_id_of(encode_descriptor(describe(DATA, MIN_CHUNK_BYTES)))
CHUNKS = len(describe(DATA, MIN_CHUNK_BYTES).hashes)


def test_one_exchange_serves_another_over_the_wire() -> None:
    async def scenario(fleet: Fleet) -> None:
        endpoint, contact = await fleet.endpoint(1)
        store = BlobStore(64 * MIB)
        serving = BlobExchange(endpoint, store, offload=inline)
        blob_id = store.put(DATA)
        exchange = await fleet.fetcher()
        seen: list[tuple[int, int]] = []
        data = await exchange.fetch(
            blob_id, [contact], max_size_bytes=4 * MIB, deadline_s=60, progress=lambda *at: seen.append(at)
        )
        assert data == DATA
        assert seen[0] == (0, len(DATA))
        assert seen[-1] == (len(DATA), len(DATA))
        assert seen == sorted(seen)
        assert exchange.stats.fetched_bytes == serving.stats.served_bytes == len(DATA)
        # The second time it is here.
        assert await exchange.fetch(blob_id, [], max_size_bytes=4 * MIB, deadline_s=1) == DATA
        empty = store.put(b"")
        assert await exchange.fetch(empty, [contact], max_size_bytes=0, deadline_s=9) == b""

    with_fleet(scenario)


def test_several_holders_share_the_work_and_the_faster_takes_more() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def slowly(index: int, chunk: bytes) -> bytes:
            await trio.sleep(0.5)
            return chunk

        for spoil in (None, slowly, None):
            await fleet.holder(DATA, spoil)
        exchange = await fleet.fetcher()
        assert await exchange.fetch(BLOB, fleet.holders, max_size_bytes=4 * MIB, deadline_s=60) == DATA
        fast, slow, third = (len(fleet.asked[PeerId(h.peer_id)]) for h in fleet.holders)
        assert fast > slow > 0
        assert third > slow
        assert fast + slow + third <= CHUNKS + 6

    with_fleet(scenario)


def test_a_corrupting_holder_is_named_and_the_other_finishes() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def corrupt(index: int, chunk: bytes) -> bytes:
            return chunk[:-1] + bytes([chunk[-1] ^ 1])

        liar = await fleet.holder(DATA, corrupt)
        await fleet.holder(DATA)
        exchange = await fleet.fetcher()
        assert await exchange.fetch(BLOB, fleet.holders, max_size_bytes=4 * MIB, deadline_s=60) == DATA
        assert set(exchange.stats.corrupt) == {liar.peer_id}

        alone = noise(100_000, 9)
        only = await fleet.holder(alone, corrupt)
        blob_id = blob_id_of(encode_descriptor(describe(alone, MIN_CHUNK_BYTES)))
        with pytest.raises(BlobInvalid, match=only.peer_id.hex()[:8]):
            await exchange.fetch(blob_id, [only], max_size_bytes=MIB, deadline_s=60)

    with_fleet(scenario)


def test_a_stalled_holder_costs_a_moment_not_the_deadline() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def stall(index: int, chunk: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        await fleet.holder(DATA, stall)
        await fleet.holder(DATA)
        exchange = await fleet.fetcher()
        began = trio.current_time()
        assert await exchange.fetch(BLOB, fleet.holders, max_size_bytes=4 * MIB, deadline_s=600) == DATA
        assert trio.current_time() - began < 15

    with_fleet(scenario)


@pytest.mark.parametrize("bytes_per_s", [5_000, 20_000, 200_000])
def test_a_slow_link_is_slow_and_no_stall(bytes_per_s: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.holder(DATA)
        exchange = await fleet.fetcher()
        began = trio.current_time()
        assert await exchange.fetch(BLOB, fleet.holders, max_size_bytes=4 * MIB, deadline_s=3600) == DATA
        # Little is sent twice.
        assert trio.current_time() - began < 1.5 * len(DATA) / bytes_per_s + 60

    with_fleet(scenario, Link(latency_s=0.05, bandwidth_bytes_per_s=bytes_per_s))


def test_a_holder_that_dies_in_mid_transfer_is_replaced() -> None:
    async def scenario(fleet: Fleet) -> None:
        for _ in range(2):
            await fleet.holder(DATA)
        exchange = await fleet.fetcher()

        def crash_halfway(done: int, total: int) -> None:
            if done > total // 2:
                fleet.network.crash("10.0.0.1")

        data = await exchange.fetch(BLOB, fleet.holders, max_size_bytes=4 * MIB, deadline_s=60, progress=crash_halfway)
        assert data == DATA

    with_fleet(scenario)


def test_a_single_holder_whose_connections_break_now_and_then_is_enough() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.holder(DATA)
        exchange = await fleet.fetcher()
        breaks = {CHUNKS // 3: True, 2 * CHUNKS // 3: True}

        def break_off(done: int, total: int) -> None:
            if breaks.pop(done // MIN_CHUNK_BYTES, False):
                for pipe in list(fleet.network.pipes):
                    pipe.break_off()

        data = await exchange.fetch(BLOB, fleet.holders, max_size_bytes=4 * MIB, deadline_s=60, progress=break_off)
        assert data == DATA
        assert not breaks

    with_fleet(scenario)


def test_a_cancelled_fetch_resumes_with_exactly_what_is_missing() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(DATA)
        exchange = await fleet.fetcher()
        arrived = 0
        with trio.CancelScope() as scope:

            def cancel_midway(done: int, total: int) -> None:
                nonlocal arrived
                arrived = done
                if done > total // 2:
                    scope.cancel()

            await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=60, progress=cancel_midway)
        assert scope.cancelled_caught
        await trio.sleep(5)  # requests that were on their way arrive
        fleet.asked[PeerId(holder.peer_id)].clear()
        done = exchange._partials[BLOB].done
        assert len(done) * MIN_CHUNK_BYTES == arrived
        missing = sorted(set(range(CHUNKS)) - done)
        assert 0 < len(missing) < CHUNKS
        assert await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=60) == DATA
        assert sorted(fleet.asked[PeerId(holder.peer_id)]) == missing
        assert not exchange._partials

    with_fleet(scenario)


def test_a_fetch_that_runs_out_of_time_or_holders_says_so() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(DATA)
        nobody = Contact(bytes(32), (Address("10.0.0.99", 4000),))
        exchange = await fleet.fetcher()
        with pytest.raises(BlobUnavailable, match="within"):
            await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=0.2)
        with pytest.raises(BlobUnavailable, match="no holder"):
            await exchange.fetch(BlobId(bytes(32)), [], max_size_bytes=MIB, deadline_s=9)
        with pytest.raises(BlobUnavailable, match="unknown-blob"):
            await exchange.fetch(BlobId(bytes(32)), [holder], max_size_bytes=MIB, deadline_s=9)
        with pytest.raises(BlobUnavailable, match="no such host"):
            await exchange.fetch(BlobId(bytes(32)), [nobody], max_size_bytes=MIB, deadline_s=60)
        with pytest.raises(BlobInvalid, match="allowed"):
            await exchange.fetch(BLOB, [holder], max_size_bytes=MIB, deadline_s=60)
        exchange.forget(BLOB)
        assert not exchange._partials

    with_fleet(scenario)


def test_a_serving_exchange_refuses_a_descriptor_that_the_fetcher_could_not_take() -> None:
    async def scenario(fleet: Fleet) -> None:
        endpoint, contact = await fleet.endpoint(1)
        store = BlobStore(64 * MIB)
        BlobExchange(endpoint, store, offload=inline)
        blob_id = store.put(DATA, chunk_size=MIN_CHUNK_BYTES)
        exchange = await fleet.fetcher()
        with pytest.raises(BlobUnavailable, match="too-large"):
            await exchange.fetch(blob_id, [contact], max_size_bytes=1000, deadline_s=60)
        # And the honest holder is not punished for it.
        assert await exchange.fetch(blob_id, [contact], max_size_bytes=4 * MIB, deadline_s=60) == DATA

    with_fleet(scenario)


def test_two_fetches_of_one_blob_transfer_it_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(DATA)
        exchange = await fleet.fetcher()
        results: list[bytes] = []

        async def fetch() -> None:
            results.append(await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=60))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            nursery.start_soon(fetch)
        assert results == [DATA, DATA]
        assert Counter(fleet.asked[PeerId(holder.peer_id)]).most_common(1)[0][1] == 1
        assert not exchange._locks

    with_fleet(scenario)


def test_a_blob_beyond_the_quota_is_returned_but_not_kept() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(DATA)
        exchange = await fleet.fetcher(quota_bytes=MIB)
        assert await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=60) == DATA
        assert not exchange._store.has(BLOB)

    with_fleet(scenario)


def test_a_busy_holder_is_asked_again_until_it_has_time() -> None:
    async def scenario(fleet: Fleet) -> None:
        refusals = 30

        async def busy(index: int, chunk: bytes) -> bytes:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise Refusal("busy")
            return chunk

        holder = await fleet.holder(DATA, busy)
        exchange = await fleet.fetcher()
        assert await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=600) == DATA

    with_fleet(scenario)


def test_descriptors_are_structs_that_decode_strictly() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([1, MIN_CHUNK_BYTES, [bytes(32)], "more"]), type=Descriptor)


# Lanes: on a long path each connection of the in-memory network has the link's rate for itself.


BIG = noise(12 * MIB, 5)
BIG_BLOB = blob_id_of(encode_descriptor(describe(BIG, MIN_CHUNK_BYTES)))
LONG_LINK = Link(latency_s=0.05, bandwidth_bytes_per_s=0.25 * MIB)


async def fetch_big(fleet: Fleet, exchange: BlobExchange, holders: list[Contact]) -> float:
    began = trio.current_time()
    assert await exchange.fetch(BIG_BLOB, holders, max_size_bytes=16 * MIB, deadline_s=600) == BIG
    return trio.current_time() - began


def test_a_long_path_gets_more_lanes_and_the_next_transfer_begins_with_them() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(BIG)
        exchange = await fleet.fetcher()
        alone_s = len(BIG) / 0.25 / MIB
        first_s = await fetch_big(fleet, exchange, [holder])
        assert first_s < alone_s / 3
        assert Counter(fleet.asked[PeerId(holder.peer_id)]).total() <= len(BIG) // MIN_CHUNK_BYTES + 12
        exchange._store.discard(BIG_BLOB)
        assert await fetch_big(fleet, exchange, [holder]) < first_s
        endpoint = exchange._endpoint
        assert isinstance(endpoint, Endpoint)
        assert endpoint.stats.connections == 9, "eight lanes, and the one that carries everything else"
        await trio.sleep(30)
        assert endpoint.stats.connections == 1, "idle lanes are closed"
        assert endpoint.connected() == [holder.peer_id]

    with_fleet(scenario, LONG_LINK)


def test_two_holders_share_the_lanes() -> None:
    async def scenario(fleet: Fleet) -> None:
        holders = [await fleet.holder(BIG) for _ in range(2)]
        exchange = await fleet.fetcher()
        await fetch_big(fleet, exchange, holders)
        assert isinstance(exchange._endpoint, Endpoint)
        assert exchange._endpoint.stats.connections <= 10

    with_fleet(scenario, LONG_LINK)


def test_a_near_holder_gets_one_connection() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(BIG)
        exchange = await fleet.fetcher()
        await fetch_big(fleet, exchange, [holder])
        assert isinstance(exchange._endpoint, Endpoint)
        assert exchange._endpoint.stats.connections == 1

    with_fleet(scenario, Link(latency_s=0.0005, bandwidth_bytes_per_s=64 * MIB))


def test_a_holder_that_takes_no_lanes_serves_over_the_one_connection() -> None:
    async def scenario(fleet: Fleet) -> None:
        identity = Identity.from_seed(bytes([7]) * 32)
        address = Address("10.0.0.7", 4000)
        limits = EndpointLimits(max_inbound=1)
        endpoint = Endpoint(identity, fleet.network.transport(identity, address.host), limits=limits)
        await fleet.nursery.start(endpoint.run, [address])
        store = BlobStore(64 * MIB)
        store.put(BIG, chunk_size=MIN_CHUNK_BYTES)
        BlobExchange(endpoint, store, offload=inline)
        exchange = await fleet.fetcher()
        await fetch_big(fleet, exchange, [Contact(identity.peer_id, (address,))])
        assert endpoint.stats.connections == 1
        assert endpoint.stats.dropped["full"] >= 1

    with_fleet(scenario, LONG_LINK)


def test_a_holder_that_sends_a_little_and_falls_silent_is_left_within_its_stalls() -> None:
    async def scenario(fleet: Fleet) -> None:
        served = 0

        async def once(index: int, chunk: bytes) -> bytes:
            nonlocal served
            served += 1
            if served > 1:
                await trio.sleep_forever()
            return chunk

        silent = await fleet.holder(DATA, once)
        exchange = await fleet.fetcher()
        began = trio.current_time()
        with pytest.raises(BlobUnavailable, match="stalled"):
            await exchange.fetch(BLOB, [silent], max_size_bytes=4 * MIB, deadline_s=3600)
        assert 40 <= trio.current_time() - began < 60
        # What it did send is kept, and asked of nobody again.
        other = await fleet.holder(DATA)
        assert await exchange.fetch(BLOB, [other], max_size_bytes=4 * MIB, deadline_s=60) == DATA
        assert len(fleet.asked[PeerId(other.peer_id)]) == CHUNKS - 1

    with_fleet(scenario)


def test_a_download_limit_paces_what_is_asked_for() -> None:
    async def scenario(fleet: Fleet) -> None:
        holder = await fleet.holder(DATA)
        endpoint, _ = await fleet.endpoint(100)
        limit = DownloadLimit(100_000)
        exchange = BlobExchange(endpoint, BlobStore(64 * MIB), offload=inline, download=limit)
        began = trio.current_time()
        assert await exchange.fetch(BLOB, [holder], max_size_bytes=4 * MIB, deadline_s=3600) == DATA
        assert trio.current_time() - began == pytest.approx(len(DATA) / 100_000, rel=0.1)
        assert len(fleet.asked[PeerId(holder.peer_id)]) == CHUNKS

    with_fleet(scenario)
