from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address
from swarm_peer.calling import NotOpened
from swarm_peer.connection import Connection, ConnectionLimits
from swarm_peer.errors import DeadlineExpired, Disconnected, PeerError, ProtocolError, Refusal
from swarm_peer.frames import FrameType, encode_frame
from swarm_peer.identity import Identity, PeerId
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.mux_events import ByeCode, MuxLimits
from swarm_peer.pacing import MemoryBudget
from swarm_peer.rpc import Method, PartSender, Priority, ReplyHeader, RequestHeader
from swarm_peer.serving import Registered, Shared
from swarm_peer.transport import Channel

ALICE = Identity.from_seed(b"alice".ljust(32))
BOB = Identity.from_seed(b"bob".ljust(32))
MB = 1 << 20


class Number(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    value: int


DOUBLE = Method("double", Number, Number, priority=Priority.CONTROL)
ECHO = Method("echo", bytes, bytes, max_request_bytes=8 * MB, max_reply_bytes=8 * MB)
BULK = Method("bulk", Number, bytes, max_reply_bytes=64 * MB, priority=Priority.BULK)
TINY = Method("tiny", bytes, bytes, max_request_bytes=10, max_reply_bytes=10)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(3600):
            await scenario()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))


class Pair:
    """Two connected ends: `alice` has dialled, `bob` serves what `handle` registers."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery, limits: ConnectionLimits) -> None:
        self.network = network
        self.shared = Shared(MemoryBudget(70 * MB))
        self.handlers = self.shared.handlers
        self.drops = self.shared.drops
        self.ends: dict[str, PeerError] = {}
        self.alice: Connection
        self.bob: Connection
        self._nursery = nursery
        self._limits = limits

    async def connect(self) -> None:
        accepted, channel = await channels(self.network, self._nursery)
        self.alice = self.start("alice", channel, is_dialer=True)
        self.bob = self.start("bob", accepted, is_dialer=False)

    def start(self, name: str, channel: Channel, *, is_dialer: bool) -> Connection:
        connection = Connection(channel, is_dialer=is_dialer, shared=self.shared, limits=self._limits)

        async def keep() -> None:
            self.ends[name] = await connection.run()

        self._nursery.start_soon(keep)
        return connection

    def handle(self, method: Method[Any, Any], handler: Callable[[PeerId, Any], Awaitable[Any]]) -> None:
        self.handlers[method.name] = Registered(method, handler, None)

    async def call(self, method: Method[Any, Any], body: bytes, within_s: float = 60.0) -> bytes:
        return await self.alice.call(method, body, trio.current_time() + within_s)


async def channels(network: MemoryNetwork, nursery: trio.Nursery) -> tuple[Channel, Channel]:
    """Bob's and Alice's ends of a new channel."""
    send, receive = trio.open_memory_channel[Channel](1)

    async def on_channel(channel: Channel) -> None:
        await send.send(channel)
        await trio.sleep_forever()

    serve = network.transport(BOB, "bob").serve
    (address,) = await nursery.start(serve, [Address("bob", 0)], on_channel)
    channel = await network.transport(ALICE, "alice").dial(address, BOB.peer_id, 10.0)
    return await receive.receive(), channel


@asynccontextmanager
async def connected(link: Link | None = None, limits: ConnectionLimits | None = None) -> AsyncIterator[Pair]:
    async with trio.open_nursery() as nursery:
        pair = Pair(MemoryNetwork(link=link or Link(latency_s=0.05)), nursery, limits or ConnectionLimits())
        await pair.connect()
        yield pair
        nursery.cancel_scope.cancel()


async def double(remote: PeerId, request: Number) -> Number:
    return Number(2 * request.value)


async def echo(remote: PeerId, request: bytes) -> bytes:
    return request


async def bulk(remote: PeerId, request: Number) -> bytes:
    return bytes(request.value)


def number(value: int) -> bytes:
    return msgspec.msgpack.encode(Number(value))


def test_calls_are_answered_to_the_one_who_asked() -> None:
    async def whoami(remote: PeerId, request: bytes) -> bytes:
        return remote[:8]

    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(DOUBLE, double)
            pair.handle(TINY, whoami)
            assert await pair.call(DOUBLE, number(21)) == number(42)
            assert await pair.call(TINY, b"") == ALICE.peer_id[:8]
            answer = await pair.bob.call(TINY, b"", trio.current_time() + 5)
            assert answer == BOB.peer_id[:8], "the acceptor calls over the same connection"

    run(scenario)


@pytest.mark.parametrize("size", [0, 1, 65536, MB, 8 * MB])
def test_bodies_of_any_size_pass_both_ways(size: int) -> None:
    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(ECHO, echo)
            body = bytes(range(256)) * (size // 256) + bytes(size % 256)
            assert await pair.call(ECHO, body) == body

    run(scenario)


def test_many_calls_share_the_connection() -> None:
    async def slow(remote: PeerId, request: Number) -> Number:
        await trio.sleep(1.0)
        return Number(request.value + 1)

    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(DOUBLE, slow)
            results: dict[int, bytes] = {}

            async def one(value: int) -> None:
                results[value] = await pair.call(DOUBLE, number(value))

            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                for value in range(32):
                    nursery.start_soon(one, value)
            assert trio.current_time() - start == pytest.approx(1.1, abs=0.01)
            assert results == {value: number(value + 1) for value in range(32)}
            # More than there are streams: the rest waits its turn, nothing breaks.
            async with trio.open_nursery() as nursery:
                for value in range(200):
                    nursery.start_soon(one, value)
            assert len(results) == 200
            assert not pair.drops

    run(scenario)


def test_urgent_calls_stay_quick_beside_bulk() -> None:
    async def scenario() -> None:
        link = Link(latency_s=0.025, bandwidth_bytes_per_s=2.5e6)
        async with connected(link) as pair, trio.open_nursery() as nursery:
            pair.handle(DOUBLE, double)
            pair.handle(BULK, bulk)
            await pair.call(DOUBLE, number(1))
            done = trio.Event()

            async def download() -> None:
                assert len(await pair.call(BULK, number(25 * MB))) == 25 * MB
                done.set()

            nursery.start_soon(download)
            await trio.sleep(1.0)
            latencies: list[float] = []
            while not done.is_set():
                start = trio.current_time()
                await pair.call(DOUBLE, number(1))
                latencies.append(trio.current_time() - start)
                await trio.sleep(0.1)
            assert len(latencies) > 30
            # A round trip is 50 ms; a frame under way adds 10 ms or so, a queue of the whole body would add 10 s.
            assert sorted(latencies)[len(latencies) // 2] < 0.08
            assert max(latencies) < 0.12

    run(scenario)


def test_an_upload_limit_holds_back_bulk_and_nothing_else() -> None:
    async def scenario() -> None:
        async with connected(Link(latency_s=0.02)) as pair:
            pair.shared.upload.bytes_per_s = 1e6
            pair.handle(BULK, bulk)
            pair.handle(DOUBLE, double)
            start = trio.current_time()
            sizes: list[int] = []

            async def download() -> None:
                sizes.append(len(await pair.call(BULK, number(2_500_000))))

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(download)
                for _ in range(20):
                    before = trio.current_time()
                    await pair.call(DOUBLE, number(1))
                    assert trio.current_time() - before == pytest.approx(0.04, abs=0.001)
                    await trio.sleep(0.1)
            assert sizes == [2_500_000] * 2
            assert trio.current_time() - start == pytest.approx(5.0, abs=0.1)
            pair.shared.upload.bytes_per_s = None
            start = trio.current_time()
            await download()
            assert trio.current_time() - start < 0.5

    run(scenario)


def test_a_deadline_ends_the_call_and_its_handler() -> None:
    async def scenario() -> None:
        async with connected() as pair:
            ended: list[float] = []

            async def stuck(remote: PeerId, request: bytes) -> bytes:
                try:
                    await trio.sleep_forever()
                finally:
                    ended.append(trio.current_time())
                raise AssertionError

            pair.handle(TINY, stuck)
            start = trio.current_time()
            with pytest.raises(DeadlineExpired, match="at the remote"):
                await pair.call(TINY, b"", within_s=2.0)
            assert ended == [pytest.approx(start + 2.05, abs=0.01)]
            assert pair.alice.is_quiet
            assert pair.bob.is_quiet

    run(scenario)


def test_giving_up_cancels_the_handler_at_once() -> None:
    async def scenario() -> None:
        async with connected() as pair:
            ended: list[float] = []

            async def stuck(remote: PeerId, request: bytes) -> bytes:
                try:
                    await trio.sleep_forever()
                finally:
                    ended.append(trio.current_time())
                raise AssertionError

            pair.handle(TINY, stuck)
            pair.handle(DOUBLE, double)
            start = trio.current_time()
            with trio.move_on_after(1.0):
                await pair.call(TINY, b"")
            await pair.call(DOUBLE, number(1))
            assert ended == [pytest.approx(start + 1.05, abs=0.01)]
            assert pair.bob.is_quiet

    run(scenario)


def test_a_handler_says_no() -> None:
    async def no(remote: PeerId, request: bytes) -> bytes:
        async with trio.open_nursery():
            raise Refusal("not-today", "come back\ntomorrow")

    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(TINY, no)
            with pytest.raises(Refusal) as raised:
                await pair.call(TINY, b"")
            assert raised.value.code == "not-today"
            assert raised.value.detail == "come back?tomorrow"
            with pytest.raises(Refusal, match="unknown-method"):
                await pair.call(DOUBLE, number(1))
            assert not pair.drops

    run(scenario)


def test_a_crash_of_a_handler_is_logged_here_and_told_there(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(remote: PeerId, request: bytes) -> bytes:
        raise KeyError("a secret of ours")

    async def too_long(remote: PeerId, request: Number) -> bytes:
        return bytes(65 * MB)

    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(TINY, crash)
            pair.handle(BULK, too_long)
            for method in (TINY, BULK):
                with pytest.raises(Refusal) as raised:
                    await pair.call(method, number(1))
                assert raised.value.code == "internal"
                assert "secret" not in raised.value.detail
            assert pair.drops == {"handler-crash": 2}
            assert pair.alice.is_usable

    run(scenario)
    assert "a secret of ours" in caplog.text


def test_requests_above_the_cap_or_malformed_are_refused() -> None:
    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(TINY, echo)
            pair.handle(DOUBLE, double)
            with pytest.raises(Refusal, match="oversized-request"):
                await pair.call(TINY, bytes(5 * MB))
            for body in (b"", b"\xc1", b"\x91\xa1x", number(1) + b"x", b"\x92\x01\x01", b"\x91" * 10_000):
                with pytest.raises(Refusal, match="malformed-request"):
                    await pair.call(DOUBLE, body)
            assert pair.drops == {"oversized-request": 1, "malformed-body": 6}
            assert await pair.call(TINY, b"fine") == b"fine"

    run(scenario)


def test_a_reply_above_our_cap_is_not_taken() -> None:
    smaller = Method("bulk", Number, bytes, max_reply_bytes=1000)

    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(BULK, bulk)
            pair.handle(DOUBLE, double)
            before = pair.alice.channel.bytes_received
            with pytest.raises(ProtocolError, match="oversized-reply"):
                await pair.call(smaller, number(20 * MB))
            await pair.call(DOUBLE, number(1))
            assert pair.alice.channel.bytes_received - before < 2 * MB, "it was told to stop"
            assert pair.alice.is_usable

    run(scenario)


def test_request_memory_is_bounded() -> None:
    async def scenario() -> None:
        limits = ConnectionLimits(request_memory_bytes=10 * MB)
        async with connected(limits=limits) as pair, trio.open_nursery() as nursery:

            async def slow(remote: PeerId, request: bytes) -> bytes:
                await trio.sleep(10)
                return b""

            pair.handle(ECHO, slow)
            nursery.start_soon(pair.call, ECHO, bytes(8 * MB))
            await trio.sleep(1)
            with pytest.raises(Refusal, match="busy"):
                await pair.call(ECHO, bytes(8 * MB))
            await trio.sleep(20)
            assert await pair.call(ECHO, bytes(8 * MB)) == b""

    run(scenario)


def test_replies_that_wait_are_bounded_and_the_budget_comes_back() -> None:
    async def scenario() -> None:
        async with connected(Link(latency_s=0.05, bandwidth_bytes_per_s=4e6)) as pair:
            pair.handle(BULK, bulk)
            refused = 0

            async def one() -> None:
                nonlocal refused
                try:
                    await pair.call(BULK, number(20 * MB), within_s=600)
                except Refusal as refusal:
                    refused += refusal.code == "busy"

            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    for _ in range(5):
                        nursery.start_soon(one)
            assert refused == 6
            with trio.move_on_after(1):
                await pair.call(BULK, number(60 * MB))
            await trio.sleep(1)
            assert pair.shared.budget.take(70 * MB), "nothing of it has leaked"

    run(scenario)


def test_the_end_of_the_link_fails_calls_at_once() -> None:
    async def stuck(remote: PeerId, request: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def scenario() -> None:
        async with connected() as pair, trio.open_nursery() as nursery:
            pair.handle(TINY, stuck)

            async def kill() -> None:
                await trio.sleep(3)
                pair.network.crash("bob")

            nursery.start_soon(kill)
            start = trio.current_time()
            with pytest.raises(Disconnected):
                await pair.call(TINY, b"")
            assert trio.current_time() - start == pytest.approx(3.0, abs=0.01)
            with pytest.raises(NotOpened):
                await pair.call(TINY, b"")

    run(scenario)


def test_a_dead_link_is_noticed_by_keepalive() -> None:
    async def stuck(remote: PeerId, request: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def scenario() -> None:
        async with connected() as pair:
            pair.handle(TINY, stuck)
            await trio.sleep(50.0)  # quiet, but alive
            assert pair.alice.is_usable
            start = trio.current_time()
            with trio.move_on_after(1):
                await pair.call(TINY, b"")
            pair.network.crash("bob", silent=True)
            with pytest.raises(Disconnected, match="nothing was heard for 45 s"):
                await pair.call(TINY, b"", within_s=300)
            assert 30 < trio.current_time() - start < 50

    run(scenario)


def test_a_partition_shorter_than_the_keepalive_does_no_harm() -> None:
    async def scenario() -> None:
        async with connected() as pair, trio.open_nursery() as nursery:
            pair.handle(ECHO, echo)

            async def heal() -> None:
                await trio.sleep(30)
                pair.network.heal()

            pair.network.partition({"alice"}, {"bob"})
            nursery.start_soon(heal)
            assert await pair.call(ECHO, bytes(3 * MB)) == bytes(3 * MB)

    run(scenario)


def test_quiet_connections_close_with_a_goodbye() -> None:
    async def scenario() -> None:
        async with connected(limits=ConnectionLimits(idle_s=50)) as pair:
            pair.handle(DOUBLE, double)
            for _ in range(4):
                await trio.sleep(40)
                await pair.call(DOUBLE, number(1))
            await trio.sleep(60)
            assert not pair.alice.is_usable
            assert set(pair.ends) == {"alice", "bob"}
            with pytest.raises(NotOpened):
                await pair.call(DOUBLE, number(1))

    run(scenario)


def test_a_goodbye_lets_calls_under_way_end() -> None:
    async def slow(remote: PeerId, request: bytes) -> bytes:
        await trio.sleep(20)
        return b"done"

    async def scenario() -> None:
        async with connected() as pair, trio.open_nursery() as nursery:
            pair.handle(TINY, slow)
            answers: list[bytes] = []

            async def caller() -> None:
                answers.append(await pair.call(TINY, b""))

            nursery.start_soon(caller)
            await trio.sleep(1)
            pair.bob.close(ByeCode.DUPLICATE)
            await trio.sleep(1)
            assert not pair.alice.is_usable
            assert not pair.ends
            await trio.sleep(20)
            assert answers == [b"done"]
            assert set(pair.ends) == {"alice", "bob"}

    run(scenario)


PARTS = Method("parts", Number, bytes, max_reply_bytes=64 * MB, priority=Priority.BULK)


def parts_handler(sent: list[int]) -> Callable[[PeerId, Number, PartSender], Awaitable[None]]:
    async def handler(remote: PeerId, request: Number, sender: PartSender) -> None:
        for index in range(request.value):
            await sender.send(bytes([index % 256]) * 100_000)
            sent.append(index)

    return handler


def test_a_streamed_reply_arrives_whole_and_in_order() -> None:
    async def scenario() -> None:
        async with connected() as pair:
            pair.handlers["parts"] = Registered(PARTS, None, parts_handler([]))
            received = bytearray()
            async with pair.alice.stream(PARTS, number(100), trio.current_time() + 60) as parts:
                async for part in parts:
                    received += part
            assert received == b"".join(bytes([index]) * 100_000 for index in range(100))
            assert pair.alice.is_quiet
            assert pair.bob.is_quiet

    run(scenario)


def test_a_slow_taker_holds_up_the_sender() -> None:
    async def scenario() -> None:
        async with connected() as pair:
            sent: list[int] = []
            pair.handlers["parts"] = Registered(PARTS, None, parts_handler(sent))
            pair.handle(DOUBLE, double)
            async with pair.alice.stream(PARTS, number(500), math.inf) as parts:
                await trio.sleep(100)
                held_at = len(sent)
                assert held_at * 100_000 < 3 * MB
                assert await pair.call(DOUBLE, number(2)) == number(4), "others are not held up"
                taken = 0
                async for part in parts:
                    taken += len(part)
                    if taken > 10 * MB:
                        break
                assert len(sent) > held_at
            await trio.sleep(1)
            assert pair.bob.is_quiet, "leaving the block ends the handler"
            assert len(sent) < 500

    run(scenario)


def test_a_streaming_handler_that_fails_is_told_apart_from_an_end() -> None:
    async def refuse(remote: PeerId, request: Number, sender: PartSender) -> None:
        raise Refusal("no-such-thing")

    async def crash(remote: PeerId, request: Number, sender: PartSender) -> None:
        await sender.send(b"begin")
        raise RuntimeError("midway")

    async def scenario() -> None:
        async with connected() as pair:
            for handler, code in ((refuse, "no-such-thing"), (crash, "internal")):
                pair.handlers["parts"] = Registered(PARTS, None, handler)
                async with pair.alice.stream(PARTS, number(1), math.inf) as parts:
                    with pytest.raises(Refusal, match=code):
                        _ = [part async for part in parts]

    run(scenario)


# A remote that does not keep to the protocol.


def request_frame(
    stream_id: int,
    body: bytes = b"",
    *,
    method: str = "tiny",
    body_bytes: int | None = None,
    deadline_ms: int = 5000,
) -> bytes:
    announced = len(body) if body_bytes is None else body_bytes
    header = msgspec.msgpack.encode(RequestHeader(method, deadline_ms, announced))
    data = encode_frame(FrameType.DATA, stream_id, body, fin=True) if body else b""
    return encode_frame(FrameType.OPEN, stream_id, header, fin=not body) + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff" * 100, "unknown-frame"),
        (encode_frame(FrameType.OPEN, 1, b"\xc1"), "malformed-header"),
        (request_frame(1, b"123", body_bytes=2), "body-overrun"),
        (request_frame(1, b"123", body_bytes=4), "body-underrun"),
        (request_frame(1, b"", body_bytes=4), "body-underrun"),
        (b"".join(encode_frame(FrameType.PING, 0, b"flooding") for _ in range(5000)), "flood"),
        (
            b"".join(
                encode_frame(FrameType.OPEN, n, msgspec.msgpack.encode(RequestHeader("tiny", 5000, 5)))
                for n in range(1, 131, 2)
            ),
            "too-many-streams",
        ),
    ],
)
def test_a_violation_ends_the_connection_and_is_named(data: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            pair = Pair(MemoryNetwork(), nursery, ConnectionLimits())
            accepted, raw = await channels(pair.network, nursery)
            pair.handle(TINY, echo)
            pair.bob = pair.start("bob", accepted, is_dialer=False)
            await raw.stream.send_all(data)
            last = b""
            try:
                while piece := await raw.stream.receive_some():
                    last = (last + piece)[-13:]
            except trio.BrokenResourceError:
                pass
            await trio.testing.wait_all_tasks_blocked()
            end = pair.ends["bob"]
            assert isinstance(end, ProtocolError)
            assert end.reason == reason
            assert last == encode_frame(FrameType.BYE, 0, bytes([ByeCode.VIOLATION]))
            nursery.cancel_scope.cancel()

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (encode_frame(FrameType.HEAD, 1, b"\xc1"), "malformed-header"),
        (encode_frame(FrameType.HEAD, 1, msgspec.msgpack.encode(ReplyHeader("", "", -1))), "malformed-header"),
        (encode_frame(FrameType.HEAD, 1, msgspec.msgpack.encode(ReplyHeader("", "", 5)), fin=True), "body-underrun"),
        (
            encode_frame(FrameType.HEAD, 1, msgspec.msgpack.encode(ReplyHeader("", "", 5)))
            + encode_frame(FrameType.DATA, 1, b"123456"),
            "body-overrun",
        ),
    ],
)
def test_a_server_that_breaks_the_protocol_fails_the_call(answer: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            pair = Pair(MemoryNetwork(), nursery, ConnectionLimits())
            raw, channel = await channels(pair.network, nursery)
            pair.alice = pair.start("alice", channel, is_dialer=True)

            async def serve() -> None:
                await raw.stream.receive_some()
                await raw.stream.send_all(answer)

            nursery.start_soon(serve)
            with pytest.raises(ProtocolError, match=reason):
                await pair.call(TINY, b"")
            nursery.cancel_scope.cancel()

    run(scenario)


def test_a_remote_that_does_not_read_is_given_up() -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            pair = Pair(MemoryNetwork(), nursery, ConnectionLimits(mux=MuxLimits(window_bytes=16 * MB)))
            accepted, raw = await channels(pair.network, nursery)
            pair.handle(BULK, bulk)
            pair.start("bob", accepted, is_dialer=False)
            body = number(60 * MB)
            await raw.stream.send_all(request_frame(1, body, method="bulk", deadline_ms=600_000))

            async def stay_alive() -> None:
                while True:
                    await trio.sleep(10)
                    await raw.stream.send_all(encode_frame(FrameType.PING, 0, b"12345678"))

            with pytest.raises(ExceptionGroup):
                async with trio.open_nursery() as inner:
                    inner.start_soon(stay_alive)
            assert "does not read" in str(pair.ends["bob"])
            nursery.cancel_scope.cancel()

    run(scenario)


def test_random_bytes_never_do_more_than_end_the_connection() -> None:
    """The whole driver under mutated conversations: every connection ends with a reason, none with a crash."""
    import random

    rng = random.Random(7)
    honest = b"".join(
        request_frame(n, bytes(rng.randrange(10)), method=rng.choice(("tiny", "double", "none")))
        for n in range(1, 20, 2)
    )

    async def one(number_of_run: int) -> None:
        async with trio.open_nursery() as nursery:
            pair = Pair(MemoryNetwork(), nursery, ConnectionLimits())
            accepted, raw = await channels(pair.network, nursery)
            pair.handle(TINY, echo)
            pair.handle(DOUBLE, double)
            pair.start("bob", accepted, is_dialer=False)
            data = bytearray(honest)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            cut = rng.randrange(len(data))
            try:
                await raw.stream.send_all(data[:cut])
                await raw.stream.send_all(data[cut:])
            except trio.BrokenResourceError:
                pass
            await trio.testing.wait_all_tasks_blocked()
            await raw.stream.aclose()
            await trio.sleep(3)
            assert isinstance(pair.ends["bob"], (ProtocolError, Disconnected))
            assert not pair.drops["crash"]
            assert not pair.drops["handler-crash"]
            nursery.cancel_scope.cancel()

    async def scenario() -> None:
        for index in range(300):
            await one(index)

    run(scenario)
