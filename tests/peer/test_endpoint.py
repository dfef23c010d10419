from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import msgspec
import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.connection import ConnectionLimits
from swarm_peer.endpoint import Endpoint
from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.errors import (
    AddressInUse,
    Banned,
    ConnectionRefused,
    ConnectTimedOut,
    DeadlineExpired,
    DialledSelf,
    Disconnected,
    PeerError,
    Refusal,
    Unreachable,
    WrongIdentity,
)
from swarm_peer.frames import FrameType, encode_frame
from swarm_peer.identity import Identity, PeerId
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.rpc import Method, PartSender, Priority, RequestHeader
from swarm_peer.tcp import TlsTransport
from swarm_peer.transport import Channel, Transport

MB = 1 << 20


class Number(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    value: int


DOUBLE = Method("double", Number, Number, priority=Priority.CONTROL)
CHUNK = Method("chunk", Number, bytes, max_reply_bytes=16 * MB, priority=Priority.BULK)
SLEEP = Method("sleep", Number, Number)
PARTS = Method("parts", Number, bytes, max_reply_bytes=64 * MB, priority=Priority.BULK)


async def double(remote: PeerId, request: Number) -> Number:
    return Number(2 * request.value)


async def chunk(remote: PeerId, request: Number) -> bytes:
    return bytes(request.value)


async def sleep(remote: PeerId, request: Number) -> Number:
    await trio.sleep(request.value)
    return request


async def parts(remote: PeerId, request: Number, sender: PartSender) -> None:
    for index in range(request.value):
        await sender.send(bytes([index % 256]) * 100_000)


def identity(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def run_virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(36000):
            await scenario()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))


