"""The iterative lookup: walks towards an id along several disjoint paths at once.

Each path keeps its own short list of the nearest peers that *its* peers told it, and no peer is asked on two
paths (S/Kademlia, Baumgart and Mies, 2007, §4.4). So a liar can spoil the path that met it and no other. The
lookup ends

- early, when all paths have come, independently, to the same `agree_on` nearest peers that answered, or
- when every path has asked everyone on its short list, or
- when `max_queries` are spent.

A short list, like the result, has at most `per_network` peers of one subnet, so that a subnet full of ids beside the
target does not fill it: peers not asked yet count where they are said to be, the others where they answered from.

No I/O: `next_queries` says whom to ask now, `answered` and `failed` take the results; the driver sets the
deadlines.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from swarm_peer.addresses import Address, Contact
from swarm_peer.errors import RecordInvalid
from swarm_peer.records import AgedRecord, check_placement, slot_of, supersedes
from swarm_peer.routing import network_of, pick_diverse

CONTACTS_PER_REPLY: Final = 20


@dataclass(frozen=True, slots=True)
class LookupParams:
    """`k`: size of the short lists and of the result. `alpha`: questions in flight per path.

    `paths`: how many disjoint paths.

    `agree_on`: nearest answering peers on which all paths must agree for an early end; k means no early end
    to speak of.
    """

    k: int = 20
    alpha: int = 3
    paths: int = 4
    agree_on: int = 8
    per_network: int = 2
    max_queries: int = 200


class _Progress(Enum):
    ASKED = "asked"
    ANSWERED = "answered"
    FAILED = "failed"


@dataclass(slots=True)
class _Path:
    heard: dict[bytes, Contact] = field(default_factory=dict)
    order: list[tuple[int, bytes]] = field(default_factory=list)  # those heard of, by distance
    in_flight: set[bytes] = field(default_factory=set)
    short_list: list[Contact] | None = None  # worked out again when it is None


class Lookup:
    """One walk towards `target`. Not reusable."""

    def __init__(
        self, target: bytes, own_id: bytes, seeds: Iterable[Contact], params: LookupParams | None = None
    ) -> None:
        self.target = target
        self._own_id = own_id
        self._params = params or LookupParams()
        self._progress: dict[bytes, _Progress] = {}
        self._failed_at: dict[bytes, set[tuple[Address, ...]]] = {}
        self._contacts: dict[bytes, Contact] = {}
        self._path_of: dict[bytes, _Path] = {}
        self._networks: dict[bytes, Hashable | None] = {}  # of those that answered
        self._aim = int.from_bytes(target, "big")
        distinct = {seed.peer_id: seed for seed in seeds if seed.peer_id != own_id}
        nearest = sorted(distinct.values(), key=self._distance)
        # Never more paths than seeds: a path without a first peer leads nowhere.
        self._paths = [_Path() for _ in range(min(self._params.paths, len(nearest)))]
        for index, seed in enumerate(nearest):
            self._hear(self._paths[index % len(self._paths)], seed)
        self.queries = 0

    @property
    def finished(self) -> bool:
        """True when nobody is left to ask and no answer is awaited, or when the paths agree."""
        return self._agreed() or not (self._awaiting() or any(self._candidates(path) for path in self._paths))

    def next_queries(self) -> list[Contact]:
        """Whom to ask now. Each of them must be reported by `answered` or `failed`, however late."""
        chosen: list[Contact] = []
        if self._agreed():
            return chosen
        progressing = True
        while progressing:
            # One peer per path and turn, so that the first paths do not take all that several have heard of.
            progressing = False
            for path in self._paths:
                if len(path.in_flight) >= self._params.alpha or self.queries >= self._params.max_queries:
                    continue
                candidates = self._candidates(path)
                if not candidates:
                    continue
                contact = candidates[0]
                self._progress[contact.peer_id] = _Progress.ASKED
                self._contacts[contact.peer_id] = contact
                self._path_of[contact.peer_id] = path
                path.in_flight.add(contact.peer_id)
                self.queries += 1
                chosen.append(contact)
                progressing = True
        return chosen

    def answered(self, peer_id: bytes, told: Iterable[Contact], host: str | None = None) -> None:
        """Takes the reply of a peer that was asked: the contacts that it told, of which at most 20 count.

        `host` is where it was reached; None if that is not known.
        """
        path = self._path_of.get(peer_id)
        if path is None or peer_id not in path.in_flight:
            return
        path.in_flight.discard(peer_id)
        self._progress[peer_id] = _Progress.ANSWERED
        network = self._networks[peer_id] = network_of(self._contacts[peer_id], host)
        if network != network_of(self._contacts[peer_id]):
            self._forget_short_lists(peer_id)
        for _, contact in zip(range(CONTACTS_PER_REPLY), told, strict=False):
            if contact.peer_id != self._own_id and contact.addresses:
                self._hear(path, contact)
        self._trim(path)
        path.short_list = None

    def failed(self, peer_id: bytes) -> None:
        """Notes that a peer that was asked did not answer properly."""
        path = self._path_of.get(peer_id)
        if path is None or peer_id not in path.in_flight:
            return
        path.in_flight.discard(peer_id)
        self._progress[peer_id] = _Progress.FAILED
        self._failed_at.setdefault(peer_id, set()).add(self._contacts[peer_id].addresses)
        self._forget_short_lists(peer_id)

    def closest(self) -> list[Contact]:
        """The k nearest peers that answered, nearest first, within the limit per network."""
        reached = [p for p, progress in self._progress.items() if progress is _Progress.ANSWERED]
        answered = sorted((self._contacts[p] for p in reached), key=self._distance)
        return pick_diverse(answered, self._params.k, self._params.per_network, self._network)

    def _candidates(self, path: _Path) -> list[Contact]:
        """The peers on the path's short list that nobody has asked yet, nearest first."""
        if self.queries >= self._params.max_queries:
            return []
        return [
            c
            for c in self._short_list(path)
            if self._progress.get(c.peer_id) in (None, _Progress.FAILED)  # failed, but at other addresses
        ]

    def _short_list(self, path: _Path) -> list[Contact]:
        if path.short_list is None:
            usable = (path.heard[peer_id] for _, peer_id in path.order)
            usable = (contact for contact in usable if not self._has_failed(contact))
            path.short_list = pick_diverse(usable, self._params.k, self._params.per_network, self._network)
        return path.short_list

    def _hear(self, path: _Path, contact: Contact) -> None:
        """The first to tell counts: a later liar does not redirect a peer that this path knows already."""
        if contact.peer_id not in path.heard:
            path.heard[contact.peer_id] = contact
            bisect.insort(path.order, (self._distance(contact), contact.peer_id))

    def _forget_short_lists(self, peer_id: bytes) -> None:
        """What is known of this peer has changed."""
        for path in self._paths:
            if peer_id in path.heard:
                path.short_list = None

    def _network(self, contact: Contact) -> Hashable | None:
        if contact.peer_id in self._networks:
            return self._networks[contact.peer_id]
        return network_of(contact)

    def _has_failed(self, contact: Contact) -> bool:
        """True if the peer failed at just these addresses: a liar's wrong address on one path spoils no
        other.
        """
        if self._progress.get(contact.peer_id) is not _Progress.FAILED:
            return False
        return contact.addresses in self._failed_at[contact.peer_id]

    def _awaiting(self) -> bool:
        return any(path.in_flight for path in self._paths)

    def _agreed(self) -> bool:
        if not self._paths:
            return True
        depth = self._params.agree_on
        fronts = [tuple(c.peer_id for c in self._short_list(path)[:depth]) for path in self._paths]
        first = fronts[0]
        return (
            len(first) == depth
            and all(front == first for front in fronts)
            and all(self._progress.get(p) is _Progress.ANSWERED for p in first)
        )

    def _trim(self, path: _Path) -> None:
        """Bounds a path's memory: the nearest few times k, of which failed ones may use up a part."""
        if len(path.heard) > 5 * self._params.k:
            del path.order[4 * self._params.k :]
            path.heard = {peer_id: path.heard[peer_id] for _, peer_id in path.order}

    def _distance(self, contact: Contact) -> int:
        return int.from_bytes(contact.peer_id, "big") ^ self._aim


