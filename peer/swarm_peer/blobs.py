"""Moves blobs between peers: chunk by chunk, from several holders at once, each chunk checked on arrival.

All holders work off one queue, so a fast one takes more and a slow one holds nobody up. A chunk that does not come
within its deadline goes back to the queue for another holder; a holder that sends a wrong chunk is named, counted
and not asked again. Near the end, a chunk that has been on its way for long is asked of an idle holder too. What a
cancelled fetch has got is kept, and the next fetch of that blob asks for exactly what is missing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import trio

from swarm_peer.addresses import Contact
from swarm_peer.blob_store import MAX_BLOB_BYTES, MAX_CHUNK_BYTES, Hash, blob_id_of, decode_descriptor
from swarm_peer.blob_store import BlobId as BlobId
from swarm_peer.blob_store import BlobStore as BlobStore
from swarm_peer.blob_store import Descriptor as Descriptor
from swarm_peer.blob_store import descriptor_cap_bytes as descriptor_cap_bytes
from swarm_peer.errors import BlobInvalid, BlobUnavailable, DeadlineExpired, PeerError, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.pacing import DownloadLimit
from swarm_peer.rpc import Caller, Method, Priority

logger = logging.getLogger("swarm_peer")


class DescriptorRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the descriptor of a blob, unless it is longer than `max_bytes`; the reply is its raw bytes."""

    blob_id: Hash
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**32)]


class ChunkRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for one chunk of a blob; the reply is its raw bytes."""

    blob_id: Hash
    index: Annotated[int, msgspec.Meta(ge=0, le=2**20)]


DESCRIPTOR: Final = Method(
    "blobs.descriptor", DescriptorRequest, bytes, 64, descriptor_cap_bytes(MAX_BLOB_BYTES), Priority.BULK
)
CHUNK: Final = Method("blobs.chunk", ChunkRequest, bytes, 64, MAX_CHUNK_BYTES, Priority.BULK)

Result = TypeVar("Result")


class Offload(Protocol):
    """Runs blocking work away from the event loop, as `trio.to_thread.run_sync` does."""

    def __call__(self, sync_fn: Callable[..., Result], /, *args: Any) -> Awaitable[Result]: ...  # noqa: ANN401 - as trio's


async def offload_to_thread(sync_fn: Callable[..., Result], /, *args: Any) -> Result:  # noqa: ANN401 - as trio's
    """The default `Offload`: a worker thread."""
    return await trio.to_thread.run_sync(sync_fn, *args)


@dataclass(frozen=True, slots=True)
class BlobParams:
    """`requests_per_holder`: chunks in flight from one holder at most; a fetch begins with one and adds one for each
    chunk that came quickly. `chunk_deadline_s`: within which a chunk must come. A chunk that does not halves the
    requests to its holder and doubles its deadline, up to `chunk_deadline_cap_s`: on a slow link all are late.

    A holder is left after `failures_per_holder` failures in a row; `pause_s` passes before it is asked again. After
    `hedge_after_s` an idle holder is asked too for a chunk that is on its way. `uploads` bounds the chunks that are
    read at one time for others, `partials` the unfinished blobs that are remembered.
    """

    requests_per_holder: int = 6
    chunk_deadline_s: float = 20.0
    chunk_deadline_cap_s: float = 160.0
    descriptor_deadline_s: float = 10.0
    hedge_after_s: float = 2.0
    failures_per_holder: int = 3
    pause_s: float = 0.5
    uploads: int = 64
    partials: int = 8


@dataclass(slots=True)
class BlobStats:
    """Counters since the start. `corrupt` counts wrong chunks by the peer id of who sent them."""

    fetched_bytes: int = 0
    served_bytes: int = 0
    corrupt: Counter[PeerId] = field(default_factory=Counter)


class _Partial:
    """A blob on its way: the buffer that it grows in, and which chunks are still missing."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.buffer = bytearray(descriptor.size)
        self.missing: deque[int] = deque()
        self.in_flight: dict[int, dict[PeerId, trio.CancelScope]] = {}
        self.asked_at: dict[int, float] = {}
        self.done: set[int] = set()
        self.done_bytes = 0
        self.changed = trio.Event()

    @property
    def is_complete(self) -> bool:
        return len(self.done) == len(self.descriptor.hashes)

    def resume(self) -> None:
        """Makes exactly the chunks that have not arrived the missing ones."""
        self.in_flight.clear()
        self.missing = deque(i for i in range(len(self.descriptor.hashes)) if i not in self.done)

    def take(self, index: int, chunk: bytes) -> bool:
        """Checks a chunk and copies it to its place. Work for a thread; False if it is wrong."""
        if not self.descriptor.check_chunk(index, chunk):
            return False
        start, end = self.descriptor.span(index)
        self.buffer[start:end] = chunk
        return True

    def choose(self, holder: PeerId, asked_before: float) -> int | None:
        """The next chunk for a holder: a missing one, else one that another was asked for before `asked_before`."""
        while self.missing:
            index = self.missing.popleft()
            if index not in self.done:
                return index
        for index, asked in self.in_flight.items():
            if len(asked) == 1 and holder not in asked and self.asked_at[index] <= asked_before:
                return index
        return None

    def give_back(self, index: int) -> None:
        """Ends the work on a chunk; unless it has arrived or is asked of another, it is missing again."""
        if index not in self.done and index not in self.in_flight and index not in self.missing:
            self.missing.appendleft(index)
        self.changed.set()
        self.changed = trio.Event()


