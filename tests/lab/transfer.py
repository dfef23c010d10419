"""What runs inside the lab's namespaces: a holder of one blob, and a peer that fetches it and makes small calls.

    python transfer.py hold SIZE_MB CONTROL LIMIT_UP [ADDRESS]
    python transfer.py fetch ADDRESS PEER_ID BLOB_ID CONTROL LANES CALLS

`hold` prints one line of JSON when it listens. `fetch` prints one when it is done: the time, what arrived by when, and
how long small calls took without and beside the transfer.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from typing import Any, Literal

import trio
from swarm_peer.addresses import Contact, parse_address
from swarm_peer.blobs import BlobExchange, BlobId, BlobParams, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.identity import Identity, PeerId
from swarm_peer.rpc import Method, Priority
from swarm_peer.tcp import TlsTransport

ECHO = Method("lab.echo", bytes, bytes, priority=Priority.CONTROL)


async def echo(remote: PeerId, body: bytes) -> bytes:
    return body


def make_endpoint(control: str, limit: float | Literal["auto"] | None = None) -> Endpoint:
    identity = Identity.generate()
    transport = TlsTransport(identity, congestion_control=control)
    endpoint = Endpoint(identity, transport, limits=EndpointLimits(upload_bytes_per_s=limit))
    endpoint.handle(ECHO, echo)
    return endpoint


async def hold(size_mb: float, control: str, limit_up: str, listen: str = "0.0.0.0:7766") -> None:
    limit: float | Literal["auto"] | None = "auto" if limit_up == "auto" else None
    if limit_up not in ("auto", "none"):
        limit = float(limit_up)
    endpoint = make_endpoint(control, limit)
    store = BlobStore(1 << 30)
    blob_id = store.put(random.Random(0).randbytes(int(size_mb * 1e6)))
    BlobExchange(endpoint, store)
    async with trio.open_nursery() as nursery:
        (address, *_) = await nursery.start(endpoint.run, [parse_address(listen)])
        print(json.dumps({"port": address.port, "peer": endpoint.peer_id.hex(), "blob": blob_id.hex()}), flush=True)


async def measure_calls(endpoint: Endpoint, contact: Contact, count: float) -> list[float]:
    times: list[float] = []
    while len(times) < count:
        began = trio.current_time()
        await endpoint.call(contact, ECHO, b"x" * 100, deadline_s=30)
        times.append(trio.current_time() - began)
        await trio.sleep(0.05)
    return times


def summary(times: list[float]) -> dict[str, float]:
    if not times:
        return {}
    ordered = sorted(times)
    return {
        "p50_ms": round(1e3 * statistics.median(ordered), 1),
        "p95_ms": round(1e3 * ordered[int(0.95 * (len(ordered) - 1))], 1),
        "max_ms": round(1e3 * ordered[-1], 1),
        "calls": len(ordered),
    }


async def fetch(address: str, peer: str, blob: str, control: str, lanes: int, calls: bool) -> dict[str, Any]:
    endpoint = make_endpoint(control)
    exchange = BlobExchange(endpoint, BlobStore(1 << 30), params=BlobParams(lanes=lanes))
    contact = Contact(bytes.fromhex(peer), (parse_address(address),))
    arrived: list[tuple[float, int]] = []
    beside: list[float] = []
    most_connections = 0

    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, [])
        await endpoint.call(contact, ECHO, b"x")
        idle = await measure_calls(endpoint, contact, 20 if calls else 3)
        began = trio.current_time()
        warm: list[float] = []

        def progress(done: int, total: int) -> None:
            nonlocal most_connections
            arrived.append((trio.current_time() - began, done))
            most_connections = max(most_connections, endpoint.stats.connections)

        async def call_beside() -> None:
            while True:
                at = trio.current_time()
                (took,) = await measure_calls(endpoint, contact, 1)
                (beside if at > began + 4 else warm).append(took)

        async with trio.open_nursery() as inner:
            if calls:
                inner.start_soon(call_beside)
            data = await exchange.fetch(
                BlobId(bytes.fromhex(blob)), [contact], max_size_bytes=1 << 30, deadline_s=600, progress=progress
            )
            inner.cancel_scope.cancel()
        took_s = trio.current_time() - began
        nursery.cancel_scope.cancel()
    at_5s = next((done for at, done in arrived if at >= 5), 0)
    last_at, _ = next(((at, done) for at, done in arrived if done > 0.9 * len(data)), (took_s, 0))
    seconds = range(1, int(took_s) + 2)
    steady = [(at, done) for at, done in arrived if 5 <= at <= last_at]
    steady_mbit = 8e-6 * (steady[-1][1] - at_5s) / (steady[-1][0] - steady[0][0]) if len(steady) > 2 else None
    return {
        "bytes": len(data),
        "seconds": round(took_s, 2),
        "mbit_per_s": round(8e-6 * len(data) / took_s, 2),
        "steady_mbit_per_s": steady_mbit and round(steady_mbit, 2),
        "received_bytes": endpoint.stats.bytes_received,
        "connections": most_connections,
        "idle": summary(idle),
        "beside": summary(beside),
        "first_4_s": summary(warm),
        "each_s": [round(8e-6 * max((d for t, d in arrived if t <= s), default=0), 1) for s in seconds],
    }


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        trio.run(hold, float(sys.argv[2]), *sys.argv[3:])
    else:
        address, peer, blob, control, lanes, calls = sys.argv[2:]
        print(json.dumps(trio.run(fetch, address, peer, blob, control, int(lanes), calls == "calls")), flush=True)
