"""The lanes of an endpoint: further connections to a remote that carry bulk only, beside the one that carries all.

A lane belongs to the same two peers under the same identities; TLS says that it is one (`tls.LANE_ALPN`), so that
neither end takes it for a duplicate. Only the side that dialled a lane opens calls on it. A quiet one closes after
ten seconds, and lanes never take more than half of an endpoint's connections.
"""

from __future__ import annotations

import trio

from swarm_peer.connection import Connection
from swarm_peer.identity import PeerId

LANE_IDLE_S = 10.0
MAX_LANES_PER_PEER = 8


class Lanes:
    """Which lanes there are. `max_lanes` bounds them over all remotes, of both directions."""

    def __init__(self, max_lanes: int) -> None:
        self._max_lanes = max_lanes
        self._live: dict[PeerId, list[Connection]] = {}
        self._dialled: dict[tuple[PeerId, int], Connection] = {}
        self._locks: dict[tuple[PeerId, int], trio.Lock] = {}

    def all(self) -> list[Connection]:
        """Every live lane."""
        return [connection for siblings in self._live.values() for connection in siblings]

    def of(self, remote: PeerId) -> list[Connection]:
        """The live lanes to and from one remote."""
        return list(self._live.get(remote, ()))

    def find(self, remote: PeerId, number: int) -> Connection | None:
        """The lane that we dialled under this number, if it can be used."""
        connection = self._dialled.get((remote, number))
        return connection if connection is not None and connection.is_usable else None

    def lock(self, remote: PeerId, number: int) -> trio.Lock:
        """Held while a lane is dialled, so that it is dialled once."""
        return self._locks.setdefault((remote, number), trio.Lock())

    def has_room(self, remote: PeerId) -> bool:
        """Whether one more lane may be dialled to, or accepted from, a remote."""
        inbound = sum(not c.is_dialer for c in self.of(remote))
        return inbound < MAX_LANES_PER_PEER and len(self.all()) < self._max_lanes

    def add(self, connection: Connection, number: int | None = None) -> None:
        """A lane is there; `number` if we have dialled it."""
        self._live.setdefault(connection.channel.remote, []).append(connection)
        if number is not None:
            self._dialled[connection.channel.remote, number] = connection

    def remove(self, connection: Connection) -> None:
        """A lane has ended."""
        remote = connection.channel.remote
        siblings = self._live.get(remote, [])
        if connection in siblings:
            siblings.remove(connection)
        if not siblings:
            self._live.pop(remote, None)
        for key in [key for key, dialled in self._dialled.items() if dialled is connection]:
            del self._dialled[key]
            lock = self._locks.get(key)
            if lock is not None and not lock.locked():
                del self._locks[key]
