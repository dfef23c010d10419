"""Peers of the local network as entry points: what is heard there is dialled, and who answers is joined through."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import trio
from swarm_peer.address_policy import WILDCARDS, Judged
from swarm_peer.addresses import Address
from swarm_peer.identity import PeerId
from swarm_peer.kademlia import Kademlia
from swarm_peer.lan import GROUP, PORT, LanBeacon

logger = logging.getLogger("swarmtrain.local_network")

LAN_GROUP = (GROUP, PORT)
LOOPBACK_HOST = "127.0.0.1"


class LocalNetwork:
    """A node's presence in the local network. `reached` is set, and `first` named, once a peer there has answered."""

    def __init__(
        self, own_id: PeerId, port: int, hosts: Sequence[str], discovery: Kademlia, group: tuple[str, int]
    ) -> None:
        self._discovery = discovery
        self._beacon = LanBeacon(own_id, port, hosts, self._enter, rng=random.Random(own_id), group=group)
        self.reached = trio.Event()
        self.first: Address | None = None

    def care_about(self, run_id: bytes) -> None:
        """Minds only peers of this run, and of others that were named before, from now on."""
        self._beacon.care_about(run_id)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sends and hears until cancelled; returns early where there is no multicast."""
        await self._beacon.run(task_status=task_status)

    async def _enter(self, peer_id: PeerId, address: Address) -> None:
        if peer_id not in self._discovery.table:  # it may have been quicker to dial us
            [(_, error)] = await self._discovery.bootstrap([(peer_id, address)])
            if error is not None:
                logger.info("heard in the local network, but: %s", error)
                return
        self.first = self.first or address
        self.reached.set()


def beacon_hosts(bound: Sequence[Address], own: Sequence[Judged]) -> list[str]:
    """Returns the IPv4 addresses by way of which beacons go: none for a node that listens on loopback only."""
    hosts = [judged.found.host for judged in own if judged.is_told and ":" not in judged.found.host]
    everywhere = [address for address in bound if address.host in WILDCARDS]
    if everywhere:
        return [*dict.fromkeys([*hosts, LOOPBACK_HOST])]
    return [address.host for address in bound if address.host in hosts and address.host != LOOPBACK_HOST]
