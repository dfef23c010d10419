"""One live connection: two trio tasks that drive a `Mux`, and one task per request being served.

The connection ends as a whole and only once: whatever goes wrong in it becomes its one end reason, every call
under way fails with it, and nothing but cancellation leaves `run`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import trio

from swarm_peer.errors import DeadlineExpired, Disconnected, PeerError, ProtocolError, Refusal
from swarm_peer.identity import short
from swarm_peer.mux import (
    ByeCode,
    Ended,
    Event,
    Headed,
    Mux,
    MuxLimits,
    Opened,
    Received,
    ResetCode,
    SaidBye,
    WasReset,
)
from swarm_peer.rpc import (
    MAX_DEADLINE_MS,
    Handler,
    Method,
    Priority,
    ReplyHeader,
    RequestHeader,
    StreamHandler,
    decode_body,
    decode_header,
    encode_body,
)
from swarm_peer.transport import Channel

logger = logging.getLogger("swarm_peer")

_MIN_OUTPUT_BYTES = 16 * 1024
_MAX_OUTPUT_BYTES = 256 * 1024
# A reply this small is left to the connection; for a larger one the handler's task waits, so that the deadline
# also bounds how long its bytes are kept for a slow reader.
_SMALL_REPLY_BYTES = 64 * 1024
_MAX_PART_BACKLOG_BYTES = 512 * 1024
_MAX_SHORT_FRAMES_WAITING = 512
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one connection. `request_memory_bytes` is for bodies of requests that are arriving."""

    mux: MuxLimits = field(default_factory=MuxLimits)
    idle_s: float = 60.0
    goodbye_s: float = 5.0
    request_memory_bytes: int = 32 * 1024 * 1024


class MemoryBudget:
    """Bytes of bodies that an endpoint holds for strangers, over all connections: requests that arrive, replies
    that wait to be read."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes

    def take(self, size_bytes: int) -> bool:
        """False, and nothing is taken, if so much is not left."""
        if size_bytes > self._left:
            return False
        self._left -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        self._left += size_bytes


class NotOpened(Disconnected):
    """The connection closed before the call went out, so it may be repeated on another one."""


class Registered(NamedTuple):
    """A method and who answers it."""

    method: Method[Any, Any]
    handler: Handler[Any, Any] | None
    stream_handler: StreamHandler[Any] | None


@dataclass(slots=True, eq=False)
class _Pending:
    """A call of ours. `max_bytes` bounds the reply."""

    max_bytes: int
    is_streamed: bool
    head: ReplyHeader | None = None
    pieces: deque[bytes] = field(default_factory=deque)
    size: int = 0
    has_ended: bool = False
    error: PeerError | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def end(self, error: PeerError | None = None) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.error = self.error or error
            self.changed.set()


@dataclass(slots=True, eq=False)
class _Serving:
    """A request of the remote's."""

    header: RequestHeader
    registered: Registered
    scope: trio.CancelScope
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    complete: trio.Event = field(default_factory=trio.Event)
    progressed: trio.Event = field(default_factory=trio.Event)
    is_headed: bool = False
    budgeted: int = 0