def run_real(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await scenario()

    trio.run(bounded)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Other tasks change counters, which have no events: give them the turns, but not for ever."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Swarm:
    """Endpoints that answer the methods above. In memory on hosts "host-N", or over TLS on loopback."""

    def __init__(self, nursery: trio.Nursery, network: MemoryNetwork | None) -> None:
        self.nursery = nursery
        self.network = network

    def transport(self, number: int) -> Transport:
        if self.network is not None:
            return self.network.transport(identity(number), f"host-{number}")
        return TlsTransport(identity(number))

    async def start(
        self, number: int, *, limits: EndpointLimits | None = None, listens: bool = True
    ) -> tuple[Endpoint, Contact]:
        endpoint = Endpoint(identity(number), self.transport(number), limits=limits)
        endpoint.handle(DOUBLE, double)
        endpoint.handle(CHUNK, chunk)
        endpoint.handle(SLEEP, sleep)
        endpoint.handle_stream(PARTS, parts)
        bound = await self.nursery.start(endpoint.run, [Address("127.0.0.1", 0)] if listens else [])
        return endpoint, Contact(endpoint.peer_id, tuple(bound))


@asynccontextmanager
async def swarm(network: MemoryNetwork | None = None) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        yield Swarm(nursery, network)
        nursery.cancel_scope.cancel()


def in_memory(latency_s: float = 0.05) -> MemoryNetwork:
    return MemoryNetwork(link=Link(latency_s=latency_s))


def test_calls_over_tls_share_one_connection_both_ways() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            alice, alice_contact = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            results: list[int] = []

            async def one(caller: Endpoint, to: Contact, value: int) -> None:
                results.append((await caller.call(to, DOUBLE, Number(value))).value)

            async with trio.open_nursery() as nursery:
                for value in range(50):
                    nursery.start_soon(one, alice, bob_contact, value)
            # Bob needs no address to answer on the connection that he has.
            await bob.call(Contact(alice.peer_id, ()), DOUBLE, Number(1))
            await bob.call(alice_contact, DOUBLE, Number(1))
            assert sorted(results) == [2 * value for value in range(50)]
            assert alice.stats.connections == bob.stats.connections == 1
            assert alice.stats.calls == 50
            assert bob.stats.calls == 2
            assert alice.connected() == [bob.peer_id]
            assert not alice.stats.dropped
            assert not bob.stats.dropped
            reply = await alice.call(bob_contact, CHUNK, Number(5 * MB), deadline_s=20)
            assert reply == bytes(5 * MB)
            assert alice.stats.bytes_received > 5 * MB
            assert bob.stats.bytes_sent > 5 * MB
            before = bob.stats
            await alice.aclose()
            await wait_until(lambda: not bob.stats.connections)
            assert bob.stats.bytes_sent >= before.bytes_sent, "what closed connections moved stays counted"

    run_real(scenario)


def test_streams_over_tls() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            alice, _ = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            received = bytearray()
            async with alice.stream(bob_contact, PARTS, Number(60), deadline_s=20) as incoming:
                async for part in incoming:
                    received += part
            assert received == b"".join(bytes([index]) * 100_000 for index in range(60))
            async with alice.stream(bob_contact, PARTS, Number(600), deadline_s=20) as incoming:
                async for _ in incoming:
                    break
            assert (await alice.call(bob_contact, DOUBLE, Number(4))).value == 8
            assert bob.stats.bytes_sent < 20 * MB

    run_real(scenario)


def test_a_streams_deadline_covers_all_of_it() -> None:
    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            alice, _ = await peers.start(1)
            _, bob_contact = await peers.start(2)
            start = trio.current_time()

            async def take_slowly() -> None:
                async with alice.stream(bob_contact, PARTS, Number(600), deadline_s=7) as incoming:
                    async for _ in incoming:
                        await trio.sleep(1)

            with pytest.raises(DeadlineExpired):
                await take_slowly()
            assert trio.current_time() == pytest.approx(start + 7)

    run_virtual(scenario)


def test_simultaneous_dials_leave_one_connection_and_lose_no_call() -> None:
    async def scenario() -> None:
        for latency_s in (0.0, 0.01, 0.1):
            for first, second in ((1, 2), (2, 1)):
                async with swarm(in_memory(latency_s)) as peers:
                    alice, alice_contact = await peers.start(first)
                    bob, bob_contact = await peers.start(second)

                    async def calls(caller: Endpoint, to: Contact, delay_s: float) -> None:
                        await trio.sleep(delay_s)
                        for value in range(100):
                            assert (await caller.call(to, DOUBLE, Number(value))).value == 2 * value
                            await trio.sleep(0.01)

                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(calls, alice, bob_contact, 0.0)
                        nursery.start_soon(calls, bob, alice_contact, 0.0)
                        nursery.start_soon(calls, bob, alice_contact, latency_s * 3.9)
                    await trio.sleep(10)
                    assert alice.stats.connections == bob.stats.connections == 1
                    assert not alice.stats.dropped
                    assert not bob.stats.dropped

    run_virtual(scenario)


def test_simultaneous_dials_over_tls() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            everyone = [await peers.start(number) for number in range(1, 6)]

            async def call_all(caller: Endpoint) -> None:
                for _ in range(3):
                    for other, contact in everyone:
                        if other is not caller:
                            await caller.call(contact, DOUBLE, Number(1), deadline_s=20)

            async with trio.open_nursery() as nursery:
                for endpoint, _ in everyone:
                    nursery.start_soon(call_all, endpoint)
            await wait_until(lambda: all(endpoint.stats.connections == 4 for endpoint, _ in everyone))
            for endpoint, _ in everyone:
                assert not endpoint.stats.dropped

    run_real(scenario)


def test_a_closed_connection_is_dialled_again() -> None:
    async def scenario() -> None:
        network = in_memory()
        async with swarm(network) as peers:
            alice, _ = await peers.start(1)
            _, bob_contact = await peers.start(2)
            await alice.call(bob_contact, DOUBLE, Number(1))
            await trio.sleep(200)
            assert alice.stats.connections == 0, "a quiet connection is closed"
            await alice.call(bob_contact, DOUBLE, Number(1))
            network.crash("host-2")
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ConnectionRefused):
                await alice.call(bob_contact, DOUBLE, Number(1))
            _, bob_contact = await peers.start(2)
            await alice.call(bob_contact, DOUBLE, Number(1))

    run_virtual(scenario)