@dataclass(frozen=True, slots=True)
class _Job:
    """One fetch: what, how far, what went wrong with whom, over how many holders."""

    blob_id: BlobId
    partial: _Partial
    faults: dict[PeerId, str]
    holders: int
    progress: Callable[[int, int], None] | None


class _Pace:
    """How many chunks one holder is asked for at once, and how long each may take: as fast as its link allows."""

    def __init__(self, params: BlobParams) -> None:
        self._params = params
        self.requests = 1
        self.deadline_s = params.chunk_deadline_s

    def note_arrival(self, took_s: float) -> None:
        if took_s < self.deadline_s / 4:
            self.requests = min(self.requests + 1, self._params.requests_per_holder)

    def note_lateness(self) -> bool:
        """Slows down. False if it cannot get any slower: then the holder has stalled."""
        if self.requests == 1 and self.deadline_s >= self._params.chunk_deadline_cap_s:
            return False
        self.requests = max(1, self.requests // 2)
        self.deadline_s = min(2 * self.deadline_s, self._params.chunk_deadline_cap_s)
        return True


class BlobExchange:
    """Fetches blobs from others and serves those in `store` to everybody who names them."""

    def __init__(
        self,
        endpoint: Caller,
        store: BlobStore,
        *,
        offload: Offload = offload_to_thread,
        params: BlobParams | None = None,
        download: DownloadLimit | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._download = download or DownloadLimit()
        self._store = store
        self._offload = offload
        self._params = params or BlobParams()
        self._partials: OrderedDict[BlobId, _Partial] = OrderedDict()
        self._locks: dict[BlobId, tuple[trio.Lock, list[None]]] = {}
        self._uploads = 0
        self.stats = BlobStats()
        endpoint.handle(DESCRIPTOR, self._on_descriptor)
        endpoint.handle(CHUNK, self._on_chunk)

    async def fetch(
        self,
        blob_id: BlobId,
        holders: Sequence[Contact],
        *,
        max_size_bytes: int,
        deadline_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> bytes:
        """The blob, from the store or else from the holders; keeps it in the store if the quota allows.

        `progress` is called with the bytes so far and in all. If cancelled, what has arrived is kept for the next
        fetch of the same blob. Raises `BlobUnavailable` if the holders do not deliver in time, and `BlobInvalid`
        if that is because they all sent wrong bytes, or if the blob is larger than `max_size_bytes`.
        """
        lock, users = self._locks.setdefault(blob_id, (trio.Lock(), []))
        users.append(None)
        cap_bytes = min(max_size_bytes, MAX_BLOB_BYTES)
        try:
            with trio.move_on_after(deadline_s):
                async with lock:
                    data = await self._offload(self._store.get, blob_id)
                    if data is None:
                        data = await self._fetch(blob_id, holders, cap_bytes, progress)
                    if len(data) > max_size_bytes:
                        raise BlobInvalid(f"blob of {len(data)} bytes, {max_size_bytes} allowed")
                    return data
            raise BlobUnavailable(f"blob {short(blob_id)} did not arrive within {deadline_s:.0f} s")
        finally:
            users.pop()
            if not users:
                self._locks.pop(blob_id, None)

    def forget(self, blob_id: BlobId) -> None:
        """Drops what a cancelled fetch left behind."""
        self._partials.pop(blob_id, None)

    async def _fetch(
        self,
        blob_id: BlobId,
        holders: Sequence[Contact],
        cap_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> bytes:
        others = [h for h in {h.peer_id: h for h in holders}.values() if h.peer_id != self._endpoint.peer_id]
        faults: dict[PeerId, str] = {}
        partial = self._partials.get(blob_id)
        if partial is None:
            descriptor = await self._fetch_descriptor(blob_id, others, cap_bytes, faults)
            partial = await self._offload(_Partial, descriptor)
            self._partials[blob_id] = partial
            self._bound_partials()
        elif partial.descriptor.size > cap_bytes:
            raise BlobInvalid(f"blob of {partial.descriptor.size} bytes, {cap_bytes} allowed")
        partial.resume()
        if progress:
            progress(partial.done_bytes, partial.descriptor.size)
        usable = [holder for holder in others if PeerId(holder.peer_id) not in faults]
        job = _Job(blob_id, partial, faults, len(usable), progress)
        async with trio.open_nursery() as nursery:
            for holder in usable:
                nursery.start_soon(self._use_holder, job, holder)
        if not partial.is_complete:
            raise _failure(blob_id, faults, self.stats.corrupt)
        self._partials.pop(blob_id, None)
        return await self._offload(self._keep, partial)

    def _keep(self, partial: _Partial) -> bytes:
        data = bytes(partial.buffer)
        try:
            self._store.insert(partial.descriptor, data)
        except BlobInvalid as error:
            logger.info("a fetched blob is not kept: %s", error)
        return data

    def _bound_partials(self) -> None:
        """Forgets the oldest unfinished blobs beyond the number allowed, or beyond the store's quota in all."""
        while len(self._partials) > 1 and (
            len(self._partials) > self._params.partials
            or sum(p.descriptor.size for p in self._partials.values()) > self._store.quota_bytes
        ):
            self._partials.popitem(last=False)

    async def _fetch_descriptor(
        self, blob_id: BlobId, holders: list[Contact], cap_bytes: int, faults: dict[PeerId, str]
    ) -> Descriptor:
        """Asks the holders one after the other. Fills `faults` with those not worth asking for chunks."""
        max_bytes = descriptor_cap_bytes(cap_bytes)
        method = dataclasses.replace(DESCRIPTOR, max_reply_bytes=max_bytes)
        request = DescriptorRequest(blob_id, max_bytes)
        for holder in holders:
            peer_id = PeerId(holder.peer_id)
            deadline_s = self._params.descriptor_deadline_s
            try:
                body = await self._endpoint.call(holder, method, request, deadline_s=deadline_s)
            except PeerError as error:
                faults[peer_id] = str(error)
                continue
            if blob_id_of(body) == blob_id:
                # What is wrong with it from here on is its author's doing, not the holder's.
                return await self._offload(decode_descriptor, blob_id, body, cap_bytes)
            faults[peer_id] = "sent a wrong descriptor"
            self.stats.corrupt[peer_id] += 1
        raise _failure(blob_id, faults, self.stats.corrupt)

    async def _use_holder(self, job: _Job, holder: Contact) -> None:
        """Keeps some requests going to one holder until the blob is complete or the holder is given up."""
        partial, peer_id, limit = job.partial, PeerId(holder.peer_id), self._params.failures_per_holder
        failures, failed_at, slowed_at = 0, -math.inf, -math.inf
        pace = _Pace(self._params)

        async def work(number: int) -> None:
            nonlocal failures, failed_at, slowed_at
            while not partial.is_complete and failures < limit:
                if number >= pace.requests:
                    with trio.move_on_after(self._params.hedge_after_s / 2):
                        await partial.changed.wait()
                    continue
                asked_at = trio.current_time()
                index = partial.choose(peer_id, asked_at - self._params.hedge_after_s)
                if index is None:
                    with trio.move_on_after(self._params.hedge_after_s / 2):
                        await partial.changed.wait()
                    continue
                pause_s = 0.0
                start, end = partial.descriptor.span(index)
                await trio.sleep_until(self._download.reserve(end - start, trio.current_time()))
                try:
                    if await self._fetch_chunk(job, holder, index, pace.deadline_s):
                        pace.note_arrival(trio.current_time() - asked_at)
                        if job.progress:
                            job.progress(partial.done_bytes, partial.descriptor.size)
                    failures = failures if failures >= limit else 0
                except DeadlineExpired as error:
                    # Chunks that were asked for together are late together, and slow us down once.
                    if asked_at > slowed_at:
                        slowed_at = trio.current_time()
                        if not pace.note_lateness():
                            job.faults.setdefault(peer_id, str(error))
                            failures = limit
                except BlobInvalid:
                    failures = limit
                    job.faults[peer_id] = "sent a wrong chunk"
                    self.stats.corrupt[peer_id] += 1
                    logger.warning("peer %s sent a wrong chunk of blob %s", short(peer_id), short(job.blob_id))
                except PeerError as error:
                    job.faults.setdefault(peer_id, str(error))
                    code = error.code if isinstance(error, Refusal) else ""
                    if code == "unknown-blob":
                        failures = limit
                    elif code != "busy" and asked_at > failed_at:
                        # Requests that failed together, with one connection, count as one failure.
                        failures, failed_at = failures + 1, trio.current_time()
                    pause_s = self._params.pause_s * max(failures, 1)
                finally:
                    partial.give_back(index)
                if failures < limit:
                    await trio.sleep(pause_s)

        share = -(-len(partial.missing) // job.holders)
        async with trio.open_nursery() as nursery:
            for number in range(max(1, min(self._params.requests_per_holder, share))):
                nursery.start_soon(work, number)

    async def _fetch_chunk(self, job: _Job, holder: Contact, index: int, deadline_s: float) -> bool:
        """Gets one chunk into place. False if another holder was faster. Raises `PeerError`."""
        partial, peer_id = job.partial, PeerId(holder.peer_id)
        start, end = partial.descriptor.span(index)
        method = dataclasses.replace(CHUNK, max_reply_bytes=end - start)
        with trio.CancelScope() as scope:
            partial.in_flight.setdefault(index, {})[peer_id] = scope
            partial.asked_at[index] = trio.current_time()
            try:
                chunk = await self._endpoint.call(
                    holder, method, ChunkRequest(job.blob_id, index), deadline_s=deadline_s
                )
                if not await self._offload(partial.take, index, chunk):
                    raise BlobInvalid(f"wrong chunk from peer {short(peer_id)}")
            finally:
                asked = partial.in_flight.get(index, {})
                asked.pop(peer_id, None)
                if not asked:
                    partial.in_flight.pop(index, None)
        if scope.cancelled_caught or index in partial.done:
            return False
        partial.done.add(index)
        partial.done_bytes += end - start
        self.stats.fetched_bytes += end - start
        for loser in partial.in_flight.pop(index, {}).values():
            loser.cancel()
        return True

    # Serving.

    async def _on_descriptor(self, remote: PeerId, request: DescriptorRequest) -> bytes:
        body = self._store.descriptor_bytes(request.blob_id)
        if body is None:
            raise Refusal("unknown-blob")
        if len(body) > request.max_bytes:
            raise Refusal("too-large")
        return body

    async def _on_chunk(self, remote: PeerId, request: ChunkRequest) -> bytes:
        if self._uploads >= self._params.uploads:
            raise Refusal("busy")
        self._uploads += 1
        try:
            chunk = await self._offload(self._store.read_chunk, request.blob_id, request.index)
        finally:
            self._uploads -= 1
        if chunk is None:
            raise Refusal("unknown-blob")
        self.stats.served_bytes += len(chunk)
        return chunk


def _failure(blob_id: bytes, faults: dict[PeerId, str], corrupt: Counter[PeerId]) -> PeerError:
    """The error for a blob that no holder delivered; `BlobInvalid` if wrong bytes alone stood in the way."""
    if not faults:
        return BlobUnavailable(f"blob {short(blob_id)}: no holder is known")
    reasons = "; ".join(f"peer {short(peer_id)}: {reason}" for peer_id, reason in faults.items())
    kind = BlobInvalid if all(corrupt[peer_id] for peer_id in faults) else BlobUnavailable
    return kind(f"blob {short(blob_id)} could not be fetched: {reasons}")
