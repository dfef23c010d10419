"""The DHT: drives routing table, record store and lookups over an endpoint. The built-in `Discovery`.

A peer with `serve` holds records for others and is told about; without it, it only asks and announces. A
server enters a routing table after one of its stated addresses has been dialled and has proved the same
identity, so peers behind a NAT do not fill tables with addresses that lead nowhere.

All background work (joining, refreshing, republishing, verifying) happens in `run`. It never gives up:
entries that are not there are tried again, with back-off, for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from swarm_peer.addresses import MAX_ADDRESSES, Address, Contact
from swarm_peer.dht import (
    FIND_NODES,
    FIND_RECORDS,
    PING,
    RECORDS_PER_REPLY,
    STORE,
    FindNodes,
    FindRecords,
    Nodes,
    Ping,
    Pong,
    Records,
    StoreRecord,
    StoreReply,
)
from swarm_peer.discovery import FoundRun
from swarm_peer.errors import PeerError, RecordInvalid, Refusal
from swarm_peer.identity import Identity, PeerId, short
from swarm_peer.lookup import Lookup, LookupParams, RecordCollector
from swarm_peer.records import (
    SEQ_CAP,
    AgedRecord,
    PeerState,
    RunPayload,
    SignedRecord,
    check_placement,
    decode_peer,
    decode_run,
    encode_payload,
    index_key,
    make_record,
    peers_key,
    run_key,
)
from swarm_peer.routing import RoutingParams, RoutingTable, is_dialable, is_local, wide_network_of
from swarm_peer.rpc import Caller, Method, Q, R
from swarm_peer.storage import Origin, PutOutcome, RateLimiter, RecordStore, StorageLimits

logger = logging.getLogger("swarm_peer")

_WORKERS = 4
_JOBS = 64
_ENTRIES = 64


class DialingCaller(Caller, Protocol):
    """A `Caller` that can also dial an address whose owner is not known yet, as `Endpoint` can."""

    async def identify(self, address: Address, *, deadline_s: float = 10.0) -> PeerId: ...


@dataclass(frozen=True, slots=True)
class KademliaParams:
    """Times and limits of the driver. Records live `record_ttl_s` and are renewed every `republish_s` ± 10 %."""

    routing: RoutingParams = field(default_factory=RoutingParams)
    lookup: LookupParams = field(default_factory=LookupParams)
    storage: StorageLimits = field(default_factory=StorageLimits)
    record_ttl_s: int = 1200
    republish_s: float = 300.0
    refresh_s: float = 600.0
    check_s: float = 15.0
    rpc_deadline_s: float = 4.0
    lookup_deadline_s: float = 20.0
    retry_s: tuple[float, float] = (1.0, 60.0)  # back-off: first and longest wait
    requests_per_s: float = 20.0
    stores_per_s: float = 2.0
    burst_s: float = 20.0  # how many seconds' worth of requests may come at once


@dataclass(slots=True)
class _Announcement:
    """A record of ours that is kept alive in the DHT."""

    record: SignedRecord
    due_at: float
    retries: int = 0
    is_last: bool = False  # a goodbye: published once, then left to expire


class Kademlia:
    """See the module. `rng` drives every random choice; `serve=False` makes a client."""

    def __init__(
        self,
        endpoint: DialingCaller,
        identity: Identity,
        *,
        rng: random.Random,
        params: KademliaParams | None = None,
        serve: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._rng = rng
        self._params = params or KademliaParams()
        self._serve = serve
        self._addresses: tuple[Address, ...] = ()
        # Entries, and who was found there last.
        self._entries: dict[tuple[PeerId | None, Address], PeerId | None] = {}
        self.table = RoutingTable(identity.peer_id, self._params.routing)
        self.store = RecordStore(identity.peer_id, rng, self._params.storage)
        self._announcements: dict[bytes, _Announcement] = {}
        self._announcements_changed = trio.Event()
        self._walks = trio.CapacityLimiter(8)
        self._job_send, self._job_receive = trio.open_memory_channel[Callable[[], Awaitable[None]]](_JOBS)
        self._in_check: set[bytes] = set()
        burst_s = self._params.burst_s
        self._requests = RateLimiter(self._params.requests_per_s, self._params.requests_per_s * burst_s)
        self._stores = RateLimiter(self._params.stores_per_s, self._params.stores_per_s * burst_s)
        self._dial_backs = RateLimiter(1 / 30, 2)
        if serve:
            endpoint.handle(PING, self._on_ping)
            endpoint.handle(FIND_NODES, self._on_find_nodes)
            endpoint.handle(FIND_RECORDS, self._on_find_records)
            endpoint.handle(STORE, self._on_store)

    # What the owner calls.

    def advertise(self, addresses: Iterable[Address]) -> None:
        """States where we can be dialled. Without it, the addresses of our own latest announcement are taken."""
        self._addresses = tuple(addresses)[:MAX_ADDRESSES]

    async def bootstrap(
        self, entries: Sequence[tuple[PeerId | None, Address]]
    ) -> list[tuple[Address, PeerError | None]]:
        """Tries all entries at once and joins through those that answer.

        Returns each address with None or with what went wrong there. The entries are remembered: `run`
        tries those that are not there again, for ever. Needs a running endpoint.
        """
        for entry in entries:
            self._entries.setdefault(entry, entry[0])
            while len(self._entries) > _ENTRIES:
                del self._entries[next(iter(self._entries))]
        results: list[tuple[Address, PeerError | None]] = [(address, None) for _, address in entries]
        slots = trio.CapacityLimiter(8)

        async def try_one(index: int, peer_id: PeerId | None, address: Address) -> None:
            async with slots:
                try:
                    await self._enter(peer_id, address)
                except PeerError as error:
                    results[index] = (address, error)

        async with trio.open_nursery() as nursery:
            for index, (peer_id, address) in enumerate(entries):
                nursery.start_soon(try_one, index, peer_id, address)
        if any(error is None for _, error in results):
            await self._find_nodes(self._identity.peer_id)
        return results

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Joins, refreshes, republishes and verifies until cancelled."""
        async with trio.open_nursery() as nursery:
            for task in (self._keep_joined, self._keep_refreshed, self._keep_checked, self._keep_announced):
                nursery.start_soon(self._supervise, task)
            for _ in range(_WORKERS):
                nursery.start_soon(self._supervise, self._work)
            task_status.started()

    async def announce_run(self, run: RunPayload) -> None:
        """See `Discovery`. The run is announced under its name and in the index of all runs."""
        self._learn_addresses(run.addresses)
        payload = encode_payload(run)
        async with trio.open_nursery() as nursery:
            for key in (run_key(run.name), index_key()):
                record = make_record(
                    self._identity, "run", key, self._next_seq(key), self._params.record_ttl_s, payload
                )
                nursery.start_soon(self._announce, record)

    async def announce_peer(self, record: SignedRecord) -> None:
        """See `Discovery`. Raises `RecordInvalid` if the record is not ours or its key not that of its run."""
        check_placement(record)
        peer = decode_peer(record)
        if record.author() != self._identity.peer_id:
            raise RecordInvalid("not-our-record")
        self._learn_addresses(peer.addresses)
        seq = max(record.seq, self._next_seq(record.key))
        await self._announce(self._resign(record, seq), is_last=peer.state is PeerState.LEFT)

    async def find_runs(self, name: str | None) -> list[FoundRun]:
        """See `Discovery`."""
        found = await self._find_records(index_key() if name is None else run_key(name))
        runs = []
        for aged in found:
            payload = decode_run(aged.record)
            if name is None or payload.name == name:
                announcer = Contact(aged.record.author(), self._dialable(payload.addresses))
                runs.append(FoundRun(payload, announcer))
        return runs

    async def find_peers(self, run_id: bytes) -> list[SignedRecord]:
        """See `Discovery`."""
        found = await self._find_records(peers_key(run_id))
        return [aged.record for aged in found if decode_peer(aged.record).state is not PeerState.LEFT]

    # Lookups.

    async def _find_nodes(self, target: bytes) -> list[Contact]:
        async def ask(contact: Contact) -> Iterable[Contact]:
            request = FindNodes(self._sender(), target)
            return (await self._call(contact, FIND_NODES, request)).contacts

        return (await self._walk(target, ask, agree_on=self._params.lookup.k)).closest()

    async def _find_records(self, key: bytes) -> list[AgedRecord]:
        collector = RecordCollector(key)
        collector.take(None, self.store.get(key, trio.current_time()))

        async def ask(contact: Contact) -> Iterable[Contact]:
            reply = await self._call(contact, FIND_RECORDS, FindRecords(self._sender(), key))
            collector.take(contact, reply.records)
            return reply.contacts

        await self._walk(key, ask, agree_on=self._params.lookup.agree_on)
        for holder, newest in collector.outdated()[:16]:
            self._add_job(self._push, holder, newest)
        return collector.records()

    async def _walk(
        self, target: bytes, ask: Callable[[Contact], Awaitable[Iterable[Contact]]], *, agree_on: int
    ) -> Lookup:
        """Drives one lookup: asks whom it names, feeds it the answers, ends it at the deadline."""
        lookup = Lookup(target, self._identity.peer_id, self.table.closest(target), self._lookup_params(agree_on))
        progress = trio.Event()

        async def query(contact: Contact) -> None:
            try:
                told = await ask(contact)
            except PeerError:
                lookup.failed(contact.peer_id)
            else:
                lookup.answered(contact.peer_id, self._usable(told))
            progress.set()

        with trio.move_on_after(self._params.lookup_deadline_s):
            async with self._walks, trio.open_nursery() as nursery:
                while not lookup.finished:
                    for contact in lookup.next_queries():
                        nursery.start_soon(query, contact)
                    await progress.wait()
                    progress = trio.Event()
                nursery.cancel_scope.cancel()
        return lookup

    # Announcing.

    async def _announce(self, record: SignedRecord, *, is_last: bool = False) -> None:
        announcement = _Announcement(record, math.inf, is_last=is_last)
        self._announcements[record.key] = announcement
        await self._publish(announcement)

    async def _publish(self, announcement: _Announcement) -> None:
        """Stores the record at the nearest servers. If some hold a newer one of ours, signs one newer still."""
        newer_seq, stored = await self._store_at_nearest(announcement.record)
        if newer_seq is not None and newer_seq < SEQ_CAP:
            # A former life of this identity, as a rule: its last record outlives it.
            announcement.record = self._resign(announcement.record, newer_seq + 1)
            _, stored = await self._store_at_nearest(announcement.record)
        now = trio.current_time()
        if announcement.is_last:
            self._announcements.pop(announcement.record.key, None)
            return
        if stored or (self._serve and not self._entries):
            announcement.retries = 0
            announcement.due_at = now + self._params.republish_s * self._rng.uniform(0.9, 1.1)
        else:
            announcement.retries += 1
            announcement.due_at = now + self._backoff(announcement.retries)
        self._announcements_changed.set()

    async def _store_at_nearest(self, record: SignedRecord) -> tuple[int | None, int]:
        """Returns the highest newer seq that a holder has of ours, if any, and how many took the record."""
        newer_seq: int | None = None
        stored = 0
        if self._serve:
            self._put(AgedRecord(record, 0), self._identity.peer_id)
        slots = trio.CapacityLimiter(10)

        async def store_at(holder: Contact) -> None:
            nonlocal newer_seq, stored
            async with slots:
                with contextlib.suppress(PeerError):
                    request = StoreRecord(self._sender(), AgedRecord(record, 0))
                    reply = await self._call(holder, STORE, request)
                    if reply.outcome in (PutOutcome.STORED, PutOutcome.REFRESHED, PutOutcome.HELD):
                        stored += 1
                    newer = reply.newer.record if reply.newer else None
                    if newer and newer.author() == self._identity.peer_id and newer.key == record.key:
                        newer.verify()
                        newer_seq = max(newer.seq, newer_seq or 0)

        nearest = await self._find_nodes(record.key)
        with trio.move_on_after(self._params.lookup_deadline_s):
            async with trio.open_nursery() as nursery:
                for holder in nearest:
                    nursery.start_soon(store_at, holder)
        return (newer_seq if newer_seq is not None and newer_seq >= record.seq else None), stored

    async def _push(self, holder: Contact, newest: AgedRecord) -> None:
        with contextlib.suppress(PeerError):
            await self._call(holder, STORE, StoreRecord(self._sender(), newest))

    def _next_seq(self, key: bytes) -> int:
        announcement = self._announcements.get(key)
        return 1 if announcement is None else announcement.record.seq + 1

    def _resign(self, record: SignedRecord, seq: int) -> SignedRecord:
        if seq == record.seq:
            return record
        return make_record(self._identity, record.kind, record.key, min(seq, SEQ_CAP), record.ttl_s, record.payload)

    # Background.

    async def _supervise(self, task: Callable[[], Awaitable[None]]) -> None:
        """Keeps one background task alive: an error of ours is logged and costs one pause, not the node."""
        while True:
            try:
                await task()
            except Exception:
                logger.exception("DHT task failed; it goes on in a second")
                await trio.sleep(1.0)

    async def _keep_joined(self) -> None:
        """Tries the entries that are not in the table again, with back-off; with few peers known, looks for more.

        A bootstrap peer that was away knows nobody when it comes back, and newcomers ask it first.
        """
        attempt = 0
        while True:
            await trio.sleep(self._backoff(attempt))
            was_alone = len(self.table) == 0
            attempt += 1
            missing = [entry for entry, found in self._entries.items() if not found or found not in self.table]
            if missing:
                await self.bootstrap(missing)
            elif 0 < len(self.table) < 3:
                await self._find_nodes(self._identity.peer_id)
            if len(self.table) < self._params.routing.k:
                # In a large swarm this would tie everybody to the entries; there, others know them too.
                for contact in filter(None, (self.table.get(found) for found in self._entries.values() if found)):
                    self._check(contact)
            if was_alone and len(self.table):
                attempt = 0
                self._republish_now()

    async def _keep_refreshed(self) -> None:
        while True:
            await trio.sleep(self._params.refresh_s * self._rng.uniform(0.9, 1.1))
            if len(self.table):
                target = self.table.refresh_target(self._rng.randbytes(32), trio.current_time())
                await self._find_nodes(target)

    async def _keep_checked(self) -> None:
        """Pings the contact that was silent the longest, and lets old records go."""
        while True:
            await trio.sleep(self._params.check_s * self._rng.uniform(0.9, 1.1))
            self.store.expire(trio.current_time())
            oldest = self.table.least_recent()
            if oldest and trio.current_time() - oldest[1] >= self._params.check_s:
                self._check(oldest[0])

    async def _keep_announced(self) -> None:
        while True:
            self._announcements_changed = trio.Event()
            now = trio.current_time()
            due = [a for a in self._announcements.values() if a.due_at <= now]
            for announcement in due:
                announcement.due_at = math.inf
                announcement.record = self._resign(announcement.record, announcement.record.seq + 1)
                await self._publish(announcement)
            next_due = min((a.due_at for a in self._announcements.values()), default=math.inf)
            with trio.move_on_at(next_due):
                await self._announcements_changed.wait()

    async def _work(self) -> None:
        async for job in self._job_receive:
            await job()

    def _republish_now(self) -> None:
        for announcement in self._announcements.values():
            announcement.due_at = min(announcement.due_at, trio.current_time())
        self._announcements_changed.set()

    def _add_job(self, job: Callable[..., Awaitable[None]], *arguments: object) -> bool:
        try:
            self._job_send.send_nowait(lambda: job(*arguments))
        except trio.WouldBlock:
            return False
        return True

    def _backoff(self, attempt: int) -> float:
        first, longest = self._params.retry_s
        return min(longest, first * float(2 ** min(attempt, 16))) * self._rng.uniform(0.8, 1.2)

    # Who is in the routing table.

    async def _enter(self, peer_id: PeerId | None, address: Address) -> None:
        """Joins through one address. Raises `PeerError`."""
        found = peer_id or await self._endpoint.identify(address)
        if (peer_id, address) in self._entries:
            self._entries[peer_id, address] = found
        contact = Contact(found, (address,))
        request = FindNodes(self._sender(), self._identity.peer_id)
        await self._call(contact, FIND_NODES, request, deadline_s=10.0)

    async def _call(self, contact: Contact, method: Method[Q, R], request: Q, *, deadline_s: float | None = None) -> R:
        """Calls a server and keeps the table's books: who answers is offered to it, who does not is checked."""
        try:
            reply = await self._endpoint.call(
                contact, method, request, deadline_s=deadline_s or self._params.rpc_deadline_s
            )
        except Refusal:
            raise
        except PeerError:
            known = self.table.get(contact.peer_id)
            if known:
                self._check(known)
            raise
        # Addresses that a third party told do not displace those that the table holds.
        self._offer(self.table.get(contact.peer_id) or contact)
        return reply

    def _offer(self, contact: Contact) -> None:
        doubted = self.table.offer(contact, trio.current_time())
        if doubted:
            self._check(doubted)

    def _check(self, contact: Contact) -> None:
        """Has a contact pinged soon; unanswered, it leaves the table."""
        if contact.peer_id not in self._in_check and self._add_job(self._ping, contact):
            self._in_check.add(contact.peer_id)

    async def _ping(self, contact: Contact) -> None:
        try:
            await self._endpoint.call(contact, PING, Ping(self._sender()), deadline_s=self._params.rpc_deadline_s)
        except PeerError:
            self.table.failed(contact.peer_id)
        else:
            self._offer(contact)
        finally:
            self._in_check.discard(contact.peer_id)

    def _meet(self, remote: PeerId, sender: Contact | None) -> None:
        """Takes note of who asks us. Raises `Refusal` when over the rate or under a false name."""
        now = trio.current_time()
        if not self._requests.allow(remote, now):
            raise Refusal("rate-limited")
        if sender is None:
            return
        if sender.peer_id != remote:
            raise Refusal("wrong-sender")
        known = self.table.get(remote)
        addresses = self._dialable(sender.addresses)
        if known and known.addresses == addresses:
            self._offer(known)
        elif addresses and self._dial_backs.allow(remote, now):
            self._add_job(self._dial_back, Contact(remote, addresses))

    async def _dial_back(self, contact: Contact) -> None:
        for address in contact.addresses[:3]:
            with contextlib.suppress(PeerError):
                found = await self._endpoint.identify(address, deadline_s=self._params.rpc_deadline_s)
                if found == contact.peer_id:
                    was_alone = len(self.table) == 0
                    self._offer(contact)
                    if was_alone:
                        self._republish_now()
                    return

    def _sender(self) -> Contact | None:
        return Contact(self._identity.peer_id, self._addresses) if self._serve and self._addresses else None

    def _learn_addresses(self, addresses: tuple[Address, ...]) -> None:
        if not self._addresses:
            self._addresses = addresses

    def _dialable(self, addresses: Iterable[Address]) -> tuple[Address, ...]:
        """The addresses that we may dial or pass on: local ones only if we live among local ones, for all we know."""
        ours = [*self._addresses, *(address for _, address in self._entries)]
        local_allowed = not ours or any(is_local(address.host) for address in ours)
        return tuple(a for a in addresses if is_dialable(a, local_allowed=local_allowed))

    def _usable(self, told: Iterable[Contact]) -> list[Contact]:
        return [Contact(c.peer_id, kept) for c in told if (kept := self._dialable(c.addresses))]

    def _lookup_params(self, agree_on: int) -> LookupParams:
        return dataclasses.replace(self._params.lookup, agree_on=agree_on)

    # What others ask of us.

    async def _on_ping(self, remote: PeerId, request: Ping) -> Pong:
        self._meet(remote, request.sender)
        return Pong()

    async def _on_find_nodes(self, remote: PeerId, request: FindNodes) -> Nodes:
        self._meet(remote, request.sender)
        return Nodes(self._nearest(request.target, remote))

    async def _on_find_records(self, remote: PeerId, request: FindRecords) -> Records:
        self._meet(remote, request.sender)
        held = self.store.get(request.key, trio.current_time())
        if len(held) > RECORDS_PER_REPLY:
            held = self._rng.sample(held, RECORDS_PER_REPLY)
        return Records(tuple(held), self._nearest(request.key, remote))

    async def _on_store(self, remote: PeerId, request: StoreRecord) -> StoreReply:
        self._meet(remote, request.sender)
        if not self._stores.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")
        record = request.aged.record
        outcome = PutOutcome.STALE
        if self.store.would_take(record):
            try:
                outcome = self._put(request.aged, remote)
            except RecordInvalid as error:
                logger.info("peer %s sent an invalid record: %s", short(remote), error.reason)
                raise Refusal("invalid-record", error.reason) from None
        newer = None
        if outcome is PutOutcome.STALE:
            newer = self.store.held(record.key, record.author(), trio.current_time())
        return StoreReply(outcome, newer)

    def _put(self, aged: AgedRecord, from_peer: PeerId) -> PutOutcome:
        """Verifies and stores. Raises `RecordInvalid`."""
        payload = check_placement(aged.record)
        aged.record.verify()
        is_author = aged.record.author() == from_peer
        origin = Origin(is_author, wide_network_of(payload.addresses), payload.run_id)
        return self.store.put(aged, origin, trio.current_time())

    def _nearest(self, target: bytes, asker: PeerId) -> tuple[Contact, ...]:
        nearest = self.table.closest(target, self._params.routing.k + 1)
        told = [contact for contact in self._usable(nearest) if contact.peer_id != asker]
        return tuple(told[: self._params.routing.k])
