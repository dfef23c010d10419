"""The records that a DHT server holds for others: a bounded store with one rule for every kind of excess.

Invariants, which the state-machine test holds:

- one record per (key, author, slot) (`records.slot_of`), at most `slots_per_author` of one author under a key,
  `records_per_key` under a key, `keys` keys, `records` records;
- `seq` of a (key, author, slot) never goes back while the record or its tombstone is held, and a tombstone stays as
  long again as the record lived;
- a record ends at the holder's own receipt time plus what its sender left of `ttl_s`; only the author itself
  can give a held record a new lease, so copies that go round and round never prolong a life;
- whoever signs two statements with one `seq` is flagged, and every holder keeps the same one of them.

No I/O, no clock: `now` is monotonic seconds, `rng` a seeded generator. Signatures are the caller's to check
*before* `put`, and only for records that `would_take` asks for.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from swarm_peer.records import AgedRecord, SignedRecord, age_record, slot_of, supersedes
from swarm_peer.routing import distance


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Caps of a `RecordStore`. `authors_per_network` counts authors of one /16 (/32 for IPv6) under one key."""

    keys: int = 1000
    records_per_key: int = 64
    records: int = 16_384
    slots_per_author: int = 16
    authors_per_network: int = 4
    flagged_authors: int = 1024


