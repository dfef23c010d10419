"""How fast do peers move bytes and answer calls? Every row in one run on loopback, ratios to what trio gives by itself.

    python benchmarks/transport.py [--quick] [--rivals] [--json FILE]

Each transfer runs between two processes; CPU seconds are those of sender and receiver together (getrusage). Rows:
    trio TCP        a plain trio.SocketStream, 256 KiB at a time: what is lost above it is the price of what we do
    trio SSLStream  trio's own TLS 1.3 stream over it, one-sided authentication
    TLS stream      ours: mutual authentication, over memory BIOs
    blobs           all of it: TLS, frames, priorities, credit, chunks, BLAKE3 of every chunk, copy into place
The best of several rounds counts, rounds alternate between the rows. About half a minute (`--quick`: ten seconds).

With `--rivals`, other modules of this folder add sections: see `SECTIONS`. That takes minutes more.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import pathlib
import random
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.blobs import BlobExchange, BlobId, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.identity import Identity, PeerId
from swarm_peer.rpc import Method, Priority
from swarm_peer.tcp import TlsTransport
from swarm_peer.tls import Credentials, TlsStream

PIECE = 256 * 1024
ECHO = Method("benchmark.echo", bytes, bytes, priority=Priority.CONTROL)
ALICE, BOB = (Identity.from_seed(name.ljust(32)) for name in (b"alice", b"bob"))

SECTIONS = ("hivemind_stream", "dht_latency")
"""Modules beside this file with further rows. Each has `section(quick: bool) -> dict`: {"title": ..., "note": ...,
"columns": [...], "rows": [[...], ...]}; one that is missing is left out, one that fails says so in its place."""

Receive = Callable[[], Awaitable[bytes]]


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def self_signed(identity: Identity) -> ssl.SSLContext:
    """A server context with our certificate, for trio.SSLStream."""
    credentials = Credentials(identity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:
        file.write(ssl.DER_cert_to_PEM_cert(credentials.certificate).encode() + credentials._key_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


# --- the serving process: says its port, sends once, says what CPU time that took -----------------------------------


async def serve_stream(kind: str, size: int) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    say(port=listener.socket.getsockname()[1])
    tcp = await listener.accept()
    stream: Any = tcp
    if kind == "trio SSLStream":
        stream = trio.SSLStream(tcp, self_signed(ALICE), server_side=True, https_compatible=True)
        await stream.do_handshake()
    elif kind == "TLS stream":
        stream = TlsStream(tcp)
        await stream.accept(Credentials(ALICE))
    piece = random.Random(0).randbytes(PIECE)
    began = cpu_s()
    for _ in range(size // PIECE):
        await stream.send_all(piece)
    say(cpu_s=cpu_s() - began)
    await trio.to_thread.run_sync(sys.stdin.read)


async def serve_endpoint(size: int) -> None:
    async def echo(remote: PeerId, body: bytes) -> bytes:
        return body

    endpoint = Endpoint(ALICE, TlsTransport(ALICE), limits=EndpointLimits(upload_bytes_per_s="auto"))
    endpoint.handle(ECHO, echo)
    store = BlobStore(1 << 40)
    blob_id = store.put(np.random.default_rng(0).bytes(size))
    BlobExchange(endpoint, store)
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(endpoint.run, [Address("127.0.0.1", 0)])
        say(port=address.port, blob=blob_id.hex())
        while await trio.to_thread.run_sync(sys.stdin.readline):
            say(cpu_s=cpu_s())
        nursery.cancel_scope.cancel()


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


class Server:
    """The other process."""

    def __init__(self, kind: str, size: int) -> None:
        command = [sys.executable, __file__, "--serve", kind, "--size", str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard

    def cpu_s(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("cpu\n")
        self.process.stdin.flush()
        return float(self.hear()["cpu_s"])

    def close(self) -> None:
        self.process.communicate()


# --- the receiving process ------------------------------------------------------------------------------------------


async def receive_stream(kind: str, port: int, size: int) -> tuple[float, float]:
    """Seconds and CPU seconds for `size` bytes."""
    tcp = await trio.open_tcp_stream("127.0.0.1", port)
    receive: Receive = functools.partial(tcp.receive_some, PIECE)
    if kind == "trio SSLStream":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        over = trio.SSLStream(tcp, context, https_compatible=True)
        await over.do_handshake()
        receive = over.receive_some
    elif kind == "TLS stream":
        ours = TlsStream(tcp)
        await ours.connect(Credentials(BOB))
        receive = ours.receive_some
    began, cpu_began, left = time.perf_counter(), cpu_s(), size
    while left > 0:
        left -= len(await receive())
    took = time.perf_counter() - began, cpu_s() - cpu_began
    await trio.aclose_forcefully(tcp)
    return took


def transfer_stream(kind: str, size: int) -> tuple[float, float]:
    server = Server(kind, size)
    seconds, cpu = trio.run(receive_stream, kind, server.hello["port"], size)
    cpu += float(server.hear()["cpu_s"])
    server.close()
    return seconds, cpu


async def with_endpoint(work: Callable[[Endpoint], Awaitable[Any]]) -> Any:  # noqa: ANN401
    endpoint = Endpoint(BOB, TlsTransport(BOB))
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, [])
        result = await work(endpoint)
        nursery.cancel_scope.cancel()
    return result


def contact_of(server: Server) -> Contact:
    return Contact(ALICE.peer_id, (Address("127.0.0.1", server.hello["port"]),))


async def fetch(endpoint: Endpoint, server: Server, size: int) -> None:
    exchange = BlobExchange(endpoint, BlobStore(1))
    blob_id = BlobId(bytes.fromhex(server.hello["blob"]))
    await exchange.fetch(blob_id, [contact_of(server)], max_size_bytes=size, deadline_s=600)


def transfer_blob(kind: str, size: int) -> tuple[float, float]:
    server = Server(kind, size)

    async def work(endpoint: Endpoint) -> tuple[float, float]:
        await endpoint.call(contact_of(server), ECHO, b"")  # the handshake is another row
        began, cpu_began = time.perf_counter(), cpu_s() + server.cpu_s()
        await fetch(endpoint, server, size)
        return time.perf_counter() - began, cpu_s() + server.cpu_s() - cpu_began

    result: tuple[float, float] = trio.run(with_endpoint, work)
    server.close()
    return result


def transfers(quick: bool) -> dict[str, Any]:
    size = (64 if quick else 512) * 1024 * 1024
    kinds = {"trio TCP": transfer_stream, "trio SSLStream": transfer_stream, "TLS stream": transfer_stream}
    ways = {**kinds, "blobs": transfer_blob}
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ways}
    for _ in range(2 if quick else 3):
        for kind, transfer in ways.items():
            taken[kind].append(transfer(kind, size))
    best = {kind: (min(s for s, _ in rounds), min(c for _, c in rounds)) for kind, rounds in taken.items()}
    plain, trios = best["trio TCP"], best["trio SSLStream"]
    return {
        "title": f"transfer of {size >> 20} MiB on loopback",
        "note": "CPU seconds of both sides; ratios of MB/s",
        "columns": ["way", "MB/s", "CPU-s per GB", "of trio TCP", "of trio SSLStream"],
        "rows": [
            [kind, round(size / 1e6 / s), round(cpu / size * 1e9, 2), ratio(plain[0], s), ratio(trios[0], s)]
            for kind, (s, cpu) in best.items()
        ],
    }


def ratio(of: float, to: float) -> float:
    return round(of / to, 2)


def handshakes(quick: bool) -> dict[str, Any]:
    count = 50 if quick else 300
    server = Server("blobs", 0)

    async def dial_all() -> list[float]:
        transport, times = TlsTransport(BOB), []
        for _ in range(count):
            began = time.perf_counter()
            channel = await transport.dial(contact_of(server).addresses[0], ALICE.peer_id, 10.0)
            times.append(time.perf_counter() - began)
            await channel.stream.aclose()
        return times

    cpu_began = server.cpu_s()
    times = trio.run(dial_all)
    cpu = server.cpu_s() - cpu_began
    server.close()
    return {
        "title": "handshakes, one after the other",
        "note": "TCP and mutual TLS 1.3, a known client; CPU of the server",
        "columns": ["per second", "p50 ms", "server CPU ms each"],
        "rows": [[round(count / sum(times)), round(1e3 * statistics.median(times), 1), round(1e3 * cpu / count, 1)]],
    }


def calls(quick: bool) -> dict[str, Any]:
    size = (128 if quick else 1024) * 1024 * 1024
    server = Server("blobs", size)

    async def call_for(endpoint: Endpoint, count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await endpoint.call(contact_of(server), ECHO, b"x" * 100, deadline_s=30)
            times.append(time.perf_counter() - began)
            await trio.sleep(0.001)
        return times

    async def work(endpoint: Endpoint) -> tuple[list[float], list[float]]:
        await call_for(endpoint, 20)
        idle = await call_for(endpoint, 200 if quick else 1000)
        beside: list[float] = []

        async def keep_calling() -> None:
            while True:
                beside.extend(await call_for(endpoint, 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_calling)
            await fetch(endpoint, server, size)
            nursery.cancel_scope.cancel()
        return idle, beside

    idle, beside = trio.run(with_endpoint, work)
    server.close()

    def row(name: str, times: list[float]) -> list[Any]:
        ordered = sorted(times)
        p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
        return [name, len(ordered), round(1e3 * p50, 2), round(1e3 * p99, 2), ratio(p50, statistics.median(idle))]

    return {
        "title": "calls of 100 bytes on loopback",
        "note": "beside a transfer on the same connection, default limits (loopback is exempt)",
        "columns": ["when", "calls", "p50 ms", "p99 ms", "p50, of idle"],
        "rows": [row("idle", idle), row("beside a transfer", beside)],
    }


def sections(quick: bool, rivals: bool) -> list[dict[str, Any]]:
    found = [transfers(quick), handshakes(quick), calls(quick)]
    folder = pathlib.Path(__file__).parent
    sys.path.insert(0, str(folder))
    for name in SECTIONS if rivals else ():
        if (folder / f"{name}.py").exists():
            try:
                module = importlib.import_module(name)
                if hasattr(module, "section"):
                    found.append(module.section(quick))
            except Exception as error:
                found.append({"title": name, "note": f"failed: {error}", "columns": [], "rows": []})
    return found


def show(section: dict[str, Any]) -> None:
    print(f"\n{section['title']} ({section['note']})")
    table = [section["columns"], *section["rows"]]
    widths = [max(len(str(row[n])) for row in table) for n in range(len(section["columns"]))]
    for row in table:
        cells = [str(cell).ljust(w) if n == 0 else str(cell).rjust(w) for n, (cell, w) in enumerate(zip(row, widths))]  # noqa: B905
        print("  " + "  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small transfers, few rounds")
    parser.add_argument("--rivals", action="store_true", help="also beside hivemind, where it is installed")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the sections there, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "blobs":
        trio.run(serve_endpoint, options.size)
    elif options.serve:
        trio.run(serve_stream, options.serve, options.size)
    else:
        found = sections(options.quick, options.rivals)
        for section in found:
            show(section)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
