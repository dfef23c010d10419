"""Many calls on one connection: streams, credit, priorities and keep-alive as a state machine without I/O.

One call is one stream. The caller opens it (OPEN, then DATA, the last with FIN), the other side answers
(HEAD, then DATA, the last with FIN). The answer's end ends the stream, even if the request was not read to
its end.

Invariants
- Each side opens ids of its own parity (the dialer odd), strictly increasing, at most `max_streams` at once.
- Nobody sends more DATA on a stream than the other side granted; `window_bytes` are granted from the start.
- Frames of streams that have ended are ignored: they were under way. Frames of streams that never were end
  the connection.
- What goes out next is chosen when the link can take it: short frames first, then DATA by priority, in turn
  within a priority. A stream without credit never holds up another.

Time is a float of seconds passed in. A violation raises `ProtocolError`; then the connection must be closed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_peer.errors import Disconnected, ProtocolError
from swarm_peer.frames import MAX_DATA_BYTES, Frame, FrameDecoder, FrameType, encode_frame, encode_header
from swarm_peer.mux_events import (
    ByeCode,
    Ended,
    Event,
    Headed,
    MuxLimits,
    Opened,
    Received,
    ResetCode,
    SaidBye,
    WasReset,
)
from swarm_peer.pacing import MAX_WINDOW_BYTES, CreditBudget
from swarm_peer.rpc import Priority

_MAX_STREAM_ID = 2**32 - 1
_MAX_CREDIT_BYTES = 2**31 - 1


class Output(NamedTuple):
    """Bytes to send, and the streams whose queued output shrank by them."""

    data: bytes
    progressed: list[int]


@dataclass(slots=True)
class _Stream:
    is_ours: bool
    priority: Priority
    receive_window: int
    send_window: int
    has_head: bool = False  # HEAD was sent (their stream) or received (our stream)
    is_receiving: bool = True
    is_sending: bool = True  # our FIN is not yet out
    fin_queued: bool = False
    ungranted: int = 0
    extra_credit: int = 0  # beyond the initial window
    granted_at: float = 0.0
    output: deque[memoryview] = field(default_factory=deque)
    output_bytes: int = 0
    in_turn: bool = False

    def can_send(self) -> bool:
        return self.is_sending and (
            (self.send_window > 0 and self.output_bytes > 0) or (self.fin_queued and not self.output_bytes)
        )


class Mux:
    """One end of a connection. Drivers feed `receive`, `tick` and `next_output`."""

    def __init__(
        self,
        *,
        is_dialer: bool,
        now: float,
        limits: MuxLimits | None = None,
        credit: CreditBudget | None = None,
        remote: bytes = b"",
    ) -> None:
        self._credit = credit
        self._remote = remote
        self.measure_rtt: Callable[[], float | None] = lambda: self.rtt_s
        self.limits = limits or MuxLimits()
        self.rtt_s: float | None = None
        self.bye_sent = False
        self.bye_received = False
        self._decoder = FrameDecoder()
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1 if is_dialer else 2
        self._our_parity = 1 if is_dialer else 0
        self._highest_remote_id = 0
        self._remote_streams = 0
        self._short_frames: deque[bytes] = deque()
        self._turns: tuple[deque[int], ...] = tuple(deque() for _ in Priority)
        self._last_received = now
        # One side's probe proves the link to both, so the dialer probes first and the other rarely needs to.
        self._ping_after_s = self.limits.keepalive_interval_s * (1.0 if is_dialer else 4 / 3)
        self._ping_count = 0
        self._ping_sent: float | None = None
        self._resets_left = float(self.limits.reset_burst)
        self._resets_at = now

    # What the local side does. Calls on a stream that has ended are ignored: the remote may have been first.

    @property
    def can_open(self) -> bool:
        """Whether new calls may use this connection."""
        return not self.bye_sent and not self.bye_received and self._next_id <= _MAX_STREAM_ID

    @property
    def has_output(self) -> bool:
        """Whether `next_output` would give bytes."""
        return bool(self._short_frames) or any(self._turns)

    @property
    def has_urgent_output(self) -> bool:
        """Whether some of it is not bulk."""
        return bool(self._short_frames) or any(self._turns[: Priority.BULK])

    @property
    def stream_count(self) -> int:
        """Open streams, of both sides."""
        return len(self._streams)

    @property
    def short_frames_waiting(self) -> int:
        """Short frames not yet sent: a measure of how far the link lags behind our calls."""
        return len(self._short_frames)

    def open(self, header: bytes, priority: Priority) -> int:
        """Opens a stream and returns its id. The caller holds it to `max_streams` of its own."""
        if not self.can_open:
            raise Disconnected("the connection is closing")
        stream_id = self._next_id
        self._next_id += 2
        self._streams[stream_id] = self._new_stream(is_ours=True, priority=priority)
        self._short_frames.append(encode_frame(FrameType.OPEN, stream_id, header))
        return stream_id

    def answer(self, stream_id: int, header: bytes, priority: Priority) -> None:
        """Sends the one HEAD of a stream that the remote opened."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.priority = priority
            stream.has_head = True
            self._short_frames.append(encode_frame(FrameType.HEAD, stream_id, header))

    def send(self, stream_id: int, data: bytes | memoryview, *, fin: bool) -> None:
        """Queues body bytes without a copy; they must not change. `fin` ends our half."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.fin_queued:
            if data:
                stream.output.append(memoryview(data))
                stream.output_bytes += len(data)
            stream.fin_queued = fin
            self._take_turn(stream_id, stream)

    def output_bytes(self, stream_id: int) -> int:
        """Body bytes queued and not yet sent."""
        stream = self._streams.get(stream_id)
        return stream.output_bytes if stream is not None else 0

    def is_sending(self, stream_id: int) -> bool:
        """Whether our half of the stream still has something to say."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.is_sending

    def grant(self, stream_id: int, size_bytes: int, now: float = 0.0) -> None:
        """Says that the consumer has taken bytes, so that the remote may send as many more.

        The window grows to twice what comes within a round trip, if it is known how long that is and the budget
        has the credit: a smaller one would hold a fast and long path up.
        """
        stream = self._streams.get(stream_id)
        if stream is None or not stream.is_receiving:
            return
        stream.ungranted += size_bytes
        window_bytes = self.limits.window_bytes + stream.extra_credit
        if stream.ungranted >= window_bytes // 2:
            size_bytes = stream.ungranted + self._grow(stream, window_bytes, now)
            stream.receive_window += size_bytes
            self._short_frames.append(encode_frame(FrameType.WINDOW, stream_id, struct.pack("!I", size_bytes)))
            stream.ungranted = 0
            stream.granted_at = now

    def _grow(self, stream: _Stream, window_bytes: int, now: float) -> int:
        """The credit by which a window grows."""
        elapsed_s = now - stream.granted_at
        if not stream.granted_at or elapsed_s <= 0.0 or self._credit is None:
            return 0
        rtt_s = self.measure_rtt()
        if rtt_s is None:
            self.probe(now)
            return 0
        wanted = min(int(2 * stream.ungranted / elapsed_s * rtt_s), MAX_WINDOW_BYTES) - window_bytes
        extra = self._credit.take(self._remote, wanted) if wanted > 0 else 0
        stream.extra_credit += extra
        return extra

    def reset(self, stream_id: int, code: ResetCode) -> None:
        """Ends a stream now. What it had queued is dropped."""
        if self._drop(stream_id):
            self._short_frames.append(encode_frame(FrameType.RESET, stream_id, struct.pack("!H", code)))

    def say_bye(self, code: ByeCode) -> None:
        """Announces that this side opens no more streams."""
        if not self.bye_sent:
            self.bye_sent = True
            self._short_frames.append(encode_frame(FrameType.BYE, 0, bytes([code])))

    def last_words(self, code: ByeCode) -> bytes:
        """The goodbye of a connection that closes now, ahead of all that waits; nothing if it was said."""
        if self.bye_sent:
            return b""
        self.bye_sent = True
        return encode_frame(FrameType.BYE, 0, bytes([code]))

    # Time.

    def close(self) -> None:
        """Ends every stream, and gives their credit back."""
        for stream_id in list(self._streams):
            self._drop(stream_id)

    def tick(self, now: float) -> None:
        """Sends a PING after silence; raises `Disconnected` when the silence has lasted too long."""
        # The same sums as in `next_tick`: a difference could round to just below, and the driver would spin.
        if now >= self._last_received + self.limits.keepalive_timeout_s:
            raise Disconnected(f"nothing was heard for {now - self._last_received:.0f} s")
        if self._ping_sent is None and now >= self._last_received + self._ping_after_s:
            self._send_ping(now)

    def probe(self, now: float) -> None:
        """Measures the round trip now, unless that is under way."""
        if self._ping_sent is None:
            self._send_ping(now)

    def _send_ping(self, now: float) -> None:
        self._ping_sent = now
        self._ping_count += 1
        self._short_frames.append(encode_frame(FrameType.PING, 0, struct.pack("!Q", self._ping_count)))

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do, if nothing arrives before."""
        wait_s = self._ping_after_s if self._ping_sent is None else self.limits.keepalive_timeout_s
        return self._last_received + wait_s

    # Output.

    def next_output(self, max_bytes: int, *, with_bulk: bool = True) -> Output:
        """About `max_bytes` (at least one frame) of what is most urgent now."""
        parts: list[bytes | memoryview] = []
        progressed: list[int] = []
        size = 0
        while self._short_frames and size < max_bytes:
            frame = self._short_frames.popleft()
            parts.append(frame)
            size += len(frame)
        for turn in self._turns if with_bulk else self._turns[: Priority.BULK]:
            while turn and size < max_bytes:
                stream_id = turn.popleft()
                stream = self._streams.get(stream_id)
                if stream is None:
                    continue
                stream.in_turn = False
                if stream.can_send():
                    size += self._emit_data(stream_id, stream, min(max_bytes - size, MAX_DATA_BYTES), parts)
                    progressed.append(stream_id)
                    self._take_turn(stream_id, stream)
        return Output(b"".join(parts), progressed)

    def _emit_data(self, stream_id: int, stream: _Stream, max_bytes: int, parts: list[bytes | memoryview]) -> int:
        length = min(max_bytes, stream.send_window, stream.output_bytes)
        stream.send_window -= length
        stream.output_bytes -= length
        fin = stream.fin_queued and not stream.output_bytes
        parts.append(encode_header(FrameType.DATA, stream_id, length, fin=fin))
        left = length
        while left:
            piece = stream.output.popleft()
            if len(piece) > left:
                stream.output.appendleft(piece[left:])
                piece = piece[:left]
            parts.append(piece)
            left -= len(piece)
        if fin:
            stream.is_sending = False
            if not stream.is_ours and stream.is_receiving:
                self.reset(stream_id, ResetCode.ANSWERED)
            elif not stream.is_ours:
                self._drop(stream_id)
        return length

    # Input.

    def receive(self, data: bytes, now: float) -> Iterator[Event]:
        """Yields what `data` means. Run it to its end. Raises `ProtocolError`."""
        self._last_received = now
        for frame in self._decoder.feed(data):
            match frame.type:
                case FrameType.DATA:
                    yield from self._on_data(frame)
                case FrameType.OPEN:
                    yield from self._on_open(frame)
                case FrameType.HEAD:
                    yield from self._on_head(frame)
                case FrameType.WINDOW:
                    self._on_window(frame)
                case FrameType.RESET:
                    yield from self._on_reset(frame, now)
                case FrameType.PING:
                    self._short_frames.append(encode_frame(FrameType.PONG, 0, frame.payload))
                case FrameType.PONG:
                    self._on_pong(frame, now)
                case FrameType.BYE:
                    self.bye_received = True
                    yield SaidBye(frame.payload[0])
            if len(self._short_frames) > self.limits.max_short_frames:
                raise ProtocolError("flood", "asks faster than it reads the answers")

    def _on_open(self, frame: Frame) -> Iterator[Event]:
        if frame.stream_id % 2 == self._our_parity or frame.stream_id <= self._highest_remote_id:
            raise ProtocolError("bad-stream-id", f"OPEN of {frame.stream_id}")
        if self.bye_received:
            raise ProtocolError("open-after-bye")
        if self._remote_streams >= self.limits.max_streams:
            raise ProtocolError("too-many-streams")
        self._highest_remote_id = frame.stream_id
        self._remote_streams += 1
        stream = self._new_stream(is_ours=False, priority=Priority.NORMAL)
        self._streams[frame.stream_id] = stream
        yield Opened(frame.stream_id, frame.payload)
        if frame.fin:
            yield from self._on_fin(frame.stream_id, stream)

    def _on_head(self, frame: Frame) -> Iterator[Event]:
        stream = self._find(frame)
        if stream is None:
            return
        if not stream.is_ours or stream.has_head:
            raise ProtocolError("unexpected-head")
        stream.has_head = True
        yield Headed(frame.stream_id, frame.payload)
        if frame.fin:
            yield from self._on_fin(frame.stream_id, stream)

    def _on_data(self, frame: Frame) -> Iterator[Event]:
        stream = self._find(frame)
        if stream is None:
            return
        if not stream.is_receiving or (stream.is_ours and not stream.has_head):
            raise ProtocolError("unexpected-data")
        stream.receive_window -= len(frame.payload)
        if stream.receive_window < 0:
            raise ProtocolError("credit-overrun")
        if frame.payload:
            yield Received(frame.stream_id, frame.payload)
        if frame.fin:
            yield from self._on_fin(frame.stream_id, stream)

    def _on_fin(self, stream_id: int, stream: _Stream) -> Iterator[Event]:
        if self._streams.get(stream_id) is not stream:
            return  # the driver reset it meanwhile
        stream.is_receiving = False
        if stream.is_ours:
            if stream.is_sending:
                self.reset(stream_id, ResetCode.ANSWERED)
            else:
                self._drop(stream_id)
        yield Ended(stream_id)

    def _on_window(self, frame: Frame) -> None:
        stream = self._find(frame)
        if stream is None:
            return
        (size_bytes,) = struct.unpack("!I", frame.payload)
        stream.send_window += size_bytes
        if not size_bytes or stream.send_window > _MAX_CREDIT_BYTES:
            raise ProtocolError("bad-window", f"grant of {size_bytes} bytes")
        self._take_turn(frame.stream_id, stream)

    def _on_pong(self, frame: Frame, now: float) -> None:
        (count,) = struct.unpack("!Q", frame.payload)
        if count > self._ping_count:
            raise ProtocolError("unexpected-pong")
        if self._ping_sent is not None and count == self._ping_count:
            self.rtt_s = now - self._ping_sent
            self._ping_sent = None

    def _on_reset(self, frame: Frame, now: float) -> Iterator[Event]:
        stream = self._find(frame)
        if stream is None:
            return
        if not stream.is_ours:
            refill = (now - self._resets_at) * self.limits.resets_per_s
            self._resets_left = min(self._resets_left + refill, float(self.limits.reset_burst)) - 1
            self._resets_at = now
            if self._resets_left < 0:
                raise ProtocolError("flood", "opens streams only to reset them")
        self._drop(frame.stream_id)
        yield WasReset(frame.stream_id, struct.unpack("!H", frame.payload)[0])

    def _find(self, frame: Frame) -> _Stream | None:
        """The stream of a frame, or None if it has ended. Raises for a stream that never was."""
        stream = self._streams.get(frame.stream_id)
        if stream is None:
            is_ours = frame.stream_id % 2 == self._our_parity
            if frame.stream_id >= self._next_id if is_ours else frame.stream_id > self._highest_remote_id:
                raise ProtocolError("unknown-stream", f"{frame.type.name} on {frame.stream_id}")
        return stream

    def _new_stream(self, *, is_ours: bool, priority: Priority) -> _Stream:
        return _Stream(is_ours, priority, self.limits.window_bytes, self.limits.window_bytes)

    def _take_turn(self, stream_id: int, stream: _Stream) -> None:
        if not stream.in_turn and stream_id in self._streams and stream.can_send():
            stream.in_turn = True
            self._turns[stream.priority].append(stream_id)

    def _drop(self, stream_id: int) -> bool:
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return False
        if stream.extra_credit and self._credit is not None:
            self._credit.give_back(self._remote, stream.extra_credit)
        stream.is_sending = stream.is_receiving = False
        if not stream.is_ours:
            self._remote_streams -= 1
        return True