def test_a_remote_that_dies_fails_the_call_at_once() -> None:
    async def scenario() -> None:
        network = in_memory()
        async with swarm(network) as peers:
            alice, _ = await peers.start(1)
            _, bob_contact = await peers.start(2)

            async def kill() -> None:
                await trio.sleep(3)
                network.crash("host-2")

            peers.nursery.start_soon(kill)
            start = trio.current_time()
            with pytest.raises(Disconnected):
                await alice.call(bob_contact, SLEEP, Number(100), deadline_s=200)
            assert trio.current_time() - start == pytest.approx(3, abs=0.1)

    run_virtual(scenario)


def test_a_restarted_peer_is_not_kept_waiting_for_its_old_connection() -> None:
    async def scenario() -> None:
        for first, second in ((1, 2), (2, 1)):
            network = in_memory()
            async with swarm(network) as peers:
                alice, alice_contact = await peers.start(first)
                _, bob_contact = await peers.start(second)
                await alice.call(bob_contact, DOUBLE, Number(1))
                await trio.sleep(20)
                network.partition({f"host-{first}"}, {f"host-{second}"})  # Alice hears nothing of the end
                network.crash(f"host-{second}", silent=True)
                network.restart(f"host-{second}")
                network.heal()
                replacement = Endpoint(identity(second), network.transport(identity(second), "elsewhere"))
                replacement.handle(DOUBLE, double)
                await peers.nursery.start(replacement.run, [Address("", 0)])
                await replacement.call(alice_contact, DOUBLE, Number(1))
                await alice.call(bob_contact, DOUBLE, Number(1))

    run_virtual(scenario)


def test_deadlines_tell_connecting_from_answering() -> None:
    async def scenario() -> None:
        network = in_memory()
        async with swarm(network) as peers:
            alice, _ = await peers.start(1)
            _, bob_contact = await peers.start(2)
            start = trio.current_time()
            with pytest.raises(DeadlineExpired, match="sleep"):
                await alice.call(bob_contact, SLEEP, Number(100), deadline_s=3)
            assert trio.current_time() - start == pytest.approx(3)
            network.crash("host-2", silent=True)
            _, carol_contact = await peers.start(3)
            network.crash("host-3", silent=True)
            with pytest.raises(ConnectTimedOut, match="no connection within"):
                await alice.call(carol_contact, DOUBLE, Number(1), deadline_s=2)
            with pytest.raises(ConnectTimedOut):
                await alice.call(carol_contact, DOUBLE, Number(1), deadline_s=60)

    run_virtual(scenario)


