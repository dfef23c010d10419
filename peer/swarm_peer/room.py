"""Room for one more connection: how many there may be, and which give way."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import trio

from swarm_peer.addresses import LOOPBACK, Address, Contact, host_group
from swarm_peer.connection import Connection
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.errors import Unreachable
from swarm_peer.mux_events import ByeCode


class Room:
    """Counts `connections()`, all that live, and the dials under way."""

    def __init__(self, limits: EndpointLimits, connections: Callable[[], list[Connection]]) -> None:
        self._limits = limits
        self._connections = connections
        self._dialling = 0
        self._one_closed = trio.Event()

    def has(self, more: int) -> bool:
        """Whether so many more fit in without another one having to go."""
        return len(self._connections()) + self._dialling + more <= self._limits.max_connections

    @contextlib.asynccontextmanager
    async def slot(self, to: Contact | Address) -> AsyncIterator[None]:
        """Held while a connection is dialled; room is made by closing quiet ones.

        Raises `Unreachable` if all are at work.
        """
        most = self._limits.max_connections
        deadline = trio.current_time() + self._limits.dial_deadline_s
        while not self.has(1):
            live = self._connections()
            is_closing = any(not c.is_usable for c in live)
            if trio.current_time() >= deadline or not (close_quietest(live) or is_closing or self._dialling):
                raise Unreachable(to, f"all {most} connections of this peer are in use")
            with trio.move_on_at(deadline):
                await self._one_closed.wait()
        self._dialling += 1
        try:
            yield
        finally:
            self._dialling -= 1
            self.one_closed()

    def one_closed(self) -> None:
        """Wakes those who wait for room."""
        self._one_closed.set()
        self._one_closed = trio.Event()

    def admits(self, origin: str) -> bool:
        """Whether one more connection may come in from a host; says goodbye to a quiet one for it, if need be."""
        inbound = [c for c in self._connections() if not c.is_dialer and not c.is_relayed]
        group = host_group(origin)
        from_there = sum(host_group(c.channel.origin) == group for c in inbound)
        if group != LOOPBACK and from_there >= self._limits.max_inbound_per_host:
            return False
        most = self._limits.max_inbound
        # Some more while quiet ones say goodbye; not any number, for they may take their time.
        return len(inbound) < most or (len(inbound) < most + 1 + most // 8 and close_quietest(inbound))


def close_quietest(connections: list[Connection]) -> bool:
    """Says goodbye to the connection that was quiet the longest; False if all are at work."""
    quiet = [c for c in connections if c.is_quiet and c.is_usable]
    if not quiet:
        return False
    min(quiet, key=lambda c: c.last_active).close(ByeCode.IDLE)
    return True
