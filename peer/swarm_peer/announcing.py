"""Our own records in the DHT: stored at the nearest servers, renewed in time, re-signed when outrun."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm_peer.addresses import Contact
from swarm_peer.dht import STORE, StoreRecord
from swarm_peer.errors import PeerError
from swarm_peer.identity import Identity
from swarm_peer.kademlia_params import KademliaParams
from swarm_peer.neighbours import Neighbours
from swarm_peer.records import SEQ_CAP, AgedRecord, SignedRecord, make_record, slot_of
from swarm_peer.storage import PutOutcome
from swarm_peer.walks import Walks


@dataclass(slots=True)
class _Announcement:
    """A record of ours that is kept alive in the DHT."""

    record: SignedRecord
    due_at: float
    retries: int = 0
    is_last: bool = False  # a goodbye: published once, then left to expire


class Announcer:
    """Keeps records alive. `hold` stores one of ours in our own store too; None if we hold none for anybody."""

    def __init__(
        self,
        identity: Identity,
        neighbours: Neighbours,
        walks: Walks,
        params: KademliaParams,
        rng: random.Random,
        hold: Callable[[AgedRecord], None] | None,
    ) -> None:
        self._identity = identity
        self._neighbours = neighbours
        self._walks = walks
        self._params = params
        self._rng = rng
        self._hold = hold
        self._announcements: dict[tuple[bytes, bytes], _Announcement] = {}  # by key and slot
        self._changed = trio.Event()

    async def announce(self, record: SignedRecord, *, is_last: bool = False) -> None:
        """Publishes a record of ours, and keeps it alive unless it `is_last`.

        It goes above what was announced before in its place, with a new signature if its `seq` asks for that.
        Raises `RecordInvalid` if the payload is not what the record's kind calls for.
        """
        place = (record.key, slot_of(record))
        before = self._announcements.get(place)
        seq = max(record.seq, before.record.seq + 1 if before else 1)
        announcement = _Announcement(self._resign(record, seq), math.inf, is_last=is_last)
        self._announcements[place] = announcement
        await self._publish(place, announcement)

    async def keep_announced(self) -> None:
        """Renews what is due, until cancelled."""
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            due = [(place, a) for place, a in self._announcements.items() if a.due_at <= now]
            for place, announcement in due:
                announcement.due_at = math.inf
                announcement.record = self._resign(announcement.record, announcement.record.seq + 1)
                await self._publish(place, announcement)
            next_due = min((a.due_at for a in self._announcements.values()), default=math.inf)
            with trio.move_on_at(next_due):
                await self._changed.wait()

    def republish_now(self) -> None:
        """Makes everything due: there is somebody to tell it to, at last."""
        for announcement in self._announcements.values():
            announcement.due_at = min(announcement.due_at, trio.current_time())
        self._changed.set()

    async def _publish(self, place: tuple[bytes, bytes], announcement: _Announcement) -> None:
        """Stores the record at the nearest servers. If some hold a newer one of ours, signs one newer still."""
        newer_seq, stored = await self._store_at_nearest(announcement.record)
        if newer_seq is not None and newer_seq < SEQ_CAP:
            # A former life of this identity, as a rule: its last record outlives it.
            announcement.record = self._resign(announcement.record, newer_seq + 1)
            _, stored = await self._store_at_nearest(announcement.record)
        now = trio.current_time()
        if announcement.is_last:
            self._announcements.pop(place, None)
            return
        if stored or (self._hold and not self._neighbours.has_entries):
            announcement.retries = 0
            announcement.due_at = now + self._params.republish_s * self._rng.uniform(0.9, 1.1)
        else:
            announcement.retries += 1
            announcement.due_at = now + self._params.backoff_s(announcement.retries, self._rng)
        self._changed.set()

    async def _store_at_nearest(self, record: SignedRecord) -> tuple[int | None, int]:
        """Returns the highest newer seq that a holder has of ours, if any, and how many took the record."""
        newer_seq: int | None = None
        stored = 0
        if self._hold:
            self._hold(AgedRecord(record, 0))
        slots = trio.CapacityLimiter(10)

        async def store_at(holder: Contact) -> None:
            nonlocal newer_seq, stored
            async with slots:
                with contextlib.suppress(PeerError):
                    request = StoreRecord(self._neighbours.sender(), AgedRecord(record, 0))
                    reply = await self._neighbours.call(holder, STORE, request)
                    if reply.outcome in (PutOutcome.STORED, PutOutcome.REFRESHED, PutOutcome.HELD):
                        stored += 1
                    newer = reply.newer.record if reply.newer else None
                    if newer and self._is_in_place_of(newer, record):
                        newer.verify()
                        newer_seq = max(newer.seq, newer_seq or 0)

        nearest = await self._walks.find_nodes(record.key)
        with trio.move_on_after(self._params.lookup_deadline_s):
            async with trio.open_nursery() as nursery:
                for holder in nearest:
                    nursery.start_soon(store_at, holder)
        return (newer_seq if newer_seq is not None and newer_seq >= record.seq else None), stored

    def _is_in_place_of(self, newer: SignedRecord, record: SignedRecord) -> bool:
        is_ours = newer.author() == self._identity.peer_id
        return is_ours and newer.key == record.key and slot_of(newer) == slot_of(record)

    def _resign(self, record: SignedRecord, seq: int) -> SignedRecord:
        if seq == record.seq:
            return record
        return make_record(self._identity, record.kind, record.key, min(seq, SEQ_CAP), record.ttl_s, record.payload)
