"""The DHT: drives routing table, record store and lookups over an endpoint. The built-in `Discovery`.

A peer with `serve` holds records for others and is told about; without it, it only asks and announces. The parts:
`neighbours` (who is in the routing table), `walks` (lookups), `announcing` (our own records), `record_holder`
(what others ask of us). Here they are put together, and kept joined to the rest.

All background work (joining, refreshing, republishing, verifying) happens in `run`. It never gives up:
entries that are not there are tried again, with back-off, for ever.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import trio

from swarm_peer.addresses import Address, Contact
from swarm_peer.announcing import Announcer
from swarm_peer.background import JobQueue, supervise
from swarm_peer.discovery import FoundRun
from swarm_peer.errors import PeerError, RecordInvalid
from swarm_peer.identity import Identity, PeerId
from swarm_peer.kademlia_params import KademliaParams as KademliaParams
from swarm_peer.neighbours import DialingCaller as DialingCaller
from swarm_peer.neighbours import Neighbours
from swarm_peer.record_holder import RecordHolder
from swarm_peer.records import (
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
from swarm_peer.routing import RoutingTable
from swarm_peer.storage import RecordStore
from swarm_peer.walks import Walks

_WORKERS = 4
_JOBS = 64


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
        self._identity = identity
        self._rng = rng
        self._params = params or KademliaParams()
        self._jobs = JobQueue(_JOBS)
        self.store = RecordStore(identity.peer_id, rng, self._params.storage)
        self._neighbours = Neighbours(
            endpoint,
            params=self._params,
            serve=serve,
            jobs=self._jobs,
            on_company=lambda: self._announcer.republish_now(),
        )
        self._walks = Walks(identity.peer_id, self._neighbours, self.store, self._params, self._jobs)
        self._holder = RecordHolder(self._neighbours, self.store, self._params, rng)
        hold = self._hold if serve else None
        self._announcer = Announcer(identity, self._neighbours, self._walks, self._params, rng, hold)
        if serve:
            self._holder.serve(endpoint)

    @property
    def table(self) -> RoutingTable:
        """The servers that we know."""
        return self._neighbours.table

    def advertise(self, addresses: Iterable[Address]) -> None:
        """States where we can be dialled. Without it, the addresses of our own latest announcement are taken."""
        self._neighbours.advertise(addresses)

    async def bootstrap(
        self, entries: Sequence[tuple[PeerId | None, Address]]
    ) -> list[tuple[Address, PeerError | None]]:
        """Tries all entries at once and joins through those that answer.

        Returns each address with None or with what went wrong there. The entries are remembered: `run`
        tries those that are not there again, for ever. Needs a running endpoint.
        """
        for peer_id, address in entries:
            self._neighbours.add_entry(peer_id, address)
        results: list[tuple[Address, PeerError | None]] = [(address, None) for _, address in entries]
        slots = trio.CapacityLimiter(8)

        async def try_one(index: int, peer_id: PeerId | None, address: Address) -> None:
            async with slots:
                try:
                    await self._neighbours.enter(peer_id, address)
                except PeerError as error:
                    results[index] = (address, error)

        async with trio.open_nursery() as nursery:
            for index, (peer_id, address) in enumerate(entries):
                nursery.start_soon(try_one, index, peer_id, address)
        if any(error is None for _, error in results):
            await self._walks.find_nodes(self._identity.peer_id)
        return results

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Joins, refreshes, republishes and verifies until cancelled."""
        tasks = (self._keep_joined, self._keep_refreshed, self._keep_checked, self._announcer.keep_announced)
        async with trio.open_nursery() as nursery:
            for task in (*tasks, *[self._jobs.work] * _WORKERS):
                nursery.start_soon(supervise, task, "DHT")
            task_status.started()

    async def announce_run(self, run: RunPayload) -> None:
        """See `Discovery`. The run is announced under its name and in the index of all runs."""
        self._neighbours.learn_addresses(run.addresses)
        payload = encode_payload(run)
        async with trio.open_nursery() as nursery:
            for key in (run_key(run.name), index_key()):
                record = make_record(self._identity, "run", key, 1, self._params.record_ttl_s, payload)
                nursery.start_soon(self._announcer.announce, record)

    async def announce_peer(self, record: SignedRecord) -> None:
        """See `Discovery`. Raises `RecordInvalid` if the record is not ours or its key not that of its run."""
        check_placement(record)
        peer = decode_peer(record)
        if record.author() != self._identity.peer_id:
            raise RecordInvalid("not-our-record")
        self._neighbours.learn_addresses(peer.addresses)
        await self._announcer.announce(record, is_last=peer.state is PeerState.LEFT)

    async def find_runs(self, name: str | None) -> list[FoundRun]:
        """See `Discovery`."""
        found = await self._walks.find_records(index_key() if name is None else run_key(name))
        runs = []
        for aged in found:
            payload = decode_run(aged.record)
            if name is None or payload.name == name:
                announcer = Contact(aged.record.author(), self._neighbours.dialable(payload.addresses))
                runs.append(FoundRun(payload, announcer))
        return runs

    async def find_peers(self, run_id: bytes) -> list[SignedRecord]:
        """See `Discovery`."""
        found = await self._walks.find_records(peers_key(run_id))
        return [aged.record for aged in found if decode_peer(aged.record).state is not PeerState.LEFT]

    def _hold(self, aged: AgedRecord) -> None:
        self._holder.put(aged, self._identity.peer_id)

    # Background.

    async def _keep_joined(self) -> None:
        """Tries the entries that are not in the table again, with back-off; with few peers known, looks for more.

        A bootstrap peer that was away knows nobody when it comes back, and newcomers ask it first.
        """
        attempt = 0
        while True:
            await trio.sleep(self._params.backoff_s(attempt, self._rng))
            was_alone = len(self.table) == 0
            attempt += 1
            missing = self._neighbours.missing_entries()
            if missing:
                await self.bootstrap(missing)
            elif 0 < len(self.table) < 3:
                await self._walks.find_nodes(self._identity.peer_id)
            if len(self.table) < self._params.routing.k:
                # In a large swarm this would tie everybody to the entries; there, others know them too.
                self._neighbours.check_entries()
            if was_alone and len(self.table):
                attempt = 0
                self._announcer.republish_now()

    async def _keep_refreshed(self) -> None:
        while True:
            await trio.sleep(self._params.refresh_s * self._rng.uniform(0.9, 1.1))
            if len(self.table):
                target = self.table.refresh_target(self._rng.randbytes(32), trio.current_time())
                await self._walks.find_nodes(target)

    async def _keep_checked(self) -> None:
        """Pings the contact that was silent the longest, and lets old records go."""
        while True:
            await trio.sleep(self._params.check_s * self._rng.uniform(0.9, 1.1))
            now = trio.current_time()
            self.store.expire(now)
            self.table.forget_replacements(now - self._params.record_ttl_s)
            self._neighbours.check_least_recent(now)
