"""Thousands of virtual peers with the real DHT and membership over `direct_network`, and hostile ones among them.

Every peer has a public address in a /24 of its own, unless it is asked to sit elsewhere, so that the limits per subnet
are at work. Signatures are real; each is checked once per swarm and not once per peer (`shared_verification`).
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio
from direct_network import DirectEndpoint, DirectNetwork
from swarm_peer import records
from swarm_peer.addresses import Address
from swarm_peer.identity import Identity
from swarm_peer.kademlia import Kademlia, KademliaParams
from swarm_peer.membership import Membership, MembershipParams
from swarm_peer.records import PeerPayload, PeerState, RunPayload, SignedRecord, encode_payload, make_record, peers_key

RUN_ID = hashlib.sha256(b"a run").digest()
NAME = "wiki"
PORT = 4000
ENTRIES = 4


@contextmanager
def shared_verification() -> Iterator[None]:
    """Remembers the result of each signature check, which is a pure function of its arguments."""
    real = records.verify_signature
    records.verify_signature = functools.lru_cache(maxsize=200_000)(real)  # type: ignore[assignment]
    try:
        yield
    finally:
        records.verify_signature = real  # type: ignore[assignment]


def identity_of(seed: int, number: int) -> Identity:
    return Identity.from_seed(hashlib.sha256(b"peer %d of swarm %d" % (number, seed)).digest())


def host_of(number: int) -> str:
    """A public address; up to number 17,499 no two are in one /16."""
    return f"{20 + number % 70}.{number // 70 % 250}.{number // 17_500}.7"


@dataclass(eq=False)
class LargePeer:
    """A peer: its place in the network, its DHT, and its membership if it has one."""

    number: int
    identity: Identity
    endpoint: DirectEndpoint
    dht: Kademlia
    scope: trio.CancelScope
    membership: Membership | None = None

    def record(self, seq: int = 1, ttl_s: int = 1200) -> SignedRecord:
        payload = encode_payload(PeerPayload(RUN_ID, (self.endpoint.address,), PeerState.TRAINING, b""))
        return make_record(self.identity, "peer", peers_key(RUN_ID), seq, ttl_s, payload)

    def run(self, name: str = NAME, run_id: bytes = RUN_ID) -> RunPayload:
        return RunPayload(run_id, name, bytes(32), bytes(32), (self.endpoint.address,))


class LargeSwarm:
    """Peers 0, 1, 2…; the first `ENTRIES` are the way in for all others. All randomness comes from `seed`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        seed: int,
        *,
        params: KademliaParams | None = None,
        members: MembershipParams | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.network = DirectNetwork(random.Random(self.rng.random()))
        self.peers: list[LargePeer] = []
        self._nursery = nursery
        self._params = params or KademliaParams(check_s=60.0, refresh_s=1200.0)
        self._members = members or MembershipParams()

    async def start(self, number: int, *, host: str | None = None, is_member: bool = False) -> LargePeer:
        """Starts one peer and lets it join. A member publishes that it trains."""
        identity = identity_of(self.seed, number)
        endpoint = self.network.endpoint(identity, Address(host or host_of(number), PORT))
        dht = Kademlia(endpoint, identity, rng=random.Random(self.rng.random()), params=self._params)
        dht.advertise([endpoint.address])
        peer = LargePeer(number, identity, endpoint, dht, trio.CancelScope())
        if is_member:
            peer.membership = Membership(
                endpoint,
                identity,
                RUN_ID,
                discovery=dht,
                rng=random.Random(self.rng.random()),
                addresses=[endpoint.address],
                params=self._members,
            )
            peer.membership.publish(PeerState.TRAINING, b"")
        entries = [(None, other.endpoint.address) for other in self.peers[:ENTRIES]]

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with peer.scope:
                async with trio.open_nursery() as inner:
                    await inner.start(dht.run)
                    if entries:
                        await dht.bootstrap(self.rng.sample(entries, min(len(entries), 2)))
                    if peer.membership:
                        await inner.start(peer.membership.run)
                    task_status.started()

        self.peers.append(peer)
        await self._nursery.start(live)
        return peer

    async def grow(self, count: int, *, per_s: float = 20.0, is_member: bool = False) -> None:
        """Starts peers up to number `count`, `per_s` a second once the entries are there."""
        async with trio.open_nursery() as nursery:
            for number in range(len(self.peers), count):
                if number < ENTRIES:
                    await self.start(number, is_member=is_member)
                else:
                    nursery.start_soon(functools.partial(self.start, number, is_member=is_member))
                    await trio.sleep(1 / per_s)

    def crash(self, peer: LargePeer) -> None:
        """As a pulled plug: nothing is said to anybody."""
        peer.endpoint.close()
        peer.scope.cancel()
