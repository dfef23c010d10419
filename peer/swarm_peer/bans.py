"""Who is refused for a while: peers, and after a protocol violation the addresses where they came from.

A peer id costs nothing to make, so after a violation the address waits too, for less long: behind one address there may
be many people. Loopback and private addresses are exempt, where "one address" is a household or a laboratory.
"""

from __future__ import annotations

from typing import Final

from swarm_peer.addresses import host_group
from swarm_peer.errors import Banned
from swarm_peer.identity import PeerId, short
from swarm_peer.routing import is_local

MAX_PEERS: Final = 4096
MAX_HOSTS: Final = 4096


class PeerBans:
    """Peers, each until a time and for a reason. Bounded; the oldest ban gives way."""

    def __init__(self) -> None:
        self._bans: dict[PeerId, tuple[float, str]] = {}

    def ban(self, peer_id: PeerId, reason: str, until: float, now: float) -> None:
        """Refuses a peer until then. `reason` is printable."""
        self._bans[peer_id] = (until, reason)
        if len(self._bans) > MAX_PEERS:
            self._bans = {who: ban for who, ban in self._bans.items() if ban[0] > now}
            while len(self._bans) > MAX_PEERS:
                del self._bans[next(iter(self._bans))]

    def find(self, peer_id: PeerId, now: float) -> Banned | None:
        """The error for contact with a peer that has to wait."""
        ban = self._bans.get(peer_id)
        if ban is None:
            return None
        until, reason = ban
        if now >= until:
            del self._bans[peer_id]
            return None
        return Banned(short(peer_id), reason)


class HostBans:
    """IPv4 addresses and IPv6 /64 networks, each until a time. Bounded; the oldest ban gives way."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def ban(self, host: str, until: float) -> bool:
        """Refuses a host until then. False if it is exempt."""
        if is_local(host):
            return False
        group = host_group(host)
        self._until.pop(group, None)
        self._until[group] = until
        if len(self._until) > MAX_HOSTS:
            del self._until[next(iter(self._until))]
        return True

    def is_banned(self, host: str, now: float) -> bool:
        """Whether a host has to wait."""
        group = host_group(host)
        until = self._until.get(group)
        if until is None:
            return False
        if now >= until:
            del self._until[group]
            return False
        return True
