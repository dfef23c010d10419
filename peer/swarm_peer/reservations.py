"""Keeps a peer that nobody can dial connected to a few public peers, so that others can call it through them.

A reservation is renewed every 20 s, which also keeps the router's entry for the connection alive; a relay that is lost
is replaced within about a second.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from swarm_peer.addresses import Address, Contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import PeerError, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.relay_entry import direct_addresses, relay_entry
from swarm_peer.relay_messages import RESERVE, Nothing
from swarm_peer.routing import is_local
from swarm_peer.rpc import Caller

logger = logging.getLogger("swarm_peer")


@dataclass(frozen=True, slots=True)
class ReservationParams:
    """`wanted` relays at a time. One that fails is left alone for `pause_s`, one that has no place for us for
    `refused_pause_s`."""

    wanted: int = 3
    renew_s: float = 20.0
    look_s: float = 1.0
    pause_s: float = 5.0
    refused_pause_s: float = 120.0
    deadline_s: float = 5.0


@dataclass(slots=True)
class _Held:
    relay: Contact
    entry: Address
    seen_at: Address
    renewed_at: float


class Reservations:
    """The relays of one peer. `candidates` gives public peers that may serve as relays.

    `on_change` is called when `entries` has changed. Relays are asked through `caller`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        candidates: Callable[[], Iterable[Contact]],
        rng: random.Random,
        params: ReservationParams | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._candidates = candidates
        self._rng = rng
        self._params = params or ReservationParams()
        self._held: dict[PeerId, _Held] = {}
        self._paused: dict[PeerId, float] = {}  # until
        self.caller: Caller = endpoint
        self.on_change: Callable[[], None] = lambda: None
        self.changed = trio.Event()

    @property
    def entries(self) -> tuple[Address, ...]:
        """What to put into our records: one relay entry for each relay."""
        return tuple(held.entry for held in self._held.values())

    @property
    def seen_at(self) -> Address | None:
        """Where a relay sees us, if there is one."""
        return next((held.seen_at for held in self._held.values()), None)

    def find(self, relay: PeerId) -> Contact | None:
        """The contact of a relay that we have a reservation with."""
        held = self._held.get(relay)
        return held.relay if held is not None else None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Finds and keeps relays until cancelled; then there are none."""
        task_status.started()
        try:
            while True:
                await self._look()
                await trio.sleep(self._params.look_s)
        finally:
            self._held.clear()
            self._tell()

    async def _look(self) -> None:
        """Renews what is due, lets go of what is lost, and fills up."""
        now, before = trio.current_time(), set(self._held)
        connected = set(self._endpoint.connected())
        due = [
            held.relay
            for peer, held in self._held.items()
            if peer not in connected or now >= held.renewed_at + self._params.renew_s
        ]
        missing = self._params.wanted - len(self._held)
        if missing > 0:
            due += self._some_new(missing, now)
        if not due:
            return
        async with trio.open_nursery() as nursery:
            for relay in due:
                nursery.start_soon(self._reserve, relay)
        if set(self._held) != before:
            self._tell()

    def _some_new(self, count: int, now: float) -> list[Contact]:
        self._paused = {peer: until for peer, until in self._paused.items() if until > now}
        found: dict[PeerId, Contact] = {}
        for contact in self._candidates():
            peer, addresses = PeerId(contact.peer_id), direct_addresses(contact.addresses)
            if addresses and peer not in self._held and peer not in self._paused and peer != self._endpoint.peer_id:
                found.setdefault(peer, Contact(peer, addresses))
        return self._rng.sample(list(found.values()), min(count, len(found)))

    async def _reserve(self, relay: Contact) -> None:
        peer, now = PeerId(relay.peer_id), trio.current_time()
        try:
            reply = await self.caller.call(relay, RESERVE, Nothing(), deadline_s=self._params.deadline_s)
        except PeerError as error:
            is_final = isinstance(error, Refusal) and error.code in ("unknown-method", "relay-full")
            self._paused[peer] = now + (self._params.refused_pause_s if is_final else self._params.pause_s)
            if self._held.pop(peer, None) is not None or not isinstance(error, Refusal):
                logger.info("relay %s is lost: %s", short(peer), error)
            return
        if self._endpoint.seen_at(peer) is None:
            return
        if peer not in self._held:
            logger.info("peer %s relays for this one, and sees it at %s", short(peer), reply.seen_at)
        self._held[peer] = _Held(relay, relay_entry(peer, self._public(relay)), reply.seen_at, trio.current_time())

    def _public(self, relay: Contact) -> Address:
        """The relay's address for the world: ours may be one of a network that we share with it."""
        return next((a for a in relay.addresses if not is_local(a.host)), relay.addresses[0])

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
        self.on_change()
