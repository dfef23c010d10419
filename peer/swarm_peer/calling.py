"""The calls that one side of a connection makes: opening them, and putting their replies together."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from swarm_peer.errors import DeadlineExpired, Disconnected, PeerError, ProtocolError, Refusal
from swarm_peer.mux import Mux
from swarm_peer.mux_events import ResetCode
from swarm_peer.rpc import MAX_DEADLINE_MS, Method, Priority, ReplyHeader, RequestHeader

_MAX_SHORT_FRAMES_WAITING = 512


class NotOpened(Disconnected):
    """The connection closed before the call went out, so it may be repeated on another one."""


@dataclass(slots=True, eq=False)
class Pending:
    """A call under way. `max_bytes` bounds its reply."""

    max_bytes: int
    is_streamed: bool
    head: ReplyHeader | None = None
    pieces: deque[bytes] = field(default_factory=deque)
    size: int = 0
    has_ended: bool = False
    error: PeerError | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def end(self, error: PeerError | None = None) -> None:
        """The reply is complete, or will not come."""
        if not self.has_ended:
            self.has_ended = True
            self.error = self.error or error
            self.changed.set()


class Calls:
    """The calls of one connection. `stir` wakes its writer; `is_usable` says whether new calls may go out."""

    def __init__(
        self, mux: Mux, drops: Counter[str], *, stir: Callable[[], None], is_usable: Callable[[], bool]
    ) -> None:
        self._mux = mux
        self._drops = drops
        self._stir = stir
        self._is_usable = is_usable
        self._pending: dict[int, Pending] = {}
        self._flushed = trio.Event()
        # Half of the streams are kept free of bulk, so that bulk never delays the opening of a small call.
        half = mux.limits.max_streams // 2
        self._bulk_slots = trio.Semaphore(half)
        self._slots = trio.Semaphore(mux.limits.max_streams - half)

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

    async def next_part(self, stream_id: int, pending: Pending) -> bytes | None:
        """The next bytes of a streamed reply, None at its end."""
        await trio.lowlevel.checkpoint()
        while not pending.pieces:
            if pending.has_ended:
                if pending.error is not None:
                    raise pending.error
                return None
            pending.changed = trio.Event()
            await pending.changed.wait()
        piece = pending.pieces.popleft()
        self._mux.grant(stream_id, len(piece), trio.current_time())
        self._stir()
        return piece

    @contextlib.asynccontextmanager
    async def _opened(
        self, method: Method[Any, Any], body: bytes, deadline: float, *, is_streamed: bool
    ) -> AsyncIterator[tuple[int, Pending]]:
        slots = self._bulk_slots if method.priority is Priority.BULK else self._slots
        async with slots:
            while self._is_usable() and self._mux.short_frames_waiting > _MAX_SHORT_FRAMES_WAITING:
                await self._flushed.wait()
            if not self._is_usable():
                raise NotOpened("the connection is closing")
            left_ms = min(max(deadline - trio.current_time(), 0.001) * 1000, MAX_DEADLINE_MS)
            header = RequestHeader(method.name, int(left_ms), len(body))
            stream_id = self._mux.open(msgspec.msgpack.encode(header), method.priority)
            self._mux.send(stream_id, body, fin=True)
            pending = self._pending[stream_id] = Pending(method.max_reply_bytes, is_streamed)
            self._stir()
            try:
                yield stream_id, pending
            finally:
                del self._pending[stream_id]
                self._mux.reset(stream_id, ResetCode.CANCELLED)  # does nothing if it has ended
                self._stir()

    # What the connection reports.

    def find(self, stream_id: int) -> Pending | None:
        """The call of a stream, if it is one of ours and still waited for."""
        return self._pending.get(stream_id)

    def on_head(self, stream_id: int, pending: Pending, head: ReplyHeader) -> None:
        """The reply begins. Its size is checked before a byte of it is kept."""
        pending.head = head
        if head.code:
            pending.error = Refusal(head.code, head.detail)
        elif head.body_bytes > pending.max_bytes:
            self._fail_oversized(stream_id, pending, head.body_bytes)
        elif head.body_bytes < 0 and not pending.is_streamed:
            raise ProtocolError("malformed-header", "a streamed reply to a plain call")

    def on_bytes(self, stream_id: int, pending: Pending, data: bytes) -> None:
        """Bytes of the reply."""
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
            self._mux.grant(stream_id, len(data), trio.current_time())

    def on_end(self, pending: Pending) -> None:
        """The reply ends."""
        if pending.head is not None and pending.size < pending.head.body_bytes:
            raise ProtocolError("body-underrun")
        pending.end()

    def on_reset(self, pending: Pending, code: int) -> None:
        """The remote ended the call early."""
        match code:
            case ResetCode.DEADLINE:
                pending.end(DeadlineExpired("the deadline expired at the remote"))
            case ResetCode.FAILED:
                pending.end(Refusal("internal", "the remote's handler failed midway"))
            case _:
                pending.end(Disconnected("the remote ended the call early"))

    def on_flush(self) -> None:
        """The writer has sent something."""
        self._flushed.set()
        self._flushed = trio.Event()

    def fail(self, end: PeerError) -> None:
        """The connection has ended, and with it every call."""
        for pending in self._pending.values():
            # An exception object is raised in one place only, so each call gets its own.
            if isinstance(end, ProtocolError):
                pending.end(ProtocolError(end.reason, end.detail))
            else:
                pending.end(Disconnected(str(end)))
        self.on_flush()

    def _fail_oversized(self, stream_id: int, pending: Pending, size: int) -> None:
        self._drops["oversized-reply"] += 1
        self._mux.reset(stream_id, ResetCode.OVERSIZED)
        pending.end(ProtocolError("oversized-reply", f"{size} bytes, at most {pending.max_bytes} are taken"))


class _Parts:
    """The parts of a streamed reply, in order."""

    def __init__(self, calls: Calls, stream_id: int, pending: Pending) -> None:
        self._calls = calls
        self._stream_id = stream_id
        self._pending = pending

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        part = await self._calls.next_part(self._stream_id, self._pending)
        if part is None:
            raise StopAsyncIteration
        return part