class RecordCollector:
    """Gathers the records under one key from many holders; keeps the newest of each author and slot.

    Every distinct statement is verified once. A holder that returns an invalid record counts as failed
    altogether.
    """

    RECORDS_CAP: Final = 1024

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._newest: dict[tuple[bytes, bytes], AgedRecord] = {}  # by author and slot
        self._verified: set[bytes] = set()
        self._held: list[tuple[Contact, dict[tuple[bytes, bytes], int]]] = []

    def take(self, holder: Contact | None, records: Iterable[AgedRecord]) -> None:
        """Takes one holder's answer; None for our own store. Raises `RecordInvalid`, and then keeps none of it."""
        records = [aged for aged in records if aged.remaining_s > 0]
        for aged in records:
            content = aged.record.content_hash()
            if content not in self._verified:
                if aged.record.key != self._key:
                    raise RecordInvalid("wrong-key")
                check_placement(aged.record)
                aged.record.verify()
                self._verified.add(content)
        seqs: dict[tuple[bytes, bytes], int] = {}
        for aged in records:
            place = (aged.record.author(), slot_of(aged.record))
            seqs[place] = aged.record.seq
            newest = self._newest.get(place)
            if newest is None:
                if len(self._newest) < self.RECORDS_CAP:
                    self._newest[place] = aged
            elif supersedes(aged.record, newest.record):
                self._newest[place] = aged
            elif not supersedes(newest.record, aged.record) and aged.age_ms > newest.age_ms:
                # The same statement: believe the longer age, so that a copy is never younger than the original.
                self._newest[place] = aged
        if holder is not None:
            self._held.append((holder, seqs))

    def records(self) -> list[AgedRecord]:
        """The newest record of each author and slot, the most recently made first."""
        return sorted(self._newest.values(), key=lambda aged: aged.age_ms)

    def outdated(self) -> list[tuple[Contact, AgedRecord]]:
        """Who holds an older record than the newest in its place, and the record to push there."""
        return [
            (holder, self._newest[place])
            for holder, seqs in self._held
            for place, seq in seqs.items()
            if place in self._newest and seq < self._newest[place].record.seq
        ]