class CountingTransport:
    """Passes everything on, and counts dials."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.dials = 0

    @property
    def drops(self) -> Counter[str]:
        return self.inner.drops

    async def dial(
        self, address: Address, expected: PeerId | None, deadline_s: float, *, is_lane: bool = False
    ) -> Channel:
        self.dials += 1
        return await self.inner.dial(address, expected, deadline_s, is_lane=is_lane)

    async def serve(
        self,
        addresses: Sequence[Address],
        on_channel: Callable[[Channel], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        await self.inner.serve(addresses, on_channel, task_status=task_status)


def test_calls_that_need_the_same_connection_share_the_dial() -> None:
    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            transport = CountingTransport(peers.transport(1))
            alice = Endpoint(identity(1), transport)
            await peers.nursery.start(alice.run, [])
            _, bob_contact = await peers.start(2)
            errors: list[PeerError] = []

            async def one(contact: Contact, deadline_s: float) -> None:
                try:
                    await alice.call(contact, DOUBLE, Number(1), deadline_s=deadline_s)
                except PeerError as error:
                    errors.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, bob_contact, 0.01)  # gives up, which does not spoil it for the others
                for _ in range(10):
                    nursery.start_soon(one, bob_contact, 5.0)
            assert transport.dials == 1
            assert [type(error) for error in errors] == [ConnectTimedOut]
            errors.clear()
            nobody = Contact(b"x" * 32, (Address("host-2", 1),))
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(one, nobody, 5.0)
            assert transport.dials == 2
            assert len({id(error) for error in errors}) == 10
            assert {type(error) for error in errors} == {ConnectionRefused}

    run_virtual(scenario)


def test_the_first_address_that_works_is_used() -> None:
    async def scenario() -> None:
        network = in_memory()
        async with swarm(network) as peers:
            alice, alice_contact = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            network.transport(identity(9), "dead")
            network.crash("dead", silent=True)
            wrong = Address("host-1", alice_contact.addresses[0].port)
            addresses = (Address("dead", 1), Address("host-2", 1), wrong, *bob_contact.addresses)
            _, carol_contact = await peers.start(3)
            carol, _ = await peers.start(4)
            start = trio.current_time()
            await carol.call(Contact(bob.peer_id, addresses), DOUBLE, Number(1))
            assert trio.current_time() - start < 1.2
            assert carol.stats.connections == 1
            nobody = Contact(b"x" * 32, (Address("host-2", 1), Address("dead", 1)))
            with pytest.raises(ConnectionRefused):
                await alice.call(nobody, DOUBLE, Number(1), deadline_s=30)
            with pytest.raises(WrongIdentity):
                await alice.call(Contact(b"x" * 32, carol_contact.addresses), DOUBLE, Number(1))

    run_virtual(scenario)


def test_what_cannot_be_dialled_says_why() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            alice, contact = await peers.start(1)
            with pytest.raises(DialledSelf, match="our own peer id"):
                await alice.call(contact, DOUBLE, Number(1))
            with pytest.raises(DialledSelf):
                await alice.identify(contact.addresses[0])
            with pytest.raises(Unreachable, match="no address"):
                await alice.call(Contact(b"x" * 32, ()), DOUBLE, Number(1))
            _, bob_contact = await peers.start(2)
            with pytest.raises(WrongIdentity):
                await alice.call(Contact(b"x" * 32, bob_contact.addresses), DOUBLE, Number(1))
            with pytest.raises(ValueError, match="request of"):
                await alice.call(bob_contact, Method("big", bytes, bytes, max_request_bytes=9), b"0123456789")

    run_real(scenario)


def test_identify_finds_out_and_keeps_the_connection() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            alice, _ = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            assert await alice.identify(bob_contact.addresses[0]) == bob.peer_id
            await alice.call(Contact(bob.peer_id, ()), DOUBLE, Number(1))
            assert alice.stats.connections == 1
            await bob.aclose()
            with pytest.raises(ConnectionRefused):
                await alice.identify(bob_contact.addresses[0])

    run_real(scenario)


def test_a_busy_port_and_a_closed_endpoint_are_said_plainly() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            _, contact = await peers.start(1)
            other = Endpoint(identity(2), TlsTransport(identity(2)))
            with pytest.raises(Disconnected, match="does not run"):
                await other.call(contact, DOUBLE, Number(1))
            with pytest.raises(AddressInUse, match=str(contact.addresses[0].port)):
                await other.run(contact.addresses)
            with pytest.raises(RuntimeError, match="runs once"):
                await other.run([])
            await other.aclose()
            endpoint, _ = await peers.start(3)
            with pytest.raises(ValueError, match="has a handler"):
                endpoint.handle(DOUBLE, double)

    run_real(scenario)


def test_closing_fails_calls_under_way_on_both_ends() -> None:
    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            alice, _ = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            failed: list[str] = []

            async def caller() -> None:
                with pytest.raises(Disconnected) as raised:
                    await alice.call(bob_contact, SLEEP, Number(100), deadline_s=1000)
                failed.append(str(raised.value))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(caller)
                await trio.sleep(5)
                await bob.aclose()
            assert failed == [f"peer {bob.peer_id.hex()[:8]} closed the connection"]

    run_virtual(scenario)


def test_a_banned_peer_gets_nowhere_until_the_ban_ends() -> None:
    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            alice, alice_contact = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            await alice.call(bob_contact, DOUBLE, Number(1))
            alice.ban(bob.peer_id, "sent\nrubbish", 100)
            with pytest.raises(Banned, match="rubbish"):
                await alice.call(bob_contact, DOUBLE, Number(1))
            with pytest.raises(Banned):
                await alice.identify(bob_contact.addresses[0])
            with pytest.raises(Disconnected, match="banned"):
                await bob.call(alice_contact, DOUBLE, Number(1))
            assert alice.stats.dropped["banned"] == 1
            assert alice.stats.dropped["refused-banned"] >= 1
            await trio.sleep(100)
            await bob.call(alice_contact, DOUBLE, Number(1))
            await alice.call(bob_contact, DOUBLE, Number(1))

    run_virtual(scenario)


def test_incoming_connections_are_capped_and_quiet_ones_make_room() -> None:
    async def scenario() -> None:
        limits = EndpointLimits(max_inbound=3, connection=ConnectionLimits(idle_s=10_000))
        async with swarm(in_memory()) as peers:
            server, contact = await peers.start(100, limits=limits)
            clients = [(await peers.start(number, listens=False))[0] for number in range(1, 6)]
            for client in clients[:3]:
                peers.nursery.start_soon(partial(client.call, contact, SLEEP, Number(50), deadline_s=100))
            await trio.sleep(1)
            with pytest.raises(Disconnected, match="no room for another connection"):
                await clients[3].call(contact, DOUBLE, Number(1))
            assert server.stats.dropped["full"] == 1
            await trio.sleep(60)
            await clients[4].call(contact, DOUBLE, Number(1))
            await trio.sleep(10)
            assert server.stats.connections == 3

    run_virtual(scenario)


def test_incoming_connections_per_host_are_capped() -> None:
    async def scenario() -> None:
        network = in_memory()
        async with swarm(network) as peers:
            server, contact = await peers.start(100, limits=EndpointLimits(max_inbound_per_host=2))
            for number in (1, 2, 3):
                who = identity(number)
                client = Endpoint(who, network.transport(who, "one-house"))
                await peers.nursery.start(client.run, [])
                if number < 3:
                    await client.call(contact, DOUBLE, Number(1))
                else:
                    with pytest.raises(Disconnected, match="no room"):
                        await client.call(contact, DOUBLE, Number(1))
            assert server.stats.dropped["full"] == 1

    run_virtual(scenario)


def test_lanes_over_tls_belong_to_the_same_peers_and_leave_the_first_connection_alone() -> None:
    async def scenario() -> None:
        async with swarm() as peers:
            alice, _ = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            await alice.call(bob_contact, DOUBLE, Number(1))

            async def take(lane: int) -> None:
                async with alice.stream(bob_contact, PARTS, Number(20), lane=lane) as received:
                    assert sum([len(part) async for part in received]) == 2_000_000

            async with trio.open_nursery() as nursery:
                for lane in (1, 2, 3, 3, 3):
                    nursery.start_soon(take, lane)
            assert alice.stats.connections == bob.stats.connections == 4
            assert alice.connected() == [bob.peer_id]
            assert bob.connected() == [alice.peer_id]
            # Calls of either side stay on the first connection, and a ban ends all of them.
            await bob.call(Contact(alice.peer_id, ()), DOUBLE, Number(1))
            bob.ban(alice.peer_id, "test", 60)
            await wait_until(lambda: not bob.stats.connections and not alice.stats.connections)

    run_real(scenario)


def test_a_lane_of_a_stranger_or_one_too_many_is_refused() -> None:
    async def scenario() -> None:
        network = in_memory()
        async with swarm(network) as peers:
            alice, _ = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            stranger = network.transport(identity(3), "host-3")
            channel = await stranger.dial(bob_contact.addresses[0], bob.peer_id, 5.0, is_lane=True)
            assert await channel.stream.receive_some() == encode_frame(FrameType.BYE, 0, b"\x02")
            await channel.stream.aclose()
            await alice.call(bob_contact, DOUBLE, Number(1))
            for lane in range(1, 9):
                async with alice.stream(bob_contact, PARTS, Number(1), lane=lane) as received:
                    assert [len(part) async for part in received]
            with pytest.raises(Disconnected, match="no room"):
                async with alice.stream(bob_contact, PARTS, Number(1), lane=9) as received:
                    await anext(aiter(received))
            await alice.call(bob_contact, DOUBLE, Number(1))

    run_virtual(scenario)


def test_a_dial_beyond_the_connections_closes_a_quiet_one_or_says_why_not() -> None:
    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            alice, _ = await peers.start(1, limits=EndpointLimits(max_connections=2))
            contacts = [(await peers.start(number))[1] for number in range(2, 6)]
            for contact in contacts:
                await alice.call(contact, DOUBLE, Number(1))
            await trio.sleep(10)
            assert alice.stats.connections == 2
            async with trio.open_nursery() as nursery:
                for contact in contacts[:2]:
                    nursery.start_soon(partial(alice.call, contact, SLEEP, Number(100), deadline_s=200))
                await trio.sleep(20)
                with pytest.raises(Unreachable, match="all 2 connections of this peer are in use"):
                    await alice.call(contacts[2], DOUBLE, Number(1), deadline_s=30)

    run_virtual(scenario)


# A chaos peer: authenticated, and hostile.


def frame_open(stream_id: int, header: bytes, *, fin: bool = True) -> bytes:
    return encode_frame(FrameType.OPEN, stream_id, header, fin=fin)


DOUBLE_HEADER = msgspec.msgpack.encode(RequestHeader("double", 5000, 2))
CHUNK_HEADER = msgspec.msgpack.encode(RequestHeader("chunk", 5000, 6))
CHUNK_BODY = msgspec.msgpack.encode(Number(16 * MB))
ATTACKS: dict[str, tuple[bytes, str | None]] = {
    "garbage": (b"\xff" * 1000, "unknown-frame"),
    "random": (b"\x00" + os.urandom(100_000), "unknown-frame"),
    "oversize": (struct.pack("!BBHII", 3, 0, 0, 1, 2**32 - 1), "oversized-frame"),
    "huge header": (struct.pack("!BBHII", 1, 0, 0, 1, 2000) + b"x" * 2000, "oversized-frame"),
    "ping flood": (encode_frame(FrameType.PING, 0, b"01234567") * 100_000, "flood"),
    "open flood": (b"".join(frame_open(n, DOUBLE_HEADER, fin=False) for n in range(1, 1001, 2)), "too-many-streams"),
    "rapid reset": (
        b"".join(
            frame_open(n, DOUBLE_HEADER, fin=False) + encode_frame(FrameType.RESET, n, b"\0\1")
            for n in range(1, 20_001, 2)
        ),
        "flood",
    ),
    "credit overrun": (
        frame_open(1, DOUBLE_HEADER, fin=False) + encode_frame(FrameType.DATA, 1, bytes(256 * 1024)) * 10,
        "body-overrun",
    ),
    "bad header": (frame_open(1, b"\xdd\xff\xff\xff\xff"), "malformed-header"),
    "deep nesting": (frame_open(1, b"\x91" * 1000), "malformed-header"),
    "reads nothing": (
        b"".join(
            frame_open(n, CHUNK_HEADER, fin=False) + encode_frame(FrameType.DATA, n, CHUNK_BODY, fin=True)
            for n in range(1, 21, 2)
        ),
        None,
    ),
    "hang up midway": (frame_open(1, DOUBLE_HEADER)[:-3], None),
    "nothing": (b"", None),
}


def test_a_chaos_peer_leaves_everybody_else_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def attack(address: Address, number: int, data: bytes) -> None:
        channel = await TlsTransport(identity(number)).dial(address, None, 10.0)
        try:
            with trio.move_on_after(2):
                await channel.stream.send_all(data)
                await trio.sleep(0.05)
        except trio.BrokenResourceError:
            pass
        await channel.stream.aclose()

    async def scenario() -> None:
        async with swarm() as peers:
            server, contact = await peers.start(1)
            client, _ = await peers.start(2, listens=False)
            attacks_over = False
            served = 0

            async def honest() -> None:
                nonlocal served
                while not attacks_over:
                    assert (await client.call(contact, DOUBLE, Number(served))).value == 2 * served
                    served += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(honest)
                async with trio.open_nursery() as attackers:
                    for number, (data, _) in enumerate(ATTACKS.values(), start=1000):
                        attackers.start_soon(attack, contact.addresses[0], number, data)
                attacks_over = True
            await wait_until(lambda: server.stats.connections == 1)
            assert served, "every call succeeded; how many fit in beside the attacks is a matter of the machine"
            dropped = server.stats.dropped
            expected = Counter(reason for _, reason in ATTACKS.values() if reason)
            assert {reason: dropped[reason] for reason in expected} == dict(expected)
            assert dropped["banned"] == expected.total(), "a violation earns a ban"
            assert not dropped["crash"]
            attacker = Endpoint(identity(1000), TlsTransport(identity(1000)))
            await peers.nursery.start(attacker.run, [])
            with pytest.raises(Disconnected, match="has banned this peer"):
                await attacker.call(contact, DOUBLE, Number(1))
            assert (await client.call(contact, DOUBLE, Number(1))).value == 2

    run_real(scenario)
    assert "protocol violation" in caplog.text


def test_a_peer_that_says_no_is_no_reason_to_ban() -> None:
    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            alice, _ = await peers.start(1)
            bob, bob_contact = await peers.start(2)
            for _ in range(100):
                with pytest.raises(Refusal, match="unknown-method"):
                    await alice.call(bob_contact, Method("none", Number, Number), Number(1))
            assert not bob.stats.dropped
            assert bob.stats.connections == 1

    run_virtual(scenario)


def test_an_idle_endpoint_does_nothing_between_probes() -> None:
    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    async def scenario() -> None:
        async with swarm(in_memory()) as peers:
            alice, _ = await peers.start(1)
            _, bob_contact = await peers.start(2)
            await alice.call(bob_contact, DOUBLE, Number(1))
            await trio.sleep(1)
            steps = Steps()
            trio.lowlevel.add_instrument(steps)
            await trio.sleep(13)
            assert steps.count <= 2, "nothing polls"
            await trio.sleep(20)
            assert steps.count < 60, "one probe and its answer"
            trio.lowlevel.remove_instrument(steps)

    run_virtual(scenario)


@pytest.mark.parametrize(("host", "is_refused"), [("8.8.8.8", True), ("10.0.0.9", False)])
def test_after_a_violation_the_public_address_waits_too(host: str, is_refused: bool) -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        alice = Endpoint(identity(1), network.transport(identity(1), "10.0.0.1"))
        other = Endpoint(identity(3), network.transport(identity(3), host))
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(alice.run, [Address("10.0.0.1", 4000)])
            await nursery.start(other.run, [])
            channel = await network.transport(identity(2), host).dial(address, None, 5.0)
            await channel.stream.send_all(bytes([255]) * 12)
            while await channel.stream.receive_some():
                pass
            contact = Contact(alice.peer_id, (address,))
            alice.handle(DOUBLE, double)
            with pytest.raises(Disconnected, match="banned") if is_refused else nullcontext():
                assert await other.call(contact, DOUBLE, Number(2)) == Number(4)
            await trio.sleep(600)
            assert await other.call(contact, DOUBLE, Number(2)) == Number(4)
            nursery.cancel_scope.cancel()

    run_virtual(scenario)
