"""Sockets and rates: how they are divided, and a real peer process that has few of them and many callers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from swarm_peer.addresses import parse_address
from swarm_peer.endpoint import Endpoint
from swarm_peer.frames import FrameDecoder, FrameType
from swarm_peer.identity import Identity
from swarm_peer.mux_events import ByeCode
from swarm_peer.tcp import TlsTransport

from swarmtrain.errors import UserError
from swarmtrain.link_limits import LinkLimits, endpoint_limits


@pytest.mark.parametrize("open_files", [256, 1024, 65536])
def test_connections_and_everything_beside_them_fit_into_the_open_files(open_files: int) -> None:
    endpoint, accept = endpoint_limits(LinkLimits(), open_files)
    inbound = endpoint.max_inbound + endpoint.max_inbound // 8 + 1
    dialled = endpoint.max_connections - endpoint.max_inbound
    assert dialled >= endpoint.max_connections // 4
    assert inbound + dialled + accept.max_unauthenticated + endpoint.max_refusing + 40 <= open_files
    assert endpoint.max_connections >= min(140, open_files // 2)


def test_eight_connections_leave_two_for_dialling() -> None:
    endpoint, accept = endpoint_limits(LinkLimits(max_connections=8), 1024)
    assert (endpoint.max_connections, endpoint.max_inbound, accept.max_unauthenticated) == (8, 6, 4)


@pytest.mark.parametrize(("wanted", "open_files"), [(2000, 1024), (None, 64)])
def test_more_connections_than_open_files_is_said_before_anything_starts(wanted: int | None, open_files: int) -> None:
    with pytest.raises(UserError, match="ulimit -n"):
        endpoint_limits(LinkLimits(max_connections=wanted), open_files)


@contextmanager
def bootstrap_peer(folder: Path, *options: str, open_files: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `swarmtrain bootstrap` of its own process that may open so many files, and its address."""
    command = [sys.executable, "-m", "swarmtrain", "--state", str(folder), "bootstrap", "--json", *options]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files)),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        yield process, msgspec.json.decode(line)["peer"].partition("@")[2]
    finally:
        process.kill()
        process.communicate()


async def knock(address: str, number: int, answers: Counter[int | str], done: trio.Event) -> None:
    """Holds a connection on which it says nothing until the peer says goodbye, or until `done`."""
    transport = TlsTransport(Identity.from_seed(number.to_bytes(32, "big")))
    try:
        channel = await transport.dial(parse_address(address), None, 20.0)
    except Exception as error:
        answers[type(error).__name__] += 1
        return
    decoder = FrameDecoder()
    with trio.CancelScope() as scope:

        async def watch() -> None:
            await done.wait()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                while data := await channel.stream.receive_some():
                    for frame in decoder.feed(data):
                        if frame.type is FrameType.BYE:
                            answers[frame.payload[0]] += 1
            except trio.BrokenResourceError:
                pass
            nursery.cancel_scope.cancel()
    await channel.stream.aclose()


async def besiege(process: subprocess.Popen[str], address: str, callers: int) -> Counter[int | str]:
    """Lets many knock, then sees whether an honest peer is still served. Returns what the many were told."""
    answers: Counter[int | str] = Counter()
    done = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(1, callers + 1):
                nursery.start_soon(knock, address, number, answers, done)
                if number % 4 == 0:
                    await trio.sleep(0.02)
            while not answers[ByeCode.FULL]:  # noqa: ASYNC110 - it comes from another process
                await trio.sleep(0.05)
            done.set()
        honest = Endpoint(identity := Identity.from_seed(bytes(32)), TlsTransport(identity))
        async with trio.open_nursery() as nursery:
            await nursery.start(honest.run, [])
            await honest.identify(parse_address(address))
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert honest.stats.connections == 1
            nursery.cancel_scope.cancel()
    assert process.poll() is None
    return answers


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files of a process in /proc")
@pytest.mark.parametrize(("options", "open_files", "callers"), [([], 256, 220), (["--max-connections", "8"], 1024, 30)])
def test_a_peer_with_few_sockets_stays_up_and_refuses_politely(
    tmp_path: Path, options: list[str], open_files: int, callers: int
) -> None:
    with bootstrap_peer(tmp_path, *options, open_files=open_files) as (process, address):
        answers = trio.run(besiege, process, address, callers)
        assert answers[ByeCode.FULL] > 0
        if options:
            sockets = [
                name
                for name in os.listdir(f"/proc/{process.pid}/fd")
                if os.readlink(f"/proc/{process.pid}/fd/{name}").startswith("socket:")
            ]
            assert len(sockets) <= 8 + 4, "connections, the listener, and what the event loop wakes itself with"
        process.terminate()
        _, errors = process.communicate(timeout=20)
        assert "Traceback" not in errors
        assert "Too many open files" not in errors
        logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
        assert "Too many open files" not in logs
