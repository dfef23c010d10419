"""What relaying costs the relay: CPU time per gigabyte passed on, over loopback.

    python benchmarks/relay_cost.py [MEGABYTES]

The relay is a process of its own; two peers in this one echo through it, with TLS from end to end. Prints CPU-seconds
of the relay per GB, and MB/s, which depends on what else the machine does.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.circuit_table import RelayLimits
from swarm_peer.circuits import Circuits
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity, PeerId
from swarm_peer.relay import Relay
from swarm_peer.reservations import Reservations
from swarm_peer.rpc import Method
from swarm_peer.tcp import TlsTransport

ECHO = Method("echo", bytes, bytes, 1 << 20, 1 << 20)
PIECE = bytes(1 << 20)


def identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


def serve(pipe: Connection) -> None:
    """The relay: says where it listens, and its CPU time whenever it is asked."""

    async def main() -> None:
        transport = TlsTransport(identity(1))
        endpoint = Endpoint(identity(1), transport)
        relay = Relay(endpoint, transport, limits=RelayLimits(bytes_per_s=1e12))
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(endpoint.run, [Address("127.0.0.1", 0)])
            pipe.send(address.port)
            while await trio.to_thread.run_sync(pipe.recv):
                used = resource.getrusage(resource.RUSAGE_SELF)
                pipe.send((used.ru_utime + used.ru_stime, relay.stats.bytes))
            nursery.cancel_scope.cancel()

    trio.run(main)


async def measure(pipe: Connection, megabytes: int) -> None:
    relay = Contact(identity(1).peer_id, (Address("127.0.0.1", pipe.recv()),))
    async with trio.open_nursery() as nursery:
        ends: list[tuple[Endpoint, Reservations]] = []
        for number in (2, 3):
            transport = TlsTransport(identity(number))
            endpoint = Endpoint(identity(number), transport)
            reservations = Reservations(endpoint, candidates=lambda: [relay], rng=random.Random(number))
            circuits = Circuits(endpoint, transport, relay_contact=reservations.find, may_punch=False)
            endpoint.handle(ECHO, echo)
            await nursery.start(endpoint.run, [])
            await nursery.start(circuits.run)
            await nursery.start(reservations.run)
            while not reservations.entries:
                await reservations.changed.wait()
            ends.append((endpoint, reservations))
        target = Contact(identity(3).peer_id, ends[1][1].entries)
        await ends[0][0].call(target, ECHO, PIECE)
        pipe.send(True)
        cpu, passed = pipe.recv()
        began = time.monotonic()
        for _ in range(megabytes // 2):
            await ends[0][0].call(target, ECHO, PIECE, deadline_s=60)
        took = time.monotonic() - began
        pipe.send(True)
        cpu_after, passed_after = pipe.recv()
        pipe.send(False)
        gigabytes = (passed_after - passed) / 1e9
        print(
            f"{os.cpu_count()} CPUs: {(cpu_after - cpu) / gigabytes:.1f} CPU-s/GB, {1000 * gigabytes / took:.0f} MB/s"
        )
        nursery.cancel_scope.cancel()


async def echo(remote: PeerId, request: bytes) -> bytes:
    return request


if __name__ == "__main__":
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    trio.run(measure, ours, int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    process.join()
