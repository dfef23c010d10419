"""What one peer knows about the others of its run: the gossip view, free of I/O.

Invariants:

- One signed record per peer, the newest by `records.supersedes`; `seq` never goes back while anything of a peer is
  remembered.
- A record ends at our receipt plus what its sender left of its life. Copies that come again do not prolong it; only
  the author itself can. After its end the peer counts as lost, is shown so for a while, and its tombstone keeps the
  same record from coming back by way of slower peers.
- A goodbye stays as a tombstone for its own, longer life.
- Memory and message sizes are bounded. With more members than a message has room for, messages carry a random sample.
- Beyond `members`, the view is partial: those members stay whose ids come first in an order of our own, made with a
  secret salt (min-wise sampling: Bortnikov et al., Brahms, 2009). So it is a uniform sample of all whose records reach
  us, whoever names itself most often, and each peer has another one.
- Nobody can fill the view alone: a sender introduces at most `introductions_per_s` others, after a first burst.
- Traffic per peer does not grow with the swarm: above `scale_members`, records live, and hence are renewed, in
  proportion to the number of members (`lifetime_s`).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final, Literal

import msgspec

from swarm_peer.addresses import Contact, PeerIdBytes
from swarm_peer.errors import RecordInvalid
from swarm_peer.identity import PeerId
from swarm_peer.records import (
    AgedRecord,
    PeerPayload,
    PeerState,
    Seq,
    SignedRecord,
    age_record,
    decode_peer,
    members_key,
    supersedes,
)
from swarm_peer.routing import is_dialable
from swarm_peer.storage import RateLimiter

LIFETIME_CAP_S: Final = 1800
DIGESTS_CAP: Final = 64
RECORDS_CAP: Final = 32


@dataclass(frozen=True, slots=True)
class MembershipParams:
    """`interval_s` between gossip rounds with `fanout` members each. `ttl_s`: life of a record of a small swarm.

    `left_ttl_s` and `lost_shown_s`: how long goodbyes and losses are remembered. `members` bounds the view, which
    costs about 1 KiB for each; `digests`, `records` and `rumours` bound what one message carries. `push_fanout`
    members hear at once of a change of our own. `discovery_s`: how often the discovery is asked although members are
    known, so that separated halves of a swarm meet again.
    """

    interval_s: float = 5.0
    fanout: int = 2
    ttl_s: int = 45
    scale_members: int = 100
    left_ttl_s: int = 600
    lost_shown_s: float = 600.0
    members: int = 2048
    introductions_per_s: float = 0.1
    introductions_burst: float = 1000
    digests: int = 64
    records: int = 32
    rumours: int = 16
    push_fanout: int = 3
    discovery_s: float = 300.0
    rpc_deadline_s: float = 5.0
    goodbye_s: float = 2.0
    retry_s: tuple[float, float] = (1.0, 60.0)

    def __post_init__(self) -> None:
        if self.digests > DIGESTS_CAP or max(self.records, self.rumours) > RECORDS_CAP:
            raise ValueError(f"a message carries at most {DIGESTS_CAP} digests and {RECORDS_CAP} records")


@dataclass(frozen=True, slots=True)
class Member:
    """A peer of the run as we know it. `age_s` is how long ago it made its newest record, `status` its own text."""

    contact: Contact
    state: PeerState | Literal["lost"]
    status: bytes
    seq: int
    age_s: float

    @property
    def is_live(self) -> bool:
        return self.state not in (PeerState.LEFT, "lost")


class Digest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whose record we have, and which version."""

    peer_id: PeerIdBytes
    seq: Seq


class Merge(Enum):
    """What became of a record."""

    NEWER = "newer"
    KNOWN = "known"
    OURS = "ours"  # somebody shows us a record of our own: the caller's business


@dataclass(slots=True)
class _Entry:
    record: SignedRecord
    payload: PeerPayload
    born_at: float
    rank: bytes
    pushes_left: int = 0

    @property
    def expires_at(self) -> float:
        return self.born_at + self.record.ttl_s

    @property
    def has_left(self) -> bool:
        return self.payload.state is PeerState.LEFT


