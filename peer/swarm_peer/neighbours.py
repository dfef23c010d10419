"""Who is in our routing table, and how they got there: calls that keep the table's books.

A server enters after it has answered a call of ours, or after one of its stated addresses has been dialled and
has proved the same identity, so peers behind a NAT do not fill tables with addresses that lead nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from swarm_peer.addresses import MAX_ADDRESSES, Address, Contact
from swarm_peer.background import JobQueue
from swarm_peer.dht import FIND_NODES, PING, FindNodes, Ping
from swarm_peer.errors import PeerError, Refusal
from swarm_peer.identity import PeerId
from swarm_peer.kademlia_params import KademliaParams
from swarm_peer.relay_entry import direct_addresses
from swarm_peer.routing import RoutingTable, is_dialable, is_local
from swarm_peer.rpc import Caller, Method, Q, R
from swarm_peer.storage import RateLimiter

_ENTRIES = 64


class DialingCaller(Caller, Protocol):
    """A `Caller` that can also dial an address whose owner is not known yet, as `Endpoint` can."""

    async def identify(self, address: Address, *, deadline_s: float = 10.0) -> PeerId: ...

    def seen_at(self, remote: PeerId) -> Address | None:
        """Where a remote's direct connection to us comes from or leads to; None if there is none."""


