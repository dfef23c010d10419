"""The connections of an endpoint, and which of several to one remote is used.

There is one live connection per remote, whoever dialled it. When two peers dial each other at the same time, the
connection that the smaller peer id dialled stays, and the smaller peer id is the only one to decide, so never both
close. No I/O but the goodbye to what is replaced.
"""

from __future__ import annotations

from typing import Final

from swarm_peer.connection import Connection
from swarm_peer.identity import PeerId
from swarm_peer.mux_events import ByeCode

# Two connections to the same peer that began within this time come from dialling each other at once; otherwise
# the older one is what a crashed remote has left behind.
_SIMULTANEOUS_S: Final = 10.0


class ConnectionPool:
    """Connections by remote, at most `max_per_peer` each."""

    def __init__(self, own_id: PeerId, max_per_peer: int) -> None:
        self._own_id = own_id
        self._max_per_peer = max_per_peer
        self._by_remote: dict[PeerId, list[Connection]] = {}  # oldest first

    def all(self) -> list[Connection]:
        """Every live connection."""
        return [connection for siblings in self._by_remote.values() for connection in siblings]

    def of(self, remote: PeerId) -> list[Connection]:
        """The live connections to one remote, oldest first."""
        return list(self._by_remote.get(remote, ()))

    def connected(self) -> list[PeerId]:
        """The remotes to which a connection can be used."""
        return [remote for remote in self._by_remote if self.usable(remote) is not None]

    def usable(self, remote: PeerId) -> Connection | None:
        """The connection for calls to a remote; None if there is none."""
        usable = [c for c in self.of(remote) if c.is_usable]
        return self._preferred(usable) if usable else None

    def add(self, connection: Connection) -> bool:
        """Takes a connection in and retires what it replaces. False if an old one had to be cut off for it."""
        remote = connection.channel.remote
        siblings = self._by_remote.setdefault(remote, [])
        siblings.append(connection)
        has_room = len(siblings) <= self._max_per_peer
        if not has_room:
            siblings[0].abort(ByeCode.DUPLICATE, "replaced by a newer connection")
        usable = [c for c in siblings if c.is_usable]
        if len(usable) > 1 and self._own_id < remote:
            kept = self._preferred(usable)
            for other in usable:
                # A relayed one that a direct one replaces is left to what is under way on it, and then to its idleness.
                if other is not kept and other.is_relayed == kept.is_relayed:
                    other.close(ByeCode.DUPLICATE)
        return has_room

    def remove(self, connection: Connection) -> None:
        """A connection has ended."""
        remote = connection.channel.remote
        siblings = self._by_remote.get(remote, [])
        if connection in siblings:
            siblings.remove(connection)
        if not siblings:
            self._by_remote.pop(remote, None)

    def _preferred(self, usable: list[Connection]) -> Connection:
        """Of several connections to one remote, the one to keep: a direct one if there is any. Both ends come to the
        same answer."""
        usable = [c for c in usable if not c.is_relayed] or usable
        newest = usable[-1]
        recent = [c for c in usable if newest.since - c.since < _SIMULTANEOUS_S]
        of_smaller = [c for c in recent if c.is_dialer == (self._own_id < c.channel.remote)]
        return (of_smaller or recent)[-1]
