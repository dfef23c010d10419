"""How fast do bytes go from one peer to another, and what do they cost: our TLS connection, and hivemind's p2p.

    python benchmarks/hivemind_stream.py [--megabytes 400] [--json FILE]

Loopback; sender and receiver are processes of their own. CPU is that of both and of all their helpers: hivemind's data
goes through a daemon on either side, over libp2p's TLS between them and over a Unix socket to the Python process.
hivemind's binary stream is measured, its fastest way; its averaging adds protocol buffers on top. Without hivemind
only our row is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import trio
from swarm_peer.addresses import Address, Contact, parse_contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity, PeerId
from swarm_peer.rpc import Method, PartSender, Priority
from swarm_peer.tcp import TlsTransport

CHUNK_BYTES = 1 << 18
PULL = Method("benchmark.pull", bytes, bytes, 64, 1 << 40, Priority.BULK)
HIVEMIND_PULL = "benchmark.pull"


# ------------------------------------------------------------------------------------------------------------ roles


async def own_sender() -> None:
    chunk = random.Random(0).randbytes(CHUNK_BYTES)

    async def send(remote: PeerId, request: bytes, parts: PartSender) -> None:
        for _ in range(int(request) // CHUNK_BYTES):
            await parts.send(chunk)

    identity = Identity.generate()
    endpoint = Endpoint(identity, TlsTransport(identity))
    endpoint.handle_stream(PULL, send)
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(endpoint.run, [Address("127.0.0.1", 0)])
        print(json.dumps({"entry": f"{identity.peer_id.hex()}@{address}"}), flush=True)
        await trio.sleep_forever()


async def own_receiver(entry: str, size: int) -> None:
    peer_id, address = parse_contact(entry)
    assert peer_id is not None
    identity = Identity.generate()
    endpoint = Endpoint(identity, TlsTransport(identity))
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, [])

        async def pull(wanted: int) -> None:
            received = 0
            contact = Contact(peer_id, (address,))
            async with endpoint.stream(contact, PULL, str(wanted).encode(), deadline_s=300.0) as parts:
                async for part in parts:
                    received += len(part)
            assert received == wanted

        await pull(CHUNK_BYTES)
        while await trio.to_thread.run_sync(sys.stdin.readline):
            start = time.perf_counter()
            await pull(size)
            print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
        nursery.cancel_scope.cancel()


async def hivemind_sender() -> None:
    from hivemind.p2p import P2P

    chunk = random.Random(0).randbytes(CHUNK_BYTES)

    async def send(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:  # noqa: ANN401
        size = int.from_bytes(await reader.readexactly(8), "big")
        for _ in range(size // CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    await p2p.add_binary_stream_handler(HIVEMIND_PULL, send)
    [address] = await p2p.get_visible_maddrs()
    print(json.dumps({"entry": str(address)}), flush=True)
    await asyncio.Event().wait()


async def hivemind_receiver(entry: str, size: int) -> None:
    from hivemind.p2p import P2P, PeerID

    p2p = await P2P.create(initial_peers=[entry], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    remote = PeerID.from_base58(entry.rpartition("/")[2])

    async def pull(wanted: int) -> None:
        _, reader, writer = await p2p.call_binary_stream_handler(remote, HIVEMIND_PULL)
        writer.write(wanted.to_bytes(8, "big"))
        left = wanted
        while left:
            data = await reader.read(CHUNK_BYTES)
            assert data
            left -= len(data)
        writer.close()

    await pull(CHUNK_BYTES)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        start = time.perf_counter()
        await pull(size)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


# -------------------------------------------------------------------------------------------------------- measuring


def start(*role: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, *role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a peer's process ended with status {process.wait()}")
    return json.loads(line)


def cpu_seconds(groups: list[int]) -> float:
    """CPU time of all processes in some process groups, so far."""
    ticks = 0
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) in groups:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(whose: str, megabytes: int, repeats: int = 3) -> dict[str, Any]:
    """The fastest of some transfers, and the mean CPU time of all. Raises RuntimeError if a process dies."""
    size = megabytes * 1_000_000 // CHUNK_BYTES * CHUNK_BYTES
    sender = start("--role", f"{whose}-sender")
    receiver = None
    try:
        receiver = start("--role", f"{whose}-receiver", "--entry", hear(sender)["entry"], "--bytes", str(size))
        groups = [sender.pid, receiver.pid]
        seconds = []
        assert receiver.stdin is not None
        before = None
        for number in range(repeats + 1):
            receiver.stdin.write("go\n")
            receiver.stdin.flush()
            seconds.append(hear(receiver)["seconds"])
            if number == 0:  # start and import are over, and the connection is warm
                before = cpu_seconds(groups)
        assert before is not None
        cpu = (cpu_seconds(groups) - before) / repeats
        return {
            "whose": whose,
            "megabytes": size / 1e6,
            "mb_per_s": size / 1e6 / min(seconds[1:]),
            "cpu_s_per_gb": cpu / (size / 1e9),
            "load": os.getloadavg()[0],
        }
    finally:
        for process in filter(None, (sender, receiver)):
            os.killpg(process.pid, 9)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def rows(megabytes: int) -> list[dict[str, Any]]:
    """Our row, and hivemind's where it is installed."""
    found = [measure("ours", megabytes)]
    if importlib.util.find_spec("hivemind") is None:
        print("hivemind is not installed (pip install 'swarmtrain[hivemind]'): its row is left out", flush=True)
        return found
    return [*found, measure("hivemind", megabytes)]


def section(quick: bool) -> dict[str, Any]:
    """For `transport.py --rivals`."""
    report = rows(100 if quick else 400)
    return {
        "title": "a stream of bytes, beside hivemind's p2p",
        "note": "CPU seconds of both sides and of hivemind's daemons",
        "columns": ["whose", "MB/s", "CPU-s per GB"],
        "rows": [[row["whose"], round(row["mb_per_s"]), round(row["cpu_s_per_gb"], 2)] for row in report],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="size of one transfer")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--entry", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case "ours-sender":
            trio.run(own_sender)
        case "ours-receiver":
            trio.run(own_receiver, options.entry, options.bytes)
        case "hivemind-sender":
            asyncio.run(hivemind_sender())
        case "hivemind-receiver":
            asyncio.run(hivemind_receiver(options.entry, options.bytes))
        case _:
            report = rows(options.megabytes)
            print("\n| whose | MB/s | CPU-s per GB |\n|---|---|---|")
            for row in report:
                print(f"| {row['whose']} | {row['mb_per_s']:.0f} | {row['cpu_s_per_gb']:.2f} |")
            if len(report) == 2:
                own, rival = report
                faster, cheaper = (rival[k] / own[k] for k in ("mb_per_s", "cpu_s_per_gb"))
                print(f"\nhivemind's as a multiple of ours: MB/s {faster:.2f}, CPU {cheaper:.2f}")
            if options.json:
                options.json.write_text(json.dumps({"machine": f"{os.cpu_count()} CPUs", "rows": report}, indent=1))


if __name__ == "__main__":
    main()
