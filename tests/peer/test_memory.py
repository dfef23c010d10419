from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import (
    AddressInUse,
    ConnectionRefused,
    ConnectTimedOut,
    DialledSelf,
    PeerError,
    Unreachable,
    WrongIdentity,
)
from swarm_peer.identity import Identity
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.rpc import Method
from swarm_peer.transport import Channel

ECHO = Method("echo", bytes, bytes)


def identity(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


ALICE, BOB = identity(1), identity(2)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def connected(network: MemoryNetwork) -> AsyncIterator[tuple[Channel, Channel]]:
    """Alice's and Bob's ends of a channel."""
    send, receive = trio.open_memory_channel[Channel](1)

    async def on_channel(channel: Channel) -> None:
        await send.send(channel)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        transport = network.transport(BOB, "bob")
        (address,) = await nursery.start(transport.serve, [Address("0.0.0.0", 0)], on_channel)
        ours = await network.transport(ALICE, "alice").dial(address, BOB.peer_id, 60.0)
        yield ours, await receive.receive()
        nursery.cancel_scope.cancel()


async def ignore(channel: Channel) -> None:
    await trio.lowlevel.checkpoint()


async def read(channel: Channel, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await channel.stream.receive_some()
        if not piece:
            break
        data += piece
    return data


def test_bytes_arrive_in_order_after_the_latency() -> None:
    async def scenario() -> None:
        async with connected(MemoryNetwork(link=Link(latency_s=0.2, jitter_s=0.1))) as (alice, bob):
            assert (alice.remote, bob.remote) == (BOB.peer_id, ALICE.peer_id)
            start = trio.current_time()
            for index in range(100):
                await alice.stream.send_all(bytes([index]))
            assert trio.current_time() == start, "a send does not wait for the far end"
            assert await read(bob, 100) == bytes(range(100))
            assert start + 0.2 <= trio.current_time() <= start + 0.31
            assert alice.bytes_sent == bob.bytes_received == 100

    run(scenario)


def test_bandwidth_is_kept_to() -> None:
    async def scenario() -> None:
        async with connected(MemoryNetwork(link=Link(bandwidth_bytes_per_s=1e6))) as (alice, bob):
            start = trio.current_time()

            async def send() -> None:
                for _ in range(30):
                    await alice.stream.wait_send_all_might_not_block()
                    await alice.stream.send_all(bytes(100_000))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await read(bob, 3_000_000)
            assert trio.current_time() - start == pytest.approx(3.0, abs=0.01)

    run(scenario)


def test_a_far_end_that_does_not_read_stops_the_sender() -> None:
    async def scenario() -> None:
        async with connected(MemoryNetwork()) as (alice, bob):
            sent = 0
            with trio.move_on_after(10):
                while True:
                    await alice.stream.send_all(bytes(1 << 20))
                    sent += 1
            assert sent < 10
            await read(bob, 1 << 20)
            with trio.fail_after(1):
                await alice.stream.wait_send_all_might_not_block()

    run(scenario)


def test_closing_ends_the_far_end_after_what_was_sent() -> None:
    async def scenario() -> None:
        async with connected(MemoryNetwork(link=Link(latency_s=0.1))) as (alice, bob):
            await alice.stream.send_all(b"last words")
            await alice.stream.aclose()
            await alice.stream.aclose()
            assert await read(bob, 100) == b"last words"
            assert await bob.stream.receive_some() == b""
            with pytest.raises(trio.BrokenResourceError):
                await bob.stream.send_all(b"too late")
            with pytest.raises(trio.ClosedResourceError):
                await alice.stream.send_all(b"")
            with pytest.raises(trio.ClosedResourceError):
                await alice.stream.receive_some()

    run(scenario)


def test_dialling_fails_as_on_a_real_network() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.1))
        alice = network.transport(ALICE, "alice")
        async with connected(network):
            bob = Address("bob", 20000)
            with pytest.raises(Unreachable):
                await alice.dial(Address("nowhere", 1), None, 10)
            with pytest.raises(ConnectionRefused):
                await alice.dial(Address("bob", 1), None, 10)
            with pytest.raises(WrongIdentity):
                await alice.dial(bob, identity(9).peer_id, 10)
            with pytest.raises(DialledSelf):
                await network.transport(BOB, "bob2").dial(bob, None, 10)
            with pytest.raises(AddressInUse):
                await network.transport(ALICE, "bob").serve([bob], ignore)
            start = trio.current_time()
            network.partition({"alice"}, {"bob"})
            with pytest.raises(ConnectTimedOut):
                await alice.dial(bob, None, 10)
            assert trio.current_time() == start + 10
            network.heal()
            network.crash("bob")
            with pytest.raises(ConnectionRefused):
                await alice.dial(bob, None, 10)
            network.crash("alice")
            with pytest.raises(Unreachable, match="down"):
                await alice.dial(bob, None, 10)

    run(scenario)