class Connection:
    """One end of a connection over an authenticated channel."""

    def __init__(
        self,
        channel: Channel,
        *,
        is_dialer: bool,
        handlers: Mapping[str, Registered],
        drops: Counter[str],
        budget: MemoryBudget,
        limits: ConnectionLimits,
    ) -> None:
        now = trio.current_time()
        self.channel = channel
        self.is_dialer = is_dialer
        self.since = now
        self._handlers = handlers
        self._drops = drops
        self._budget = budget
        self._limits = limits
        self._mux = Mux(is_dialer=is_dialer, now=now, limits=limits.mux)
        self._calls: dict[int, _Pending] = {}
        self._serving: dict[int, _Serving] = {}
        self._request_memory = 0
        self._last_active = now
        self._bye_at: float | None = None
        self._remote_bye: int | None = None
        self._last_word = ByeCode.SHUTDOWN
        self._end: PeerError | None = None
        self._nursery: trio.Nursery | None = None
        self._wake = trio.Event()
        self._flushed = trio.Event()
        self._is_mid_send = False
        self._is_writable = True
        self._pace = _Pace()
        # Half of the streams are kept free of bulk, so that bulk never delays the opening of a small call.
        half = limits.mux.max_streams // 2
        self._bulk_slots = trio.Semaphore(half)
        self._slots = trio.Semaphore(limits.mux.max_streams - half)

    @property
    def is_usable(self) -> bool:
        """Whether new calls may use it."""
        return self._end is None and self._is_writable and self._mux.can_open

    @property
    def is_quiet(self) -> bool:
        """Whether no call is under way."""
        return not self._mux.stream_count

    @property
    def last_active(self) -> float:
        """When a call last began or ended."""
        return self._last_active

    # Calls of ours.

    async def call(self, method: Method[Any, Any], body: bytes, deadline: float) -> bytes:
        """The reply body. Leaving early, by cancellation or at `deadline`, resets the stream."""
        async with self._opened(method, body, deadline, is_streamed=False) as (_, pending):
            while not pending.has_ended:
                await pending.changed.wait()
            if pending.error is not None:
                raise pending.error
            return b"".join(pending.pieces)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: Method[Any, Any], body: bytes, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The reply as parts, as they arrive; the sender waits when they are not taken."""
        async with self._opened(method, body, deadline, is_streamed=True) as (stream_id, pending):
            yield _Parts(self, stream_id, pending)

    async def _next_part(self, stream_id: int, pending: _Pending) -> bytes | None:
        await trio.lowlevel.checkpoint()
        while not pending.pieces:
            if pending.has_ended:
                if pending.error is not None:
                    raise pending.error
                return None
            pending.changed = trio.Event()
            await pending.changed.wait()
        piece = pending.pieces.popleft()
        self._mux.grant(stream_id, len(piece))
        self._wake_writer()
        return piece

    @contextlib.asynccontextmanager
    async def _opened(
        self, method: Method[Any, Any], body: bytes, deadline: float, *, is_streamed: bool
    ) -> AsyncIterator[tuple[int, _Pending]]:
        slots = self._bulk_slots if method.priority is Priority.BULK else self._slots
        async with slots:
            while self.is_usable and self._mux.short_frames_waiting > _MAX_SHORT_FRAMES_WAITING:
                await self._flushed.wait()
            if not self.is_usable:
                raise NotOpened(f"the connection to {short(self.channel.remote)} is closing")
            left_ms = min(max(deadline - trio.current_time(), 0.001) * 1000, MAX_DEADLINE_MS)
            header = RequestHeader(method.name, int(left_ms), len(body))
            stream_id = self._mux.open(msgspec.msgpack.encode(header), method.priority)
            self._mux.send(stream_id, body, fin=True)
            pending = self._calls[stream_id] = _Pending(method.max_reply_bytes, is_streamed)
            self._last_active = trio.current_time()
            self._wake_writer()
            try:
                yield stream_id, pending
            finally:
                del self._calls[stream_id]
                self._last_active = trio.current_time()
                self._mux.reset(stream_id, ResetCode.CANCELLED)  # does nothing if it has ended
                self._wake_writer()

    # Life.

    def close(self, code: ByeCode) -> None:
        """Says goodbye: no new calls; the connection closes when those under way have ended."""
        if self._bye_at is None:
            self._bye_at = trio.current_time()
            self._mux.say_bye(code)
            self._wake.set()

    def abort(self, code: ByeCode, reason: str) -> None:
        """Ends the connection now; calls under way fail."""
        self._last_word = code
        self._finish(Disconnected(reason))

    async def run(self) -> PeerError:
        """Serves until the connection has ended; returns why. Closes the channel."""
        try:
            if self._end is None:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._guard, self._read)
                    nursery.start_soon(self._guard, self._write)
        finally:
            end = self._end = self._end or Disconnected("this peer is shutting down")
            for pending in self._calls.values():
                pending.end(_fresh(end))
            self._flushed.set()
            await self._say_last_words(end)
        return end

    async def _guard(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except PeerError as error:
            self._finish(error)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._finish(Disconnected(str(error) or "the connection broke"))
        except Exception as error:
            logger.exception("the connection to %s failed", short(self.channel.remote))
            self._drops["crash"] += 1
            self._finish(Disconnected(f"internal error: {type(error).__name__}"))

    def _finish(self, end: PeerError) -> None:
        if self._end is None:
            self._end = end
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def refuse(self, code: ByeCode) -> None:
        """In place of `run`: says goodbye and closes once the remote has, so that it gets to read why."""
        self._end = Disconnected("refused")
        stream = self.channel.stream
        with (
            trio.move_on_after(_LAST_WORDS_S),
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await stream.send_all(self._mux.last_words(code))
            # Closing with bytes unread would reset the connection and could overtake the goodbye.
            while await stream.receive_some():
                pass
        await self._say_last_words(self._end)

    async def _say_last_words(self, end: PeerError) -> None:
        """Tells the remote why, if the link takes it at once, and closes."""
        code = ByeCode.VIOLATION if isinstance(end, ProtocolError) else self._last_word
        with trio.CancelScope(shield=True):
            with (
                trio.move_on_after(_LAST_WORDS_S),
                contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
            ):
                if not self._is_mid_send and (words := self._mux.last_words(code)):
                    await self.channel.stream.send_all(words)
            with trio.move_on_after(_LAST_WORDS_S):
                await self.channel.stream.aclose()

    # Reading.

    async def _read(self) -> None:
        while True:
            data = await self.channel.stream.receive_some()
            if not data:
                raise Disconnected(self._describe_close())
            for event in self._mux.receive(data, trio.current_time()):
                self._on_event(event)
            if self._mux.has_output or self._mux.bye_received:
                self._wake.set()

    def _describe_close(self) -> str:
        remote = short(self.channel.remote)
        match self._remote_bye:
            case ByeCode.FULL:
                return f"peer {remote} has no room for another connection; try another peer"
            case ByeCode.BANNED:
                return f"peer {remote} has banned this peer for now"
            case ByeCode.VIOLATION:
                return f"peer {remote} saw a protocol violation; both sides should run the same version"
            case None:
                return f"peer {remote} closed the connection without a goodbye"
        return f"peer {remote} closed the connection"

    def _on_event(self, event: Event) -> None:
        match event:
            case Received(stream_id, data):
                if (pending := self._calls.get(stream_id)) is not None:
                    self._on_reply_bytes(stream_id, pending, data)
                elif (serving := self._serving.get(stream_id)) is not None:
                    serving.size += len(data)
                    if serving.size > serving.header.body_bytes:
                        raise ProtocolError("body-overrun")
                    serving.pieces.append(data)
                    self._mux.grant(stream_id, len(data))
            case Opened(stream_id, header):
                self._on_request(stream_id, decode_header(RequestHeader, header))
            case Headed(stream_id, header):
                if (pending := self._calls.get(stream_id)) is not None:
                    self._on_reply(stream_id, pending, decode_header(ReplyHeader, header))
            case Ended(stream_id):
                self._last_active = trio.current_time()
                if (pending := self._calls.get(stream_id)) is not None:
                    if pending.head is not None and pending.size < pending.head.body_bytes:
                        raise ProtocolError("body-underrun")
                    pending.end()
                elif (serving := self._serving.get(stream_id)) is not None:
                    if serving.size < serving.header.body_bytes:
                        raise ProtocolError("body-underrun")
                    serving.complete.set()
            case WasReset(stream_id, code):
                self._last_active = trio.current_time()
                if (pending := self._calls.get(stream_id)) is not None:
                    pending.end(_reset_error(code))
                elif (serving := self._serving.get(stream_id)) is not None:
                    serving.scope.cancel()
            case SaidBye(code):
                self._remote_bye = code
                if code in (ByeCode.FULL, ByeCode.BANNED, ByeCode.VIOLATION):
                    raise Disconnected(self._describe_close())  # nothing under way will be answered

    def _on_reply(self, stream_id: int, pending: _Pending, head: ReplyHeader) -> None:
        pending.head = head
        if head.code:
            pending.error = Refusal(head.code, head.detail)
        elif head.body_bytes > pending.max_bytes:
            self._fail_oversized(stream_id, pending, head.body_bytes)
        elif head.body_bytes < 0 and not pending.is_streamed:
            raise ProtocolError("malformed-header", "a streamed reply to a plain call")

    def _on_reply_bytes(self, stream_id: int, pending: _Pending, data: bytes) -> None:
        assert pending.head is not None, "the mux lets no DATA before HEAD through"
        pending.size += len(data)
        if 0 <= pending.head.body_bytes < pending.size:
            raise ProtocolError("body-overrun")
        if pending.size > pending.max_bytes:
            self._fail_oversized(stream_id, pending, pending.size)
            return
        pending.pieces.append(data)
        if pending.is_streamed:
            pending.changed.set()
        else:
            self._mux.grant(stream_id, len(data))

    def _fail_oversized(self, stream_id: int, pending: _Pending, size: int) -> None:
        self._drops["oversized-reply"] += 1
        self._mux.reset(stream_id, ResetCode.OVERSIZED)
        pending.end(ProtocolError("oversized-reply", f"{size} bytes, at most {pending.max_bytes} are taken"))

    # Serving.

    def _on_request(self, stream_id: int, header: RequestHeader) -> None:
        self._last_active = trio.current_time()
        registered = self._handlers.get(header.method)
        if registered is None:
            self._refuse(stream_id, Refusal("unknown-method", header.method))
            return
        limit = registered.method.max_request_bytes
        if header.body_bytes > limit:
            self._drops["oversized-request"] += 1
            self._refuse(stream_id, Refusal("oversized-request", f"at most {limit} bytes are taken"))
            return
        # Handlers whose stream was reset may still be cleaning up: they count, too.
        if (
            len(self._serving) >= 2 * self._limits.mux.max_streams
            or self._request_memory + header.body_bytes > self._limits.request_memory_bytes
            or not self._budget.take(header.body_bytes)
        ):
            self._drops["busy"] += 1
            self._refuse(stream_id, Refusal("busy", "too many requests under way"))
            return
        assert self._nursery is not None
        scope = trio.CancelScope(deadline=trio.current_time() + header.deadline_ms / 1000)
        serving = self._serving[stream_id] = _Serving(header, registered, scope, budgeted=header.body_bytes)
        self._request_memory += header.body_bytes
        self._nursery.start_soon(self._serve, stream_id, serving)

    async def _serve(self, stream_id: int, serving: _Serving) -> None:
        try:
            with serving.scope:
                await serving.complete.wait()
                await self._answer(stream_id, serving)
            if serving.scope.cancelled_caught:
                self._mux.reset(stream_id, ResetCode.DEADLINE)  # does nothing if the caller reset it
        except Exception as error:
            refusal = _as_refusal(error)
            if refusal is None:
                self._drops["handler-crash"] += 1
                logger.error("the handler of %s failed", serving.header.method, exc_info=error)
                refusal = Refusal("internal", "the handler failed; its log says why")
            if serving.is_headed:
                self._mux.reset(stream_id, ResetCode.FAILED)
            else:
                self._refuse(stream_id, refusal)
        finally:
            del self._serving[stream_id]
            self._request_memory -= serving.header.body_bytes
            self._budget.give_back(serving.budgeted)
            self._last_active = trio.current_time()
            self._wake_writer()

    async def _answer(self, stream_id: int, serving: _Serving) -> None:
        method, handler, stream_handler = serving.registered
        try:
            request = decode_body(method.request, b"".join(serving.pieces))
        except ProtocolError as error:
            self._drops[error.reason] += 1
            raise Refusal("malformed-request", error.detail) from None
        serving.pieces.clear()
        remote = self.channel.remote
        if handler is not None:
            body = encode_body(method.reply, await handler(remote, request))
            if len(body) > method.max_reply_bytes:
                raise ValueError(f"reply of {len(body)} bytes, {method.max_reply_bytes} are allowed")
            if not self._budget.take(len(body)):
                self._drops["busy"] += 1
                raise Refusal("busy", "too many replies wait to be read")
            serving.budgeted += len(body)
            self._send_head(stream_id, serving, ReplyHeader("", "", len(body)))
            self._mux.send(stream_id, body, fin=True)
            self._wake_writer()
            if len(body) <= _SMALL_REPLY_BYTES:
                return
        else:
            assert stream_handler is not None
            sender = _Sender(self, stream_id, serving)
            await stream_handler(remote, request, sender)
            self._send_head(stream_id, serving, ReplyHeader("", "", -1))
            self._mux.send(stream_id, b"", fin=True)
            self._wake_writer()
        while self._mux.is_sending(stream_id):
            await self._wait_for_progress(serving)

    def _send_head(self, stream_id: int, serving: _Serving, header: ReplyHeader) -> None:
        if not serving.is_headed:
            serving.is_headed = True
            self._mux.answer(stream_id, msgspec.msgpack.encode(header), serving.registered.method.priority)

    def _refuse(self, stream_id: int, refusal: Refusal) -> None:
        header = ReplyHeader(refusal.code, refusal.detail, 0)
        self._mux.answer(stream_id, msgspec.msgpack.encode(header), Priority.CONTROL)
        self._mux.send(stream_id, b"", fin=True)

    async def _wait_for_progress(self, serving: _Serving) -> None:
        serving.progressed = trio.Event()
        await serving.progressed.wait()

    # Writing.

    def _wake_writer(self) -> None:
        if self._mux.has_output:
            self._wake.set()

    async def _write(self) -> None:
        while True:
            now = trio.current_time()
            self._mux.tick(now)
            if self._is_over(now):
                raise Disconnected(self._describe_close() if self._mux.bye_received else "closed")
            if self._mux.has_output:
                await self._send_some(now)
                continue
            self._wake = trio.Event()
            with trio.move_on_at(self._next_deadline(now)):
                await self._wake.wait()

    async def _send_some(self, started: float) -> None:
        stream = self.channel.stream
        with trio.move_on_after(self._limits.mux.keepalive_timeout_s) as scope:
            # Choosing what to send only when the link can take it is what makes priorities work.
            await stream.wait_send_all_might_not_block()
            output = self._mux.next_output(self._pace.output_bytes)
            if output.data:
                self._is_mid_send = True
                try:
                    await stream.send_all(output.data)
                except trio.BrokenResourceError:
                    # The remote has closed. What it said before may still be on its way to the reader.
                    self._is_writable = False
                    await trio.sleep(_LAST_WORDS_S)
                    raise
                self._is_mid_send = False
                self._pace.sent(len(output.data), trio.current_time() - started)
            for stream_id in output.progressed:
                if (serving := self._serving.get(stream_id)) is not None:
                    serving.progressed.set()
            self._flushed.set()
            self._flushed = trio.Event()
        if scope.cancelled_caught:
            raise Disconnected("the remote does not read what we send")

    def _is_over(self, now: float) -> bool:
        """Whether all is said. Says goodbye when it is time to."""
        if self._mux.stream_count or self._mux.has_output:
            return False
        if self._mux.bye_received:
            if self._mux.bye_sent:
                return True
            self.close(ByeCode.SHUTDOWN)
        elif self._bye_at is not None:
            return now >= self._bye_at + self._limits.goodbye_s
        elif now >= self._last_active + self._limits.idle_s:
            self.close(ByeCode.IDLE)
        return False

    def _next_deadline(self, now: float) -> float:
        if self._bye_at is not None:
            end = self._bye_at + self._limits.goodbye_s
        else:
            end = self._last_active + self._limits.idle_s
        if end <= now:  # calls are under way; look again when they may have ended
            end = now + min(self._limits.goodbye_s, self._limits.idle_s)
        return min(self._mux.next_tick, end)


class _Sender:
    """What a streaming handler writes to."""

    def __init__(self, connection: Connection, stream_id: int, serving: _Serving) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._serving = serving
        self._left = serving.registered.method.max_reply_bytes

    async def send(self, part: bytes | bytearray | memoryview) -> None:
        connection = self._connection
        self._left -= len(part)
        if self._left < 0:
            raise ValueError("the streamed reply is larger than its method allows")
        connection._send_head(self._stream_id, self._serving, ReplyHeader("", "", -1))
        connection._mux.send(self._stream_id, bytes(part), fin=False)
        connection._wake_writer()
        await trio.lowlevel.checkpoint()
        while connection._mux.output_bytes(self._stream_id) > _MAX_PART_BACKLOG_BYTES:
            await connection._wait_for_progress(self._serving)


class _Parts:
    """The parts of a streamed reply, in order."""

    def __init__(self, connection: Connection, stream_id: int, pending: _Pending) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._pending = pending

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        part = await self._connection._next_part(self._stream_id, self._pending)
        if part is None:
            raise StopAsyncIteration
        return part


class _Pace:
    """How much to send at a time: about 10 ms of what the link takes, so that urgent frames wait little."""

    def __init__(self) -> None:
        self.output_bytes = 4 * _MIN_OUTPUT_BYTES
        self._s_per_byte: float | None = None

    def sent(self, size: int, elapsed_s: float) -> None:
        if size < _MIN_OUTPUT_BYTES:
            return
        # Averaging times, not rates, lets the first slow frame outweigh all that only filled a buffer.
        latest = max(elapsed_s, 1e-5) / size
        self._s_per_byte = latest if self._s_per_byte is None else 0.7 * self._s_per_byte + 0.3 * latest
        self.output_bytes = int(min(max(0.01 / self._s_per_byte, _MIN_OUTPUT_BYTES), _MAX_OUTPUT_BYTES))


def _fresh(end: PeerError) -> PeerError:
    """The end of the connection as an error of one call: an exception object is raised in one place only."""
    if isinstance(end, ProtocolError):
        return ProtocolError(end.reason, end.detail)
    return Disconnected(str(end))


def _reset_error(code: int) -> PeerError:
    match code:
        case ResetCode.DEADLINE:
            return DeadlineExpired("the deadline expired at the remote")
        case ResetCode.FAILED:
            return Refusal("internal", "the remote's handler failed midway")
    return Disconnected("the remote ended the call early")


def _as_refusal(error: Exception) -> Refusal | None:
    """The refusal that a handler raised, also from within a nursery of its own."""
    if isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        return _as_refusal(error.exceptions[0])
    return error if isinstance(error, Refusal) else None
