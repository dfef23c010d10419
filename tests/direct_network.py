"""A network of calls without connections, for swarms of thousands of peers in one process.

Between `swarm_peer.memory` and this there is one difference: no byte streams. A call is encoded, checked against its
method's caps, decoded at the other end, answered by the handler there, and travels back in the same way, each leg
after a delay of its own. So everything above `Caller` is the real code and every message is real bytes, while
connections, frames, TLS and keepalives cost nothing. What they would cost on the wire is added to the counters as a
flat `OVERHEAD_BYTES` per call.

Arrival times lie on a grid of 10 ms: the clock then jumps a hundred times per virtual second and not once per message.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.errors import ConnectionRefused, ConnectTimedOut, DeadlineExpired, PeerError, Refusal, WrongIdentity
from swarm_peer.identity import Identity, PeerId
from swarm_peer.rpc import Handler, Method, Q, R, decode_body, encode_body

GRID_S = 0.01
# Headers, frames and TLS records of one small call, both directions together, as `peer/PROTOCOL.md` has them.
OVERHEAD_BYTES = 150


@dataclass
class DirectNetwork:
    """Hosts and who listens where. `digest` covers every call in order, so equal digests mean equal histories."""

    rng: random.Random
    latency_s: tuple[float, float] = (0.01, 0.1)
    endpoints: dict[Address, DirectEndpoint] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    is_cut: Callable[[str, str], bool] = lambda source, target: False

    def __post_init__(self) -> None:
        self.history = hashlib.sha256()

    def endpoint(self, identity: Identity, address: Address) -> DirectEndpoint:
        """A peer that answers at `address` from now on, until it is `closed`."""
        endpoint = self.endpoints[address] = DirectEndpoint(self, identity, address)
        return endpoint

    async def travel(self) -> None:
        """One leg of a call."""
        arrival = trio.current_time() + self.rng.uniform(*self.latency_s)
        await trio.sleep_until(math.ceil(arrival / GRID_S) * GRID_S)

    def note(self, *what: object) -> None:
        self.history.update(f"{trio.current_time():.3f} {what}\n".encode())


class DirectEndpoint:
    """A `DialingCaller`: one peer's calls and handlers."""

    def __init__(self, network: DirectNetwork, identity: Identity, address: Address) -> None:
        self._network = network
        self._handlers: dict[str, tuple[Method[Any, Any], Handler[Any, Any]]] = {}
        self._met: dict[bytes, Address] = {}
        self.peer_id: PeerId = identity.peer_id
        self.address = address
        self.bytes_sent = 0

    @property
    def contact(self) -> Contact:
        return Contact(self.peer_id, (self.address,))

    def close(self) -> None:
        """Nobody answers here any more."""
        self._network.endpoints.pop(self.address, None)

    def handle(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """As `Caller.handle`."""
        self._handlers[method.name] = (method, handler)

    def seen_at(self, remote: PeerId) -> Address | None:
        """As `Endpoint.seen_at`; a connection is remembered for ever."""
        return self._met.get(remote)

    def rtt_s(self, peer_id: PeerId) -> float | None:
        """As `Caller.rtt_s`: nobody measures here."""
        return None

    async def identify(self, address: Address, *, deadline_s: float = 10.0) -> PeerId:
        """As `Endpoint.identify`."""
        with trio.move_on_after(deadline_s):
            await self._network.travel()
            there = await self._reach(address)
            self._meet(there)
            return there.peer_id
        raise ConnectTimedOut(address, "no connection")

    async def call(self, to: Contact, method: Method[Q, R], request: Q, *, deadline_s: float = 5.0) -> R:
        """As `Caller.call`."""
        network = self._network
        network.calls[method.name] += 1
        body = encode_body(method.request, request)
        assert len(body) <= method.max_request_bytes
        self.bytes_sent += len(body) + OVERHEAD_BYTES // 2
        outcome: object = "deadline"
        try:
            with trio.move_on_after(deadline_s):
                await network.travel()
                there = await self._find(to)
                reply = await there._answer(self, method, body)
                await network.travel()
                outcome = len(reply)
                return decode_body(method.reply, reply)
        except PeerError as error:
            outcome = error
            raise
        finally:
            network.note(self.address.host, to.peer_id.hex()[:8], method.name, len(body), outcome)
        raise DeadlineExpired(f"{method.name}: no answer within {deadline_s:.1f} s")

    async def _find(self, to: Contact) -> DirectEndpoint:
        """Who answers under a contact: the first of its addresses at which it proves its identity."""
        error: PeerError = ConnectionRefused(self.address)
        for address in to.addresses:
            try:
                there = await self._reach(address)
            except PeerError as refused:
                error = refused
                continue
            if there.peer_id == to.peer_id:
                self._meet(there)
                return there
            error = WrongIdentity(address, PeerId(to.peer_id), there.peer_id)
        raise error

    async def _reach(self, address: Address) -> DirectEndpoint:
        there = self._network.endpoints.get(address)
        if there is None:
            raise ConnectionRefused(address)
        if self._network.is_cut(self.address.host, address.host):
            await trio.sleep_forever()
        return there

    def _meet(self, there: DirectEndpoint) -> None:
        self._met[there.peer_id] = there.address
        there._met[self.peer_id] = self.address

    async def _answer(self, caller: DirectEndpoint, method: Method[Any, Any], body: bytes) -> bytes:
        if method.name not in self._handlers:
            raise Refusal("unknown-method", method.name)
        method, handler = self._handlers[method.name]
        reply = encode_body(method.reply, await handler(caller.peer_id, decode_body(method.request, body)))
        assert len(reply) <= method.max_reply_bytes
        self.bytes_sent += len(reply) + OVERHEAD_BYTES // 2
        return reply
