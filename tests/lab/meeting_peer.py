"""A peer for the NAT lab, as a program: it relays, or is found through relays, and obeys lines of JSON on stdin.

    python meeting_peer.py '{"seed": 2, "listen": [], "relays": [[1, "11.22.33.1", 7766]]}'

It answers with lines of JSON. Identities come from the seeds, so that everybody knows everybody's contact.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from typing import Any

import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.blobs import BlobExchange, BlobId, BlobStore
from swarm_peer.circuit_table import RelayLimits
from swarm_peer.circuits import Circuits
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import PeerError
from swarm_peer.identity import Identity, PeerId
from swarm_peer.relay import Relay
from swarm_peer.relay_entry import relay_entry
from swarm_peer.reservations import Reservations
from swarm_peer.rpc import Method
from swarm_peer.tcp import TlsTransport

ECHO = Method("echo", bytes, bytes, 1 << 20, 1 << 20)
RATE_BYTES_PER_S = 10e6 / 8


def identity_of(seed: int) -> Identity:
    return Identity.from_seed(seed.to_bytes(32, "big"))


def blob_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class MeetingPeer:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        identity = identity_of(config["seed"])
        transport = TlsTransport(identity)
        self.endpoint = Endpoint(identity, transport)
        self.relays = [
            Contact(identity_of(seed).peer_id, (Address(host, port),)) for seed, host, port in config["relays"]
        ]
        self.store = BlobStore(1 << 26)
        self.blobs = BlobExchange(self.endpoint, self.store)
        self.relay = Relay(self.endpoint, transport, limits=RelayLimits(bytes_per_s=RATE_BYTES_PER_S))
        self.reservations = Reservations(self.endpoint, candidates=lambda: self.relays, rng=random.Random(0))
        listen = config["listen"]
        self.circuits = Circuits(
            self.endpoint,
            transport,
            relay_contact=self.reservations.find,
            public_port=lambda: listen[1] if listen else None,
        )
        self.endpoint.handle(ECHO, self._echo)

    async def _echo(self, remote: PeerId, request: bytes) -> bytes:
        return request

    def contact(self, seed: int) -> Contact:
        """Another home, to be found through every relay."""
        entries = tuple(relay_entry(PeerId(relay.peer_id), relay.addresses[0]) for relay in self.relays)
        return Contact(identity_of(seed).peer_id, entries)

    async def live(self) -> None:
        async with trio.open_nursery() as nursery:
            listen = [Address(*self.config["listen"])] if self.config["listen"] else []
            await nursery.start(self.endpoint.run, listen)
            await nursery.start(self.relay.run)
            await nursery.start(self.circuits.run)
            if not listen:
                await nursery.start(self.reservations.run)
            say(ready=True)
            async for line in _lines():
                order = json.loads(line)
                nursery.start_soon(self._obey, order.pop("do"), order)
            nursery.cancel_scope.cancel()

    async def _obey(self, what: str, order: dict[str, Any]) -> None:
        began = trio.current_time()
        try:
            with trio.fail_after(60):
                result = await getattr(self, f"do_{what}")(**order)
        except (PeerError, trio.TooSlowError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        say(did=what, **order, seconds=round(trio.current_time() - began, 3), **result)

    async def do_reserve(self, count: int) -> dict[str, Any]:
        """Waits until so many relays have a place for us."""
        while len(self.reservations.entries) != count:
            await self.reservations.changed.wait()
        return {}

    async def do_call(self, seed: int) -> dict[str, Any]:
        """One call to another home."""
        assert await self.endpoint.call(self.contact(seed), ECHO, bytes(1000), deadline_s=15) == bytes(1000)
        return {"relayed": self.endpoint.is_relayed(identity_of(seed).peer_id)}

    async def do_shorten(self, seed: int, within_s: float) -> dict[str, Any]:
        """Calls another home until the calls go there directly, or the time is up."""
        with trio.move_on_after(within_s):
            while self.endpoint.is_relayed(identity_of(seed).peer_id) is not False:
                await self.endpoint.call(self.contact(seed), ECHO, b"", deadline_s=15)
                await trio.sleep(0.05)
        data = bytes(500_000)
        assert await self.endpoint.call(self.contact(seed), ECHO, data, deadline_s=30) == data
        return {"relayed": self.endpoint.is_relayed(identity_of(seed).peer_id)}

    async def do_offer(self, size: int) -> dict[str, Any]:
        """Makes a blob and says its id."""
        return {"blob": self.store.put(blob_of(self.config["seed"], size)).hex()}

    async def do_fetch(self, seed: int, blob: str, size: int) -> dict[str, Any]:
        """Fetches a blob, and says when it has begun to come."""
        begun = False

        def progress(done: int, total: int) -> None:
            nonlocal begun
            if done and not begun:
                begun = True
                say(fetching=True)

        data = await self.blobs.fetch(
            BlobId(bytes.fromhex(blob)),
            [self.contact(seed)],
            max_size_bytes=size,
            deadline_s=60,
            progress=progress,
        )
        return {"whole": data == blob_of(seed, size)}

    async def do_stats(self) -> dict[str, Any]:
        """What we have relayed."""
        stats = self.relay.stats
        return {"circuits": stats.circuits, "call_backs": stats.call_backs, "bytes": stats.bytes}


async def _lines() -> Any:
    stdin = trio.wrap_file(sys.stdin)
    while line := await stdin.readline():
        yield line


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format="%(relativeCreated)d %(name)s %(message)s")
    trio.run(MeetingPeer(json.loads(sys.argv[1])).live)
