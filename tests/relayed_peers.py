"""Peers with relays and reservations in an in-memory network, as the tests need them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.circuit_table import RelayLimits
from swarm_peer.circuits import Circuits
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity, PeerId
from swarm_peer.memory import MemoryNetwork, Nat
from swarm_peer.relay import Relay
from swarm_peer.reservations import Reservations
from swarm_peer.rpc import Method

ECHO = Method("echo", bytes, bytes, 1 << 20, 1 << 20)
SLOW = Method("slow", bytes, bytes, 1 << 20, 1 << 20)
SLOW_S = 20.0


@dataclass
class Peer:
    """One peer; `contact` is what its record would say now."""

    identity: Identity
    endpoint: Endpoint
    relay: Relay
    reservations: Reservations
    circuits: Circuits
    bound: tuple[Address, ...]
    is_public: bool
    scope: trio.CancelScope

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def contact(self) -> Contact:
        return Contact(self.id, self.bound if self.is_public else self.reservations.entries)


@asynccontextmanager
async def peer(
    network: MemoryNetwork,
    number: int,
    *,
    nat: Nat | None = None,
    relays: Callable[[], list[Contact]] = list,
    limits: RelayLimits | None = None,
    may_relay: Callable[[PeerId], bool] = lambda who: True,
    port: int = 0,
) -> AsyncIterator[Peer]:
    """A running peer on the host "h<number>", public or behind a NAT."""
    host = f"h{number}"
    if nat is not None:
        network.put_behind_nat(host, nat)
    identity = Identity.from_seed(bytes([number]) * 32)
    transport = network.transport(identity, host)
    endpoint = Endpoint(identity, transport)
    relay = Relay(endpoint, transport, limits=limits, may_relay=may_relay)
    reservations = Reservations(endpoint, candidates=relays, rng=random.Random(number))
    bound: list[Address] = []
    circuits = Circuits(
        endpoint,
        transport,
        relay_contact=reservations.find,
        public_port=lambda: bound[0].port if nat is None and bound else None,
    )

    async def echo(remote: PeerId, request: bytes) -> bytes:
        return request

    async def slow(remote: PeerId, request: bytes) -> bytes:
        await trio.sleep(SLOW_S)
        return request

    endpoint.handle(ECHO, echo)
    endpoint.handle(SLOW, slow)
    async with trio.open_nursery() as nursery:
        bound += await nursery.start(endpoint.run, [Address("0.0.0.0", port)])
        await nursery.start(relay.run)
        await nursery.start(circuits.run)
        if nat is not None:
            await nursery.start(reservations.run)
        yield Peer(identity, endpoint, relay, reservations, circuits, tuple(bound), nat is None, nursery.cancel_scope)
        nursery.cancel_scope.cancel()


async def reserved(peer: Peer, count: int = 1) -> None:
    """Waits until a peer has so many relays."""
    with trio.fail_after(60):
        while len(peer.reservations.entries) < count:
            await peer.reservations.changed.wait()
