"""The serving side of the DHT: answers questions about the table and holds records for others."""

from __future__ import annotations

import logging
import random

import trio

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
from swarm_peer.errors import RecordInvalid, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.kademlia_params import KademliaParams
from swarm_peer.neighbours import Neighbours
from swarm_peer.records import AgedRecord, check_placement
from swarm_peer.routing import wide_network_of
from swarm_peer.rpc import Caller
from swarm_peer.storage import Origin, PutOutcome, RateLimiter, RecordStore

logger = logging.getLogger("swarm_peer")


class RecordHolder:
    """Handlers of the four procedures over a `RecordStore`. `serve` registers them."""

    def __init__(self, neighbours: Neighbours, store: RecordStore, params: KademliaParams, rng: random.Random) -> None:
        self._neighbours = neighbours
        self._store = store
        self._rng = rng
        self._stores = RateLimiter(params.stores_per_s, params.stores_per_s * params.burst_s)

    def serve(self, endpoint: Caller) -> None:
        """Answers from now on."""
        endpoint.handle(PING, self._on_ping)
        endpoint.handle(FIND_NODES, self._on_find_nodes)
        endpoint.handle(FIND_RECORDS, self._on_find_records)
        endpoint.handle(STORE, self._on_store)

    def put(self, aged: AgedRecord, from_peer: PeerId) -> PutOutcome:
        """Verifies and stores. Raises `RecordInvalid`."""
        payload = check_placement(aged.record)
        aged.record.verify()
        is_author = aged.record.author() == from_peer
        host = self._neighbours.host_of(from_peer) if is_author else None
        origin = Origin(is_author, wide_network_of(payload.addresses, host), payload.run_id)
        return self._store.put(aged, origin, trio.current_time())

    async def _on_ping(self, remote: PeerId, request: Ping) -> Pong:
        self._neighbours.meet(remote, request.sender)
        return Pong()

    async def _on_find_nodes(self, remote: PeerId, request: FindNodes) -> Nodes:
        self._neighbours.meet(remote, request.sender)
        return Nodes(self._neighbours.nearest(request.target, remote))

    async def _on_find_records(self, remote: PeerId, request: FindRecords) -> Records:
        self._neighbours.meet(remote, request.sender)
        held = self._store.get(request.key, trio.current_time())
        if len(held) > RECORDS_PER_REPLY:
            held = self._rng.sample(held, RECORDS_PER_REPLY)
        return Records(tuple(held), self._neighbours.nearest(request.key, remote))

    async def _on_store(self, remote: PeerId, request: StoreRecord) -> StoreReply:
        self._neighbours.meet(remote, request.sender)
        if not self._stores.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")
        record = request.aged.record
        outcome, newer = PutOutcome.STALE, None
        try:
            if self._store.would_take(record):
                outcome = self.put(request.aged, remote)
            if outcome is PutOutcome.STALE:
                newer = self._store.held(record, trio.current_time())
        except RecordInvalid as error:
            logger.info("peer %s sent an invalid record: %s", short(remote), error.reason)
            raise Refusal("invalid-record", error.reason) from None
        return StoreReply(outcome, newer)
