"""Lookups over the network: drives the state machines of `lookup.py` with calls and deadlines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable

import trio

from swarm_peer.addresses import Contact
from swarm_peer.background import JobQueue
from swarm_peer.dht import FIND_NODES, FIND_RECORDS, STORE, FindNodes, FindRecords, StoreRecord
from swarm_peer.errors import PeerError
from swarm_peer.identity import PeerId
from swarm_peer.kademlia_params import KademliaParams
from swarm_peer.lookup import Lookup, RecordCollector
from swarm_peer.neighbours import Neighbours
from swarm_peer.records import AgedRecord
from swarm_peer.storage import RecordStore

_WALKS = 8
_PUSHES = 16


class Walks:
    """Finds servers and records. At most eight lookups run at once; each ends within `lookup_deadline_s`."""

    def __init__(
        self, own_id: PeerId, neighbours: Neighbours, store: RecordStore, params: KademliaParams, jobs: JobQueue
    ) -> None:
        self._own_id = own_id
        self._neighbours = neighbours
        self._store = store
        self._params = params
        self._jobs = jobs
        self._slots = trio.CapacityLimiter(_WALKS)

    async def find_nodes(self, target: bytes) -> list[Contact]:
        """The servers nearest to `target` that answered, nearest first."""

        async def ask(contact: Contact) -> Iterable[Contact]:
            request = FindNodes(self._neighbours.sender(), target)
            return (await self._neighbours.call(contact, FIND_NODES, request)).contacts

        return (await self._walk(target, ask, agree_on=self._params.lookup.k)).closest()

    async def find_records(self, key: bytes) -> list[AgedRecord]:
        """Verified records under `key`, our own store's included. Holders of older ones are told the newest."""
        collector = RecordCollector(key)
        collector.take(None, self._store.get(key, trio.current_time()))

        async def ask(contact: Contact) -> Iterable[Contact]:
            request = FindRecords(self._neighbours.sender(), key)
            reply = await self._neighbours.call(contact, FIND_RECORDS, request)
            collector.take(contact, reply.records)
            return reply.contacts

        await self._walk(key, ask, agree_on=self._params.lookup.agree_on)
        for holder, newest in collector.outdated()[:_PUSHES]:
            self._jobs.add(self._push, holder, newest)
        return collector.records()

    async def _walk(
        self, target: bytes, ask: Callable[[Contact], Awaitable[Iterable[Contact]]], *, agree_on: int
    ) -> Lookup:
        """Drives one lookup: asks whom it names, feeds it the answers, ends it at the deadline."""
        params = dataclasses.replace(self._params.lookup, agree_on=agree_on)
        lookup = Lookup(target, self._own_id, self._neighbours.table.closest(target), params)
        progress = trio.Event()

        async def query(contact: Contact) -> None:
            try:
                told = await ask(contact)
            except PeerError:
                lookup.failed(contact.peer_id)
            else:
                host = self._neighbours.host_of(contact.peer_id)
                lookup.answered(contact.peer_id, self._neighbours.usable(told), host)
            progress.set()

        with trio.move_on_after(self._params.lookup_deadline_s):
            async with self._slots, trio.open_nursery() as nursery:
                while not lookup.finished:
                    for contact in lookup.next_queries():
                        nursery.start_soon(query, contact)
                    await progress.wait()
                    progress = trio.Event()
                nursery.cancel_scope.cancel()
        return lookup

    async def _push(self, holder: Contact, newest: AgedRecord) -> None:
        with contextlib.suppress(PeerError):
            await self._neighbours.call(holder, STORE, StoreRecord(self._neighbours.sender(), newest))
