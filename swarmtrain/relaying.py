"""A node's part in relaying: it relays for others, or, if nobody can dial it, is found through relays itself.

Which of the two it is, others find out for it: they dial it back. Until then, and whenever nobody answers the question,
it announces its own addresses.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import trio
from swarm_peer.addresses import MAX_ADDRESSES, Address, Contact
from swarm_peer.circuit_table import RelayLimits
from swarm_peer.circuits import Circuits
from swarm_peer.dial_back import DialBack, Verdict
from swarm_peer.endpoint import Endpoint
from swarm_peer.gated import Gate
from swarm_peer.identity import PeerId, short
from swarm_peer.raw import RawTransport
from swarm_peer.relay import Relay
from swarm_peer.relay_entry import direct_addresses, relays_of
from swarm_peer.reservations import Reservations
from swarm_peer.routing import RoutingTable, is_local

from swarmtrain.rates import format_rate
from swarmtrain.reachability import Reach, judge_reach
from swarmtrain.witnesses import candidates, hear

logger = logging.getLogger("swarmtrain.relaying")

RELAYED_PREFERENCE = 0.25
FIRST_RELAY_S = 5.0
FIRST_RECHECK_S = 15.0
RECHECK_S = 300.0


class Relaying:
    """See the module. `own` are the addresses that the node listens on, as others should try them; `port` is None if it
    listens on nothing. What the user has stated (`is_given`) is not called in question.

    `limit_bytes_per_s` is what it relays for others at most; 0 for nothing. `takes_part` is False for those who only
    look: they hold no place with any relay.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        transport: RawTransport,
        table: RoutingTable,
        *,
        own: tuple[Address, ...],
        port: int | None,
        is_given: bool = False,
        limit_bytes_per_s: float,
        takes_part: bool,
        rng: random.Random,
    ) -> None:
        self._endpoint = endpoint
        self._table = table
        self._own = own
        self._port = port
        self._is_given = is_given
        self._has_asked = False
        self._forwarded: Address | None = None
        self._verified: tuple[Address, ...] = ()
        self._look_again = trio.Event()
        self.verdicts: list[Verdict] = []  # of those who have tried to dial this node last
        self._tried_port = port  # at which they have: the router may forward another one since
        self._takes_part = takes_part
        self.is_outbound_only = False
        self._is_partial = False  # some can dial it, and some cannot
        self._dial_back = DialBack(endpoint, transport)
        self._reservations = Reservations(endpoint, candidates=table.contacts, rng=rng)
        self._reservations.on_change = self._tell
        self._circuits = Circuits(
            endpoint,
            transport,
            relay_contact=self._reservations.find,
            public_port=lambda: None if self.is_outbound_only or not takes_part else port,
            local_allowed=lambda: not self._own or any(is_local(address.host) for address in self._own),
            may_punch=port is not None,
        )
        endpoint.also_at = self._met_at
        self.relay: Relay | None = None
        if limit_bytes_per_s > 0 and port is not None:
            self.relay = Relay(endpoint, transport, limits=RelayLimits(bytes_per_s=limit_bytes_per_s))
        self._listeners: list[Callable[[tuple[Address, ...]], None]] = []
        self._wants_relays = trio.Event()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where others can reach this node now: its own addresses, or those of its relays, or both."""
        if self.is_outbound_only:
            return self._reservations.entries
        relayed = self._reservations.entries if self._is_partial else ()
        direct = tuple(dict.fromkeys([*self._verified, *self._own]))
        return (*direct[: MAX_ADDRESSES - len(relayed)], *relayed)

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """The peers that relay for this one."""
        contact = Contact(self._endpoint.peer_id, self._reservations.entries)
        return tuple(PeerId(relay.peer_id) for relay in relays_of(contact))

    @property
    def reach(self) -> Reach:
        """Whether others can dial this node, as far as they have tried, with a line for people."""
        if self._is_given:
            return Reach("unknown", None, "announced as asked, and not called in question")
        return judge_reach(self._tried_port, self._own, self.verdicts, [short(relay) for relay in self.relays])

    def moved(self, own: tuple[Address, ...]) -> None:
        """Takes the addresses that this machine has from now on: it has changed networks."""
        if own == self._own or self._is_given:
            return
        logger.info("this machine's addresses are now %s", ", ".join(map(str, own)) or "none")
        self._own = own
        self._look_again.set()
        self._tell()

    def forwarded(self, address: Address | None) -> None:
        """Takes note of where the router says that it forwards from; believed once others have come that way."""
        self._forwarded = address
        self._look_again.set()

    def serve_only(self, may_relay: Callable[[PeerId], bool]) -> None:
        """Relays from now on only for those whom `may_relay` names: the members of a run that is not open."""
        if self.relay is not None:
            self.relay.may_relay = may_relay

    def belong_to(self, gate: Gate) -> None:
        """Takes part as a member of one run: shows relays that it is one and, if the run is closed, relays for no one
        else."""
        self._reservations.caller = self._circuits.caller = gate
        if not gate.is_open:
            self.serve_only(gate.has)

    def preference(self, contact: Contact) -> float:
        """How much to prefer a partner, between 0 and 1: paths through relays are slow, and others share them."""
        is_relayed = self._endpoint.is_relayed(PeerId(contact.peer_id))
        if is_relayed is None:
            is_relayed = self.is_outbound_only and bool(contact.addresses) and not direct_addresses(contact.addresses)
        return RELAYED_PREFERENCE if is_relayed else 1.0

    def on_addresses(self, listener: Callable[[tuple[Address, ...]], None]) -> None:
        """Has `listener` called with the addresses whenever they have changed."""
        self._listeners.append(listener)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relays, and is relayed, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._circuits.run)
            if self.relay is not None:
                await nursery.start(self.relay.run)
            task_status.started()
            await self._wants_relays.wait()
            await self._reservations.run()

    async def settle(self) -> bool:
        """Finds out whether others can dial this node, by asking some; unless all can, finds it relays.

        False if it cannot be reached: nobody dials it, and nobody relays for it yet.
        """
        if self._port is None:
            self._set_part(is_outbound_only=True)
        elif not self._is_given:
            found = candidates(self._endpoint, self._table.contacts())
            port = self._forwarded.port if self._forwarded else self._port
            verdicts = await hear(self._dial_back, found, port)
            self._has_asked = self._has_asked or bool(verdicts)
            if verdicts:
                self.verdicts, self._tried_port = verdicts, port
                kind = self.reach.kind
                self._set_part(is_outbound_only=kind == "outbound-only", is_partial=kind == "partial")
                self._take_verified(verdicts, port)
        if not (self.is_outbound_only or self._is_partial):
            return True
        with trio.move_on_after(FIRST_RELAY_S):
            while not self._reservations.entries:
                await self._reservations.changed.wait()
        return self._is_partial or bool(self._reservations.entries)

    async def keep_settled(self) -> None:
        """Looks again from time to time, until cancelled."""
        while True:
            with trio.move_on_after(RECHECK_S if self._has_asked else FIRST_RECHECK_S):
                await self._look_again.wait()
            self._look_again = trio.Event()
            await self.settle()

    def _take_verified(self, verdicts: list[Verdict], port: int) -> None:
        """Announces where others did reach us, although this machine does not have that address: a forwarded port."""
        seen = {Address(v.observed.host, port): None for v in verdicts if v.is_reached}
        verified = tuple(address for address in seen if not is_local(address.host) and address not in self._own)
        if verified != self._verified:
            self._verified = verified
            self._tell()

    def _set_part(self, *, is_outbound_only: bool, is_partial: bool = False) -> None:
        if (self.is_outbound_only, self._is_partial) == (is_outbound_only, is_partial):
            return
        self.is_outbound_only, self._is_partial = is_outbound_only, is_partial
        if (is_outbound_only or is_partial) and self._takes_part:
            self._wants_relays.set()
        logger.info("%s", self.reach.line)
        self._tell()

    def _met_at(self, peer: PeerId) -> tuple[Address, ...]:
        known = self._table.get(peer)
        return known.addresses if known is not None else ()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self.addresses)


def relaying_line(limit_bytes_per_s: float) -> str:
    """What a peer that relays says at its start."""
    rate = format_rate(limit_bytes_per_s)
    return f"relays for peers that cannot reach each other, {rate} at most (--relay-limit)"
