"""DHT servers that join like any other and then work against everybody: what a third of a large swarm may be.

All of them know each other and the run under attack. They keep the real table upkeep (so they are in honest tables,
and stay there) and answer questions as their kind does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import trio
from direct_network import DirectEndpoint
from swarm_peer.addresses import Address, Contact
from swarm_peer.dht import (
    FIND_NODES,
    FIND_RECORDS,
    STORE,
    FindNodes,
    FindRecords,
    Nodes,
    Records,
    StoreRecord,
    StoreReply,
)
from swarm_peer.errors import PeerError
from swarm_peer.identity import Identity, PeerId
from swarm_peer.records import AgedRecord, RunPayload, SignedRecord, decode_run, encode_payload, make_record
from swarm_peer.routing import distance
from swarm_peer.storage import PutOutcome


@dataclass
class Conspiracy:
    """What the hostile nodes share. `target` is the key that they want to hide, `genuine` a record under it."""

    rng: random.Random
    target: bytes
    genuine: SignedRecord | None = None
    accomplices: list[Contact] = field(default_factory=list)

    def contacts_near(self, target: bytes) -> tuple[Contact, ...]:
        """The accomplices nearest to what is asked for, and invented ids nearer still at an accomplice's address."""
        near = sorted(self.accomplices, key=lambda contact: distance(contact.peer_id, target))[:14]
        invented = [
            Contact(target[:2] + self.rng.randbytes(30), self.rng.choice(self.accomplices).addresses) for _ in range(6)
        ]
        return (*invented, *near)

    def forged(self) -> SignedRecord:
        """The genuine author's record with another run in it, and a signature that does not fit."""
        assert self.genuine
        payload = msgspec.structs.replace(decode_run(self.genuine), run_id=self.rng.randbytes(32))
        return msgspec.structs.replace(self.genuine, seq=self.genuine.seq + 1000, payload=encode_payload(payload))

    def decoy(self, identity: Identity, address: Address) -> SignedRecord:
        """A valid record under the same name that leads to a run of the liar's own."""
        run = RunPayload(identity.peer_id, "wiki", identity.public_key, bytes(32), (address,))
        return make_record(identity, "run", self.target, 1, 1200, encode_payload(run))


KINDS = ("liar", "forger", "replayer", "decoy", "dropper", "staller")


def turn_hostile(kind: str, conspiracy: Conspiracy, identity: Identity, endpoint: DirectEndpoint) -> None:
    """Replaces the answers of a peer that has joined.

    liar: names accomplices only, and invented ids. forger: adds records with wrong signatures. replayer: adds the
    genuine author's first record, as if it were new. decoy: adds a valid record of its own. dropper: never answers.
    staller: answers just before the asker gives up. None of them gives away a genuine record or keeps one.
    """
    conspiracy.accomplices.append(endpoint.contact)
    replies: dict[str, Callable[[], tuple[SignedRecord, ...]]] = {
        "forger": lambda: (conspiracy.forged(),),
        "replayer": lambda: (conspiracy.genuine,) if conspiracy.genuine else (),
        "decoy": lambda: (conspiracy.decoy(identity, endpoint.address),),
    }

    async def wait() -> None:
        if kind == "dropper":
            await trio.sleep_forever()
        if kind == "staller":
            await trio.sleep(3.6)

    async def find_nodes(remote: PeerId, request: FindNodes) -> Nodes:
        await wait()
        return Nodes(conspiracy.contacts_near(request.target))

    async def find_records(remote: PeerId, request: FindRecords) -> Records:
        await wait()
        records: tuple[SignedRecord, ...] = ()
        if request.key == conspiracy.target and conspiracy.genuine and kind in replies:
            records = replies[kind]()
        return Records(tuple(AgedRecord(record, 0) for record in records), conspiracy.contacts_near(request.key))

    async def store(remote: PeerId, request: StoreRecord) -> StoreReply:
        await wait()
        return StoreReply(PutOutcome.STORED, None)

    endpoint.handle(FIND_NODES, find_nodes)
    endpoint.handle(FIND_RECORDS, find_records)
    endpoint.handle(STORE, store)


async def flood(endpoint: DirectEndpoint, victim: Contact, calls: int) -> int:
    """Asks one victim as fast as the network carries it; returns how often it was refused or not answered."""
    refused = 0

    async def ask() -> None:
        nonlocal refused
        try:
            await endpoint.call(victim, FIND_NODES, FindNodes(None, bytes(32)))
        except PeerError:
            refused += 1

    async with trio.open_nursery() as nursery:
        for number in range(calls):
            nursery.start_soon(ask)
            if number % 50 == 49:
                await trio.sleep(0.1)
    return refused
