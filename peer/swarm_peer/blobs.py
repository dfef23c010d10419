"""Moves blobs between peers: chunk by chunk, from several holders at once, each chunk checked on arrival.

All holders work off one queue, so a fast one takes more and a slow one holds nobody up. A chunk of which nothing
comes for long goes back to the queue for another holder; a holder that sends a wrong chunk is named, counted and not
asked again. `blob_fetch` has the work on one blob. What a cancelled fetch has got is kept, and the next fetch of that
blob asks for exactly what is missing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import trio

from swarm_peer.addresses import Contact
from swarm_peer.blob_fetch import CHUNK as CHUNK
from swarm_peer.blob_fetch import BlobParams as BlobParams
from swarm_peer.blob_fetch import ChunkRequest as ChunkRequest
from swarm_peer.blob_fetch import Job, LaneMemory, Result, Tools, fetch_chunks
from swarm_peer.blob_fetch import Offload as Offload
from swarm_peer.blob_store import MAX_BLOB_BYTES, Hash, blob_id_of, decode_descriptor
from swarm_peer.blob_store import BlobId as BlobId
from swarm_peer.blob_store import BlobStore as BlobStore
from swarm_peer.blob_store import Descriptor as Descriptor
from swarm_peer.blob_store import descriptor_cap_bytes as descriptor_cap_bytes
from swarm_peer.errors import BlobInvalid, BlobUnavailable, PeerError, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.pacing import DownloadLimit
from swarm_peer.partial_blob import PartialBlob
from swarm_peer.rpc import Caller, Method, Priority

logger = logging.getLogger("swarm_peer")


class DescriptorRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the descriptor of a blob, unless it is longer than `max_bytes`; the reply is its raw bytes."""

    blob_id: Hash
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**32)]


DESCRIPTOR: Final = Method(
    "blobs.descriptor", DescriptorRequest, bytes, 64, descriptor_cap_bytes(MAX_BLOB_BYTES), Priority.BULK
)


async def offload_to_thread(sync_fn: Callable[..., Result], /, *args: Any) -> Result:  # noqa: ANN401 - as trio's
    """The default `Offload`: a worker thread."""
    return await trio.to_thread.run_sync(sync_fn, *args)


@dataclass(slots=True)
class BlobStats:
    """Counters since the start. `corrupt` counts wrong chunks by the peer id of who sent them."""

    fetched_bytes: int = 0
    served_bytes: int = 0
    corrupt: Counter[PeerId] = field(default_factory=Counter)


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
        self._store = store
        self._offload = offload
        self._params = params or BlobParams()
        self._tools = Tools(endpoint, offload, self._params, download or DownloadLimit(), LaneMemory())
        self._partials: OrderedDict[BlobId, PartialBlob] = OrderedDict()
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
            partial = await self._offload(PartialBlob, descriptor)
            self._partials[blob_id] = partial
            self._bound_partials()
        elif partial.descriptor.size > cap_bytes:
            raise BlobInvalid(f"blob of {partial.descriptor.size} bytes, {cap_bytes} allowed")
        partial.resume()
        if progress:
            progress(partial.done_bytes, partial.descriptor.size)
        usable = [holder for holder in others if PeerId(holder.peer_id) not in faults]
        job = Job(blob_id, partial, faults, progress, self._note_corrupt, self._note_fetched)
        await fetch_chunks(job, usable, self._tools)
        if not partial.is_complete:
            raise _failure(blob_id, faults, self.stats.corrupt)
        self._partials.pop(blob_id, None)
        return await self._offload(self._keep, partial)

    def _note_corrupt(self, peer_id: PeerId) -> None:
        self.stats.corrupt[peer_id] += 1

    def _note_fetched(self, size_bytes: int) -> None:
        self.stats.fetched_bytes += size_bytes

    def _keep(self, partial: PartialBlob) -> bytes:
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
