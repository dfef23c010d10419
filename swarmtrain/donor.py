"""Donor and joiner: how a peer that comes late gets the weights of one that trains.

A donor answers `snapshot.get` with where to fetch its newest snapshot.  A joiner asks donors one after the other until
one has delivered; the chunks of a broken transfer from the same donor are kept, another donor's snapshot is another
blob.
"""

from __future__ import annotations

import logging
import statistics
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
import trio
from swarm_peer.addresses import Contact
from swarm_peer.blobs import Offload
from swarm_peer.errors import PeerError, Refusal
from swarm_peer.identity import short
from swarm_peer.rpc import Caller, Method

from swarmtrain.exchange_messages import Count, Hash
from swarmtrain.snapshots import (
    MAX_HAVES,
    Payload,
    PayloadInvalid,
    Snapshot,
    SnapshotLibrary,
    decode_payload,
    encode_payload,
    max_payload_bytes,
)

logger = logging.getLogger("swarmtrain.donor")

ASKED_AT_ONCE = 3
OFFER_DEADLINE_S = 60.0  # the donor encodes its snapshot first


class SnapshotRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    run_id: Hash
    haves: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_HAVES)]


class SnapshotReply(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where to fetch the donor's snapshot, and its place in the schedule."""

    payload: Payload
    step: Count
    tokens: Count


# What has been given away stays for those who still fetch it, however fast rounds follow each other.
KEPT_PAYLOADS = 4

GET_SNAPSHOT = Method("snapshot.get", SnapshotRequest, SnapshotReply, max_request_bytes=1024, max_reply_bytes=1024)


@dataclass(frozen=True, slots=True)
class Donation:
    """What can be given away at this moment."""

    snapshot: Snapshot
    step: int
    tokens: int


class DonorBlobs(Protocol):
    """Stores what is given away, and fetches from any holder."""

    def put(self, data: bytes) -> bytes: ...

    def discard(self, blob_id: bytes) -> None: ...

    async def fetch(
        self,
        blob_id: bytes,
        holder: Contact,
        *,
        max_size_bytes: int,
        deadline_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> bytes: ...


class Donor:
    """Gives snapshots to joiners.  The last few encoded forms are kept, and one is made at a time."""

    def __init__(
        self,
        caller: Caller,
        *,
        run_id: bytes,
        library: SnapshotLibrary,
        blobs: DonorBlobs,
        offload: Offload,
        newest: Callable[[], Awaitable[Donation | None]],
    ) -> None:
        self._run_id = run_id
        self._library = library
        self._blobs = blobs
        self._offload = offload
        self._newest = newest
        self._encoded: OrderedDict[tuple[bytes, frozenset[bytes]], Payload] = OrderedDict()
        self._encoding = trio.Lock()
        caller.handle(GET_SNAPSHOT, self._on_get)

    async def _on_get(self, remote: bytes, request: SnapshotRequest) -> SnapshotReply:
        if request.run_id != self._run_id:
            raise Refusal("other-run", f"this peer trains run {self._run_id.hex()[:8]}")
        async with self._encoding:
            donation = await self._newest()
            if donation is None:
                raise Refusal("not-ready", "no round closed yet")
            payload = await self._encode(donation.snapshot, self._library.common(request.haves))
        return SnapshotReply(payload, donation.step, donation.tokens)

    async def encode(self, snapshot: Snapshot, bases: Sequence[Snapshot]) -> Payload:
        """Returns the payload of a snapshot, its blob ready to be fetched until `KEPT_PAYLOADS` others were wanted."""
        async with self._encoding:
            return await self._encode(snapshot, bases)

    async def _encode(self, snapshot: Snapshot, bases: Sequence[Snapshot]) -> Payload:
        key = snapshot.hash, frozenset(base.hash for base in bases)
        payload = self._encoded.get(key)
        if payload is None:
            encoded = await self._offload(encode_payload, self._library.layout, snapshot, bases)
            blob = await self._offload(self._blobs.put, encoded.data)
            payload = self._encoded[key] = Payload(snapshot.hash, encoded.base, blob, len(encoded.data))
        self._encoded.move_to_end(key)
        while len(self._encoded) > KEPT_PAYLOADS:
            self._blobs.discard(self._encoded.popitem(last=False)[1].blob)
        return payload


class NoDonor(Exception):
    """No donor delivered a snapshot; `reasons` has one line for each that was asked."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons) or "nobody to ask")
        self.reasons = list(reasons)


class Joiner:
    """Gets a snapshot from the first donor that delivers."""

    def __init__(
        self, caller: Caller, *, run_id: bytes, library: SnapshotLibrary, blobs: DonorBlobs, offload: Offload
    ) -> None:
        self._caller = caller
        self._run_id = run_id
        self._library = library
        self._blobs = blobs
        self._offload = offload

    async def fetch(
        self,
        donors: Sequence[Contact],
        *,
        deadline_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> Donation:
        """Takes the snapshot of a donor, three asked at a time.  `deadline_s` bounds each transfer.  Raises NoDonor.

        A donor's step is only a claim, and a wrong one would put the joiner at a wrong place in the schedule: of the
        three, the one in the middle comes first.
        """
        reasons: list[str] = []
        for start in range(0, len(donors), ASKED_AT_ONCE):
            offers = await self._ask(donors[start : start + ASKED_AT_ONCE], reasons)
            middle = statistics.median_low([reply.step for _, reply in offers] or [0])
            for donor, reply in sorted(offers, key=lambda offer: abs(offer[1].step - middle)):
                try:
                    snapshot = await self.fetch_payload(reply.payload, donor, deadline_s=deadline_s, progress=progress)
                    return Donation(snapshot, reply.step, reply.tokens)
                except (PeerError, PayloadInvalid) as error:
                    _note(donor, error, reasons)
        raise NoDonor(reasons)

    async def _ask(self, donors: Sequence[Contact], reasons: list[str]) -> list[tuple[Contact, SnapshotReply]]:
        """Returns what each of some donors offers; those that refuse or fail leave a line in `reasons`."""
        offers: dict[bytes, SnapshotReply] = {}
        failures: dict[bytes, PeerError] = {}
        request = SnapshotRequest(self._run_id, self._library.names())

        async def ask(donor: Contact) -> None:
            try:
                offers[donor.peer_id] = await self._caller.call(
                    donor, GET_SNAPSHOT, request, deadline_s=OFFER_DEADLINE_S
                )
            except PeerError as error:
                failures[donor.peer_id] = error

        async with trio.open_nursery() as nursery:
            for donor in donors:
                nursery.start_soon(ask, donor)
        for donor in donors:
            if donor.peer_id in failures:
                _note(donor, failures[donor.peer_id], reasons)
        return [(donor, offers[donor.peer_id]) for donor in donors if donor.peer_id in offers]

    async def fetch_payload(
        self,
        payload: Payload,
        holder: Contact,
        *,
        deadline_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> Snapshot:
        """Fetches and verifies one payload.  Raises PeerError or PayloadInvalid."""
        if not 0 < payload.size_bytes <= max_payload_bytes(self._library.layout):
            raise PayloadInvalid("oversized-payload")
        base = self._library.get(payload.base) if payload.base else None  # exchanges go on and may drop it meanwhile
        if payload.base and base is None:
            raise PayloadInvalid("unknown-base")
        data = await self._blobs.fetch(
            payload.blob, holder, max_size_bytes=payload.size_bytes, deadline_s=deadline_s, progress=progress
        )
        return await self._offload(decode_payload, self._library.layout, payload, data, base)


def _note(donor: Contact, error: Exception, reasons: list[str]) -> None:
    logger.warning("donor %s failed: %s", short(donor.peer_id), error)
    reasons.append(f"{short(donor.peer_id)}: {error}")
