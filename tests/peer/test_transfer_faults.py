"""Transfers between real processes that are killed, or fall silent, in the middle."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.blobs import BlobExchange, BlobId, BlobParams, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.identity import Identity
from swarm_peer.tcp import TlsTransport

HOLDER = str(Path(__file__).parent.parent / "lab" / "transfer.py")
SIZE_MB = 8.0
pytestmark = pytest.mark.processes


class Holder:
    """A process that holds the blob."""

    def __init__(self, limit_up: str = "none") -> None:
        command = [sys.executable, HOLDER, "hold", str(SIZE_MB), "", limit_up, "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._said: dict[str, object] | None = None

    @property
    def said(self) -> dict[str, object]:
        if self._said is None:
            assert self.process.stdout is not None
            self._said = json.loads(self.process.stdout.readline())
        return self._said

    @property
    def contact(self) -> Contact:
        port = self.said["port"]
        assert isinstance(port, int)
        return Contact(bytes.fromhex(str(self.said["peer"])), (Address("127.0.0.1", port),))

    @property
    def blob_id(self) -> BlobId:
        return BlobId(bytes.fromhex(str(self.said["blob"])))


@contextmanager
def holders(*limits: str) -> Iterator[list[Holder]]:
    started = [Holder(limit) for limit in limits]
    try:
        yield started
    finally:
        for holder in started:
            holder.process.kill()
            holder.process.communicate()


def run(work: Callable[[Endpoint], Awaitable[None]], limits: EndpointLimits | None = None) -> None:
    async def main() -> None:
        endpoint = Endpoint(identity := Identity.generate(), TlsTransport(identity), limits=limits)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(endpoint.run, [])
                await work(endpoint)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def wait_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - it is about the end of other processes
            await trio.sleep(0.02)


@pytest.mark.parametrize(
    ("blow", "share"),
    [(signal.SIGKILL, 0.1), (signal.SIGKILL, 0.5), (signal.SIGKILL, 0.99), (signal.SIGSTOP, 0.1)],
)
def test_a_donor_that_dies_or_freezes_midway_is_replaced_and_nothing_is_fetched_twice(
    blow: signal.Signals, share: float
) -> None:
    with holders("none", "4000000") as (victim, survivor):

        async def work(endpoint: Endpoint) -> None:
            exchange = BlobExchange(
                endpoint, BlobStore(1 << 26), params=BlobParams(stall_s=2.0, hedge_after_s=0.5, pause_s=0.1)
            )
            struck = False

            def strike(done: int, total: int) -> None:
                nonlocal struck
                if done >= share * total - 256 * 1024 and not struck:
                    struck = True
                    victim.process.send_signal(blow)

            contacts = [victim.contact, survivor.contact]
            data = await exchange.fetch(
                victim.blob_id, contacts, max_size_bytes=1 << 26, deadline_s=50, progress=strike
            )
            assert struck
            assert data == random.Random(0).randbytes(int(SIZE_MB * 1e6))
            assert exchange.stats.fetched_bytes == len(data), "no finished chunk counts twice"
            assert not exchange.stats.corrupt
            assert endpoint.stats.bytes_received < 1.5 * len(data)

        run(work)


JOINERS = """
import os, sys, trio
from swarm_peer.addresses import Contact, parse_address
from swarm_peer.blobs import BlobExchange, BlobId, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity
from swarm_peer.tcp import TlsTransport

async def join(peer, address, blob):
    endpoint = Endpoint(identity := Identity.generate(), TlsTransport(identity))
    exchange = BlobExchange(endpoint, BlobStore(1 << 26))
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, [])
        await exchange.fetch(
            BlobId(bytes.fromhex(blob)), [Contact(bytes.fromhex(peer), (parse_address(address),))],
            max_size_bytes=1 << 26, deadline_s=60,
            progress=lambda done, total: done and print(os.getpid(), flush=True),
        )

for line in sys.stdin:
    if not (child := os.fork()):
        trio.run(join, *line.split())
        os._exit(0)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files of this process in /proc")
def test_twenty_joiners_killed_midway_leave_nothing_behind() -> None:
    data = random.Random(1).randbytes(8_000_000)

    async def main() -> None:
        limits = EndpointLimits(upload_bytes_per_s=4_000_000)  # so that no transfer ends before its joiner does
        endpoint = Endpoint(identity := Identity.generate(), TlsTransport(identity), limits=limits)
        store = BlobStore(1 << 26)
        blob_id = store.put(data)
        BlobExchange(endpoint, store)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                (address,) = await nursery.start(endpoint.run, [Address("127.0.0.1", 0)])
                command = [sys.executable, "-c", JOINERS]
                process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert process.stdin is not None
                assert process.stdout is not None
                order = f"{identity.peer_id.hex()} {address} {blob_id.hex()}\n".encode()
                open_files, peak_kb = 0, 0
                for number in range(20):
                    await process.stdin.send_all(order)
                    heard = b""
                    while b"\n" not in heard:
                        heard += await process.stdout.receive_some()
                    os.kill(int(heard.split(b"\n")[0]), signal.SIGKILL)
                    while b"dead\n" not in heard:
                        heard += await process.stdout.receive_some()
                    if number in (2, 19):  # after the first three, worker threads and caches are there
                        await wait_until(lambda: not endpoint.stats.connections)
                    if number == 2:
                        gc.collect()
                        open_files = len(os.listdir("/proc/self/fd"))
                        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                assert len(os.listdir("/proc/self/fd")) <= open_files
                assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < 32 * 1024
                assert endpoint._shared.budget.take(limits.served_memory_bytes), "all memory was given back"
                process.kill()
                await process.wait()
                nursery.cancel_scope.cancel()

    trio.run(main)