class Neighbours:
    """The routing table with its upkeep. `on_company` is called when the table gets its first contact by being asked.

    `serve`: whether we name ourselves to those whom we ask. `jobs` does the pings and the dialling back.
    """

    def __init__(
        self,
        endpoint: DialingCaller,
        *,
        params: KademliaParams,
        serve: bool,
        jobs: JobQueue,
        on_company: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._params = params
        self._serve = serve
        self._jobs = jobs
        self._on_company = on_company
        self._addresses: tuple[Address, ...] = ()
        self._local_allowed = True
        # Entries, and who was found there last.
        self._entries: dict[tuple[PeerId | None, Address], PeerId | None] = {}
        self.table = RoutingTable(endpoint.peer_id, params.routing)
        self._in_check: set[bytes] = set()
        self._requests = RateLimiter(params.requests_per_s, params.requests_per_s * params.burst_s)
        self._dial_backs = RateLimiter(1 / 30, 2)

    def host_of(self, peer_id: bytes) -> str | None:
        """Where a peer really is, as far as we are connected to it."""
        address = self._endpoint.seen_at(PeerId(peer_id))
        return address.host if address else None

    # Ourselves.

    def advertise(self, addresses: Iterable[Address]) -> None:
        """States where we can be dialled."""
        self._addresses = direct_addresses(tuple(addresses))[:MAX_ADDRESSES]
        self._learn_where_we_live()

    def learn_addresses(self, addresses: tuple[Address, ...]) -> None:
        """Takes addresses of our own for want of stated ones."""
        if not self._addresses:
            self.advertise(addresses)

    def sender(self) -> Contact | None:
        """How we name ourselves to those whom we ask; None keeps us out of their tables."""
        return Contact(self._endpoint.peer_id, self._addresses) if self._serve and self._addresses else None

    def dialable(self, addresses: tuple[Address, ...]) -> tuple[Address, ...]:
        """The addresses that we may dial or pass on: local ones only if we live among local ones, for all we know."""
        allowed = self._local_allowed
        if all(is_dialable(address, local_allowed=allowed) for address in addresses):
            return addresses
        return tuple(a for a in addresses if is_dialable(a, local_allowed=allowed))

    def usable(self, told: Iterable[Contact]) -> list[Contact]:
        """Contacts that strangers told, with the addresses that may be used; without any, the contact is dropped."""
        kept = ((contact, direct_addresses(self.dialable(contact.addresses))) for contact in told)
        return [c if c.addresses == those else Contact(c.peer_id, those) for c, those in kept if those]

    def _learn_where_we_live(self) -> None:
        ours = [*self._addresses, *(address for _, address in self._entries)]
        self._local_allowed = not ours or any(is_local(address.host) for address in ours)

    # The ways in.

    def add_entry(self, peer_id: PeerId | None, address: Address) -> None:
        """Remembers an address through which we may join. The oldest goes when there are too many."""
        self._entries.setdefault((peer_id, address), peer_id)
        while len(self._entries) > _ENTRIES:
            del self._entries[next(iter(self._entries))]
        self._learn_where_we_live()

    @property
    def has_entries(self) -> bool:
        return bool(self._entries)

    def missing_entries(self) -> list[tuple[PeerId | None, Address]]:
        """The entries whose owner is not in the table."""
        return [entry for entry, found in self._entries.items() if not found or found not in self.table]

    def check_entries(self) -> None:
        """Has the entries that are in the table pinged soon."""
        for found in self._entries.values():
            contact = self.table.get(found) if found else None
            if contact:
                self.check(contact)

    async def enter(self, peer_id: PeerId | None, address: Address) -> None:
        """Joins through one address. Raises `PeerError`."""
        found = peer_id or await self._endpoint.identify(address, deadline_s=self._params.connect_deadline_s)
        if (peer_id, address) in self._entries:
            self._entries[peer_id, address] = found
        contact = Contact(found, (address,))
        request = FindNodes(self.sender(), self._endpoint.peer_id)
        await self.call(contact, FIND_NODES, request, deadline_s=self._params.connect_deadline_s)

    # The books.

    async def call(self, contact: Contact, method: Method[Q, R], request: Q, *, deadline_s: float | None = None) -> R:
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
                self.check(known)
            raise
        # Addresses that a third party told do not displace those that the table holds.
        self._offer(self.table.get(contact.peer_id) or contact)
        return reply

    def check(self, contact: Contact) -> None:
        """Has a contact pinged soon; unanswered, it leaves the table."""
        if contact.peer_id not in self._in_check and self._jobs.add(self._ping, contact):
            self._in_check.add(contact.peer_id)

    def check_least_recent(self, now: float) -> None:
        """Has the contact that was silent the longest pinged, if that is long enough."""
        oldest = self.table.least_recent()
        if oldest and now - oldest[1] >= self._params.check_s:
            self.check(oldest[0])

    def meet(self, remote: PeerId, sender: Contact | None) -> None:
        """Takes note of who asks us. Raises `Refusal` when over the rate or under a false name."""
        now = trio.current_time()
        if not self._requests.allow(remote, now):
            raise Refusal("rate-limited")
        if sender is None:
            return
        if sender.peer_id != remote:
            raise Refusal("wrong-sender")
        known = self.table.get(remote)
        addresses = self.dialable(sender.addresses)
        if known and known.addresses == addresses:
            self._offer(known)
        elif addresses and self._dial_backs.allow(remote, now):
            self._jobs.add(self._dial_back, Contact(remote, addresses))

    def nearest(self, target: bytes, asker: PeerId) -> tuple[Contact, ...]:
        """What we tell `asker` about the surroundings of `target`."""
        nearest = self.table.closest(target, self._params.routing.k + 1)
        told = [contact for contact in self.usable(nearest) if contact.peer_id != asker]
        return tuple(told[: self._params.routing.k])

    def _offer(self, contact: Contact) -> None:
        doubted = self.table.offer(contact, trio.current_time(), self.host_of(contact.peer_id))
        if doubted:
            self.check(doubted)

    async def _ping(self, contact: Contact) -> None:
        try:
            await self._endpoint.call(contact, PING, Ping(self.sender()), deadline_s=self._params.rpc_deadline_s)
        except PeerError:
            self.table.failed(contact.peer_id)
        else:
            self._offer(contact)
        finally:
            self._in_check.discard(contact.peer_id)

    async def _dial_back(self, contact: Contact) -> None:
        for address in contact.addresses[:3]:
            with contextlib.suppress(PeerError):
                found = await self._endpoint.identify(address, deadline_s=self._params.rpc_deadline_s)
                if found == contact.peer_id:
                    was_alone = len(self.table) == 0
                    self._offer(contact)
                    if was_alone:
                        self._on_company()
                    return