def test_a_crash_resets_and_a_silent_one_just_falls_silent() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with connected(network) as (alice, bob):
            network.crash("bob", silent=True)
            await alice.stream.send_all(b"hello?")
            with trio.move_on_after(100) as scope:
                await bob.stream.receive_some()
            assert scope.cancelled_caught
            network.restart("bob")
            assert await bob.stream.receive_some() == b"hello?"
            network.crash("bob")
            with pytest.raises(trio.BrokenResourceError):
                await alice.stream.receive_some()
            with pytest.raises(trio.BrokenResourceError):
                await bob.stream.send_all(b"x")

    run(scenario)


def test_a_partition_holds_bytes_back_until_it_heals() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with connected(network) as (alice, bob):
            network.partition({"alice", "carol"}, {"bob"})
            await alice.stream.send_all(b"a")
            await bob.stream.send_all(b"b")
            with trio.move_on_after(5) as scope:
                await bob.stream.receive_some()
            assert scope.cancelled_caught
            network.heal()
            assert await bob.stream.receive_some() == b"a"
            assert await alice.stream.receive_some() == b"b"

    run(scenario)


def test_lost_dials_are_a_share_of_all() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(seed=5, link=Link(dial_loss=0.3))
        async with connected(MemoryNetwork()):
            pass
        async with trio.open_nursery() as nursery:
            bob = network.transport(BOB, "bob")
            (address,) = await nursery.start(bob.serve, [Address("bob", 0)], ignore)
            alice = network.transport(ALICE, "alice")
            lost = 0
            for _ in range(300):
                try:
                    await (await alice.dial(address, None, 1.0)).stream.aclose()
                except ConnectTimedOut:
                    lost += 1
            assert 60 < lost < 120
            nursery.cancel_scope.cancel()

    run(scenario)


@contextmanager
def deterministic_scheduling(seed: int) -> Iterator[None]:
    """Trio shuffles its run queue on purpose; this makes the shuffle repeat."""
    scheduler: Any = trio._core._run
    state = scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = False
        scheduler._r.setstate(state)


def swarm(peers: int, hours: float, seed: int) -> list[tuple[float, int, str]]:
    """Peers that call random others every ten minutes or so while hosts crash; the log of all that happened."""
    log: list[tuple[float, int, str]] = []

    async def scenario() -> None:
        rng = Random(seed)
        network = MemoryNetwork(seed=seed, link=Link(latency_s=0.04, jitter_s=0.02, dial_loss=0.02))
        start = trio.current_time()

        async def echo(remote: bytes, request: bytes) -> bytes:
            return request

        async with trio.open_nursery() as nursery:
            contacts: list[Contact] = []
            endpoints: list[Endpoint] = []
            for number in range(peers):
                who = identity(number + 1)
                endpoint = Endpoint(who, network.transport(who, f"host-{number}"))
                endpoint.handle(ECHO, echo)
                bound = await nursery.start(endpoint.run, [Address("", 4000)])
                endpoints.append(endpoint)
                contacts.append(Contact(who.peer_id, tuple(bound)))

            async def live(number: int, rng: Random) -> None:
                while True:
                    await trio.sleep(rng.uniform(300, 900))
                    other = rng.randrange(peers)
                    try:
                        await endpoints[number].call(contacts[other], ECHO, bytes([number % 256]))
                        result = "ok"
                    except PeerError as error:
                        result = type(error).__name__
                    log.append((round(trio.current_time() - start, 6), number, result))

            for number in range(peers):
                nursery.start_soon(live, number, Random(rng.random()))
            await trio.sleep(hours * 1800)
            for number in range(0, peers, 10):
                network.crash(f"host-{number}", silent=number % 20 == 0)
            await trio.sleep(hours * 1800)
            nursery.cancel_scope.cancel()

    with deterministic_scheduling(seed):
        trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
    return log


def test_hundreds_of_endpoints_live_for_hours_in_seconds() -> None:
    start = time.perf_counter()
    log = swarm(peers=200, hours=1.0, seed=1)
    results = [result for _, _, result in log]
    assert results.count("ok") > 800
    assert {"ConnectTimedOut", "ConnectionRefused", "Unreachable"} <= set(results)
    print(f"{len(log)} calls in {time.perf_counter() - start:.1f} s")


def test_a_seed_repeats_everything() -> None:
    first = swarm(peers=20, hours=0.5, seed=3)
    assert first == swarm(peers=20, hours=0.5, seed=3)
    assert first != swarm(peers=20, hours=0.5, seed=4)