class PutOutcome(Enum):
    """What became of a record."""

    STORED = "stored"
    REFRESHED = "refreshed"
    HELD = "held"  # we have this very record, and its life is not ours to prolong
    STALE = "stale"  # we have a newer one
    FULL = "full"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record came from: `is_author` if its author delivered it, `network` and `topic` for fair
    eviction.

    `network`: the author's /16, None if exempt. `topic`: what the record is about (a run id) where one key
    collects several.
    """

    is_author: bool
    network: Hashable | None = None
    topic: Hashable | None = None


@dataclass(slots=True)
class _Entry:
    record: SignedRecord
    born_at: float  # now minus age, so that age at any time is a subtraction
    origin: Origin

    @property
    def expires_at(self) -> float:
        return self.born_at + self.record.ttl_s

    @property
    def forgotten_at(self) -> float:
        return self.born_at + 2 * self.record.ttl_s


_Place = tuple[bytes, bytes]  # author and slot, under a key


class RecordStore:
    """Holds records by key, author and slot. `own_id` decides which keys are nearest, hence kept when keys run out."""

    def __init__(self, own_id: bytes, rng: random.Random, limits: StorageLimits | None = None) -> None:
        self._own_id = own_id
        self._rng = rng
        self._limits = limits or StorageLimits()
        self._keys: dict[bytes, dict[_Place, _Entry]] = {}
        self._count = 0
        self._flagged: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Records and tombstones held: what the caps count."""
        return self._count

    @property
    def flagged(self) -> frozenset[bytes]:
        """Authors (peer ids) that signed two statements with one `seq`: a key in two processes, or a cheat."""
        return frozenset(self._flagged)

    def would_take(self, record: SignedRecord) -> bool:
        """False if `put` would certainly leave things as they are: then spare the signature check.

        Raises `RecordInvalid` as `slot_of` does.
        """
        entry = self._find(record)
        return entry is None or record.seq >= entry.record.seq

    def put(self, aged: AgedRecord, origin: Origin, now: float) -> PutOutcome:
        """Takes a verified record, or says why not."""
        record = aged.record
        if aged.remaining_s <= 0:
            return PutOutcome.EXPIRED
        entry = self._find(record)
        if entry is not None:
            return self._put_again(entry, aged, origin, now)
        if not self._make_room(record.key, record.author(), origin, now):
            return PutOutcome.FULL
        place = (record.author(), slot_of(record))
        self._keys.setdefault(record.key, {})[place] = _Entry(record, now - aged.age_s, origin)
        self._count += 1
        return PutOutcome.STORED

    def get(self, key: bytes, now: float) -> list[AgedRecord]:
        """The live records under a key with their present ages."""
        return [
            age_record(entry.record, now - entry.born_at)
            for entry in self._keys.get(key, {}).values()
            if entry.expires_at > now
        ]

    def held(self, record: SignedRecord, now: float) -> AgedRecord | None:
        """The record or tombstone that stands in the place of `record`: what a stale put is answered with."""
        entry = self._find(record)
        return None if entry is None else age_record(entry.record, now - entry.born_at)

    def expire(self, now: float) -> None:
        """Forgets tombstones whose time is over. Call it every few seconds."""
        for key in list(self._keys):
            for place, entry in list(self._keys[key].items()):
                if entry.forgotten_at <= now:
                    self._remove(key, place)

    def _find(self, record: SignedRecord) -> _Entry | None:
        return self._keys.get(record.key, {}).get((record.author(), slot_of(record)))

    def _put_again(self, entry: _Entry, aged: AgedRecord, origin: Origin, now: float) -> PutOutcome:
        record = aged.record
        if record.seq < entry.record.seq:
            return PutOutcome.STALE
        same = record.content_hash() == entry.record.content_hash()
        if record.seq == entry.record.seq and not same:
            self._flag(record.author())
        if supersedes(record, entry.record):
            entry.record, entry.born_at, entry.origin = record, now - aged.age_s, origin
            return PutOutcome.STORED
        if not same:
            return PutOutcome.STALE
        if origin.is_author and now - aged.age_s > entry.born_at:
            entry.born_at, entry.origin = now - aged.age_s, origin
            return PutOutcome.REFRESHED
        return PutOutcome.HELD

    def _make_room(self, key: bytes, author: bytes, origin: Origin, now: float) -> bool:
        """True if a new record of `author` fits under the key, after evicting whom the caps demand."""
        entries = self._keys.get(key, {})
        own = [place for place in entries if place[0] == author]
        if len(own) >= self._limits.slots_per_author:
            self._remove(key, self._rng.choice(own))
            return True
        if origin.network is not None and not own:
            inside = {place[0] for place, entry in entries.items() if entry.origin.network == origin.network}
            if len(inside) >= self._limits.authors_per_network:
                victim = self._rng.choice(sorted(inside))
                for place in [place for place in entries if place[0] == victim]:
                    self._remove(key, place)
                return True
        if len(entries) >= self._limits.records_per_key:
            chosen = self._choose_victim(entries, origin, now)
            if chosen is None:
                return False
            self._remove(key, chosen)
            return True
        needs_key = not entries and len(self._keys) >= self._limits.keys
        if needs_key or self._count >= self._limits.records:
            return self._drop_from_farthest(key, whole_key=needs_key, now=now)
        return True

    def _choose_victim(self, entries: dict[_Place, _Entry], origin: Origin, now: float) -> _Place | None:
        """Tombstones go first, then records that others brought, then, for an author in person, any.

        Among those a random one of the largest share, which is that of a topic or of an author, so that neither one
        large run nor one author of many can push all others out of the index.
        """
        dead = [place for place, entry in entries.items() if entry.expires_at <= now]
        if dead:
            return self._rng.choice(dead)
        candidates = {place: entry for place, entry in entries.items() if not entry.origin.is_author}
        if not candidates:
            if not origin.is_author:
                return None
            candidates = entries
        by_topic = Counter(entry.origin.topic for entry in candidates.values())
        by_author = Counter(author for author, _ in candidates)
        shares = {place: max(by_topic[entry.origin.topic], by_author[place[0]]) for place, entry in candidates.items()}
        largest = max(shares.values())
        return self._rng.choice([place for place, share in shares.items() if share == largest])

    def _drop_from_farthest(self, key: bytes, *, whole_key: bool, now: float) -> bool:
        farthest = max(self._keys, key=lambda held: distance(held, self._own_id))
        if distance(farthest, self._own_id) <= distance(key, self._own_id):
            return False
        places = list(self._keys[farthest])
        for place in places if whole_key else [self._rng.choice(places)]:
            self._remove(farthest, place)
        return True

    def _remove(self, key: bytes, place: _Place) -> None:
        del self._keys[key][place]
        self._count -= 1
        if not self._keys[key]:
            del self._keys[key]

    def _flag(self, author: bytes) -> None:
        self._flagged[author] = None
        while len(self._flagged) > self._limits.flagged_authors:
            self._flagged.popitem(last=False)


class RateLimiter:
    """A token bucket per peer: `rate_per_s` on average, `burst` at once. Bounded memory; no I/O."""

    def __init__(self, rate_per_s: float, burst: float, peers: int = 10_000) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._peers = peers
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # tokens, at time

    def allow(self, peer_id: bytes, now: float, cost: float = 1.0) -> bool:
        """True if the peer may go on, and takes `cost` tokens; False takes none."""
        tokens, since = self._buckets.pop(peer_id, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate_per_s)
        allowed = tokens >= cost
        self._buckets[peer_id] = (tokens - cost if allowed else tokens, now)
        while len(self._buckets) > self._peers:
            self._buckets.popitem(last=False)
        return allowed
