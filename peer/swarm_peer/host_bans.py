"""Addresses that are refused for a while because a protocol violation came from there.

A peer id costs nothing to make, so after a violation the address waits too, for less long: behind one address there may
be many people. Loopback and private addresses are exempt, where "one address" is a household or a laboratory.
"""

from __future__ import annotations

from typing import Final

from swarm_peer.addresses import host_group
from swarm_peer.routing import is_local

MAX_HOSTS: Final = 4096


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