class MemberTable:
    """See the module. `now` is monotonic seconds. `local_allowed` says whether local addresses may be dialled.

    `salt`: 64 bytes at most that nobody else knows; None takes them from `rng`.
    """

    def __init__(
        self,
        own_id: PeerId,
        run_id: bytes,
        params: MembershipParams,
        rng: random.Random,
        salt: bytes | None = None,
    ) -> None:
        self._own_id = own_id
        self._run_id = run_id
        self._key = members_key(run_id)
        self._params = params
        self._rng = rng
        self._entries: dict[PeerId, _Entry] = {}
        self._salt = salt or rng.randbytes(16)
        self._last: PeerId | None = None  # of highest rank among the others, if that is known
        self._departed: list[PeerId] = []
        self._introductions = RateLimiter(params.introductions_per_s, params.introductions_burst)
        self.local_allowed = True

    def __len__(self) -> int:
        return len(self._entries)

    def put_own(self, record: SignedRecord, now: float) -> None:
        """Takes the record that we have just signed ourselves."""
        self._entries[self._own_id] = _Entry(record, decode_peer(record), now, b"", self._pushes())

    def merge(self, aged: AgedRecord, sender: PeerId, now: float) -> Merge:
        """Takes a record from `sender`. Its signature is checked only if it would change something.

        Raises `RecordInvalid`.
        """
        record = aged.record
        if record.key != self._key:
            raise RecordInvalid("wrong-key")
        author = record.author()
        entry = self._entries.get(author)
        if author == self._own_id:
            if entry is None or record.seq >= entry.record.seq:
                record.verify()
            return Merge.OURS
        if entry is not None and not supersedes(record, entry.record):
            is_same = record.content_hash() == entry.record.content_hash()
            if is_same and sender == author and now - aged.age_s > entry.born_at:
                entry.born_at = now - aged.age_s
            return Merge.KNOWN
        if aged.remaining_s <= 0:
            return Merge.KNOWN
        payload = decode_peer(record)
        if payload.run_id != self._run_id:
            raise RecordInvalid("wrong-run")
        rank = entry.rank if entry is not None else self._rank(author)
        if entry is None and not self._has_room_for(rank, now):
            return Merge.KNOWN
        record.verify()
        if entry is None:
            if sender != author and not self._introductions.allow(sender, now):
                return Merge.KNOWN
            while len(self._entries) >= self._params.members:
                self._forget_one(now)
            self._last = None
        self._entries[author] = _Entry(record, payload, now - aged.age_s, rank, self._pushes())
        return Merge.NEWER

    def expire(self, now: float) -> None:
        """Forgets goodbyes and losses whose time is over. Call it every interval."""
        for peer_id, entry in list(self._entries.items()):
            shown_s = 0.0 if entry.has_left else self._params.lost_shown_s
            if peer_id != self._own_id and entry.expires_at + shown_s <= now:
                del self._entries[peer_id]
                self._last = None
        self._departed = [
            peer_id
            for peer_id, entry in self._entries.items()
            if peer_id != self._own_id and (entry.has_left or entry.expires_at <= now)
        ]

    def forget(self, peer_ids: Iterable[bytes]) -> None:
        """Drops some peers at once, without a tombstone: whoever keeps them out has to go on doing so."""
        for peer_id in peer_ids:
            if peer_id != self._own_id:
                self._entries.pop(PeerId(peer_id), None)
        self._last = None

    def members(self, now: float) -> list[Member]:
        """Everybody but us, those that left or were lost included."""
        return [self._member(entry, now) for peer_id, entry in self._entries.items() if peer_id != self._own_id]

    def lifetime_s(self, now: float) -> int:
        """How long our own records should live: longer in a large swarm, so that everybody's traffic stays bounded."""
        live = sum(entry.expires_at > now and not entry.has_left for entry in self._entries.values())
        return min(max(self._params.ttl_s, self._params.ttl_s * live // self._params.scale_members), LIFETIME_CAP_S)

    # What goes into messages.

    def rumours(self, now: float) -> tuple[AgedRecord, ...]:
        """Records to tell unasked: the newest to us first. Each is told to about log2(members) others, then no more."""
        hot = [entry for entry in self._entries.values() if entry.pushes_left > 0 and self._is_told(entry, now)]
        self._rng.shuffle(hot)
        hot.sort(key=lambda entry: -entry.pushes_left)
        chosen = hot[: self._params.rumours]
        for entry in chosen:
            entry.pushes_left -= 1
        return tuple(self._aged(entry, now) for entry in chosen)

    def digests(self, now: float) -> tuple[tuple[Digest, ...], bool]:
        """Versions that we have, and whether these are all or a sample."""
        told = [(peer_id, entry) for peer_id, entry in self._entries.items() if self._is_told(entry, now)]
        is_complete = len(told) <= self._params.digests
        if not is_complete:
            told = self._rng.sample(told, self._params.digests)
        return tuple(Digest(peer_id, entry.record.seq) for peer_id, entry in told), is_complete

    def newer_than(
        self, digests: Sequence[Digest], is_complete: bool, asker: PeerId, now: float
    ) -> tuple[AgedRecord, ...]:
        """Records that the sender of `digests` lacks. If those are complete, also of peers that it does not know.

        What we have of `asker` itself is told even when it has expired: a peer that restarted must learn which `seq`
        its former life had reached.
        """
        known = {digest.peer_id: digest.seq for digest in digests}
        lacking = []
        for peer_id, entry in self._entries.items():
            seq = known.get(peer_id)
            if seq is None:
                if is_complete and self._is_told(entry, now):
                    lacking.append(entry)
            elif entry.record.seq > seq and (peer_id == asker or self._is_told(entry, now)):
                lacking.append(entry)
        return self._some(lacking, now)

    def wanted(self, digests: Sequence[Digest], now: float) -> tuple[bytes, ...]:
        """Of which peers the sender of `digests` has something newer than we have."""
        newer = []
        for digest in digests:
            entry = self._entries.get(PeerId(digest.peer_id))
            if digest.peer_id == self._own_id or (entry is not None and entry.record.seq >= digest.seq):
                continue
            if entry is not None or self._has_room_for(self._rank(digest.peer_id), now):
                newer.append(digest.peer_id)
        self._rng.shuffle(newer)
        return tuple(newer[: self._params.records])

    def records_of(self, peer_ids: Iterable[bytes], now: float) -> tuple[AgedRecord, ...]:
        """The records of some peers, as far as we have them and they have not expired."""
        found = (self._entries.get(PeerId(peer_id)) for peer_id in peer_ids)
        return self._some([entry for entry in found if entry and self._is_told(entry, now)], now)

    def page(self, after: bytes, count: int, now: float) -> tuple[AgedRecord, ...]:
        """Up to `count` records, ours and the lost ones included, of peers whose ids follow `after`."""
        following = sorted(peer_id for peer_id in self._entries if peer_id > after)[:count]
        return tuple(self._aged(self._entries[peer_id], now) for peer_id in following)

    # Private.

    def _member(self, entry: _Entry, now: float) -> Member:
        return member_of(self._aged(entry, now), entry.payload, local_allowed=self.local_allowed)

    def _is_told(self, entry: _Entry, now: float) -> bool:
        return entry.expires_at > now

    def _aged(self, entry: _Entry, now: float) -> AgedRecord:
        return age_record(entry.record, now - entry.born_at)

    def _some(self, entries: list[_Entry], now: float) -> tuple[AgedRecord, ...]:
        if len(entries) > self._params.records:
            entries = self._rng.sample(entries, self._params.records)
        return tuple(self._aged(entry, now) for entry in entries)

    def _pushes(self) -> int:
        return math.ceil(math.log2(len(self._entries) + 2)) + 1

    def _rank(self, peer_id: bytes) -> bytes:
        return hashlib.blake2b(peer_id, key=self._salt, digest_size=8).digest()

    def _has_room_for(self, rank: bytes, now: float) -> bool:
        if len(self._entries) < self._params.members or self._gone(now) is not None:
            return True
        last = self._last_in_rank()
        return last is not None and rank < self._entries[last].rank

    def _forget_one(self, now: float) -> None:
        """Makes room: a peer that left or was lost gives way first, then the last in rank."""
        chosen = self._gone(now) or self._last_in_rank()
        if chosen is None:
            raise ValueError("a view has room for two members at least")
        del self._entries[chosen]
        self._last = None

    def _gone(self, now: float) -> PeerId | None:
        """Somebody whose place is free: one of those that `expire` saw gone, if that is still so."""
        while self._departed:
            entry = self._entries.get(self._departed[-1])
            if entry is not None and (entry.has_left or entry.expires_at <= now):
                return self._departed[-1]
            self._departed.pop()
        return None

    def _last_in_rank(self) -> PeerId | None:
        if self._last is None:
            others = (peer_id for peer_id in self._entries if peer_id != self._own_id)
            self._last = max(others, key=lambda peer_id: self._entries[peer_id].rank, default=None)
        return self._last


def member_of(aged: AgedRecord, payload: PeerPayload, *, local_allowed: bool = True) -> Member:
    """What a record of a given age says about its author."""
    addresses = tuple(a for a in payload.addresses if is_dialable(a, local_allowed=local_allowed))
    state: PeerState | Literal["lost"] = payload.state
    if state is not PeerState.LEFT and aged.remaining_s <= 0:
        state = "lost"
    return Member(Contact(aged.record.author(), addresses), state, payload.status, aged.record.seq, aged.age_s)


MessageRecords = Annotated[tuple[AgedRecord, ...], msgspec.Meta(max_length=RECORDS_CAP)]
MessageIds = Annotated[tuple[PeerIdBytes, ...], msgspec.Meta(max_length=RECORDS_CAP)]
MessageDigests = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=DIGESTS_CAP)]
