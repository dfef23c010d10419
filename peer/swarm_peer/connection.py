"""One live connection: two trio tasks that drive a `Mux`, and one task per request being served.

The connection ends as a whole and only once: whatever goes wrong in it becomes its one end reason, every call
under way fails with it, and nothing but cancellation leaves `run`. What it calls is in `calling`, what it answers
in `serving`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import trio

from swarm_peer.addresses import LOOPBACK, host_group
from swarm_peer.calling import Calls
from swarm_peer.errors import Disconnected, PeerError, ProtocolError
from swarm_peer.identity import short
from swarm_peer.mux import Mux
from swarm_peer.mux_events import ByeCode, Ended, Event, Headed, MuxLimits, Opened, Received, SaidBye, WasReset
from swarm_peer.pacing import MIN_OUTPUT_BYTES, Pace, PathDelay
from swarm_peer.rpc import Method, ReplyHeader, RequestHeader, decode_header
from swarm_peer.serving import Requests, Shared
from swarm_peer.transport import Channel
from swarm_peer.uplink import SAMPLE_INTERVAL_S

logger = logging.getLogger("swarm_peer")

_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one connection. `request_memory_bytes` is for bodies of requests that are arriving."""

    mux: MuxLimits = field(default_factory=MuxLimits)
    idle_s: float = 60.0
    goodbye_s: float = 5.0
    request_memory_bytes: int = 32 * 1024 * 1024


class Connection:
    """One end of a connection over an authenticated channel."""

    def __init__(
        self,
        channel: Channel,
        *,
        is_dialer: bool,
        shared: Shared,
        limits: ConnectionLimits,
        is_relayed: bool = False,
    ) -> None:
        now = trio.current_time()
        self.channel = channel
        self.is_dialer = is_dialer
        self.is_relayed = is_relayed
        self.since = now
        self.last_active = now  # when a call last began, moved or ended
        self._shared = shared
        self._limits = limits
        self._mux = Mux(is_dialer=is_dialer, now=now, limits=limits.mux, credit=shared.credit, remote=channel.remote)
        self._mux.measure_rtt = lambda: self.rtt_s
        self._calls = Calls(self._mux, shared.drops, stir=self._stir, is_usable=lambda: self.is_usable)
        self._requests = Requests(
            self._mux,
            shared,
            remote=channel.remote,
            memory_bytes=limits.request_memory_bytes,
            stir=self._stir,
        )
        self._pace = Pace()
        is_loopback = host_group(channel.remote_address.host) == LOOPBACK
        self._path = PathDelay(channel.remote, is_loopback=is_loopback)
        self._bye_at: float | None = None
        self._remote_bye: int | None = None
        self._last_word = ByeCode.SHUTDOWN
        self._end: PeerError | None = None
        self._nursery: trio.Nursery | None = None
        self._wake = trio.Event()
        self._is_mid_send = False
        self._is_writable = True

    @property
    def is_usable(self) -> bool:
        """Whether new calls may use it."""
        return self._end is None and self._is_writable and self._mux.can_open

    @property
    def rtt_s(self) -> float | None:
        """The round trip, as the kernel or the last PING has it."""
        return self.channel.stream.rtt_s or self._mux.rtt_s

    @property
    def is_quiet(self) -> bool:
        """Whether no call is under way."""
        return not self._mux.stream_count

    async def call(self, method: Method[Any, Any], body: bytes, deadline: float) -> bytes:
        """The reply body. Leaving early, by cancellation or at `deadline`, resets the stream."""
        return await self._calls.call(method, body, deadline)

    def stream(
        self, method: Method[Any, Any], body: bytes, deadline: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The reply as parts, as they arrive; the sender waits when they are not taken."""
        return self._calls.stream(method, body, deadline)

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
            self._calls.fail(end)
            self._mux.close()
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
            self._shared.drops["crash"] += 1
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

    def _on_event(self, event: Event) -> None:
        match event:
            case Received(stream_id, data):
                if (pending := self._calls.find(stream_id)) is not None:
                    self._calls.on_bytes(stream_id, pending, data)
                elif (serving := self._requests.find(stream_id)) is not None:
                    self._requests.on_bytes(stream_id, serving, data)
            case Opened(stream_id, header):
                assert self._nursery is not None
                self._requests.on_open(stream_id, decode_header(RequestHeader, header), self._nursery)
            case Headed(stream_id, header):
                if (pending := self._calls.find(stream_id)) is not None:
                    self._calls.on_head(stream_id, pending, decode_header(ReplyHeader, header))
            case Ended(stream_id):
                if (pending := self._calls.find(stream_id)) is not None:
                    self._calls.on_end(pending)
                elif (serving := self._requests.find(stream_id)) is not None:
                    self._requests.on_end(serving)
            case WasReset(stream_id, code):
                if (pending := self._calls.find(stream_id)) is not None:
                    self._calls.on_reset(pending, code)
                elif (serving := self._requests.find(stream_id)) is not None:
                    serving.scope.cancel()
            case SaidBye(code):
                self._remote_bye = code
                if code in (ByeCode.FULL, ByeCode.BANNED, ByeCode.VIOLATION):
                    raise Disconnected(self._describe_close())  # nothing under way will be answered

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

    # Writing.

    def _stir(self) -> None:
        self.last_active = trio.current_time()
        if self._mux.has_output:
            self._wake.set()

    async def _write(self) -> None:
        while True:
            now = trio.current_time()
            self._mux.tick(now)
            if self._is_over(now):
                raise Disconnected(self._describe_close() if self._mux.bye_received else "closed")
            bulk_at = self._bulk_at()
            if self._mux.has_urgent_output or (self._mux.has_output and bulk_at <= now):
                await self._send_some(now)
                continue
            deadline = self._next_deadline(now)
            if self._mux.has_output:
                deadline = min(deadline, bulk_at)
            self._wake = trio.Event()
            with trio.move_on_at(deadline):
                await self._wake.wait()

    async def _send_some(self, started: float) -> None:
        stream = self.channel.stream
        upload = self._shared.upload
        with trio.move_on_after(self._limits.mux.keepalive_timeout_s) as scope:
            # Choosing what to send only when the link can take it is what makes priorities work.
            await stream.wait_send_all_might_not_block()
            now = trio.current_time()
            size = self._pace.output_bytes
            if not upload.exempts(self._path):
                size = upload.output_bytes(size)
            output = self._mux.next_output(size, with_bulk=self._bulk_at() <= now)
            if output.data:
                if not upload.exempts(self._path):
                    upload.charge(len(output.data), now)
                if len(output.data) >= MIN_OUTPUT_BYTES:
                    self._measure_delay(now)
                await self._send(output.data)
                self._pace.sent(len(output.data), trio.current_time() - started)
            for stream_id in output.progressed:
                if (serving := self._requests.find(stream_id)) is not None:
                    serving.progressed.set()
            self._calls.on_flush()
        if scope.cancelled_caught:
            raise Disconnected("the remote does not read what we send")

    def _bulk_at(self) -> float:
        """The time from which bulk may be sent on this connection."""
        upload = self._shared.upload
        return 0.0 if upload.exempts(self._path) else upload.free_at()

    def _measure_delay(self, now: float) -> None:
        """Tells the upload limit how long the way is while bulk is on it."""
        if now >= self._path.next_sample_at:
            self._path.next_sample_at = now + SAMPLE_INTERVAL_S
            rtt_s = self.channel.stream.rtt_s
            if rtt_s is None:
                self._mux.probe(now)
                rtt_s = self._mux.rtt_s
            if rtt_s is not None:
                self._shared.upload.note_rtt(self._path, rtt_s, now)

    async def _send(self, data: bytes) -> None:
        self._is_mid_send = True
        try:
            await self.channel.stream.send_all(data)
        except trio.BrokenResourceError:
            # The remote has closed. What it said before may still be on its way to the reader.
            self._is_writable = False
            await trio.sleep(_LAST_WORDS_S)
            raise
        self._is_mid_send = False

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
        elif now >= self.last_active + self._limits.idle_s:
            self.close(ByeCode.IDLE)
        return False

    def _next_deadline(self, now: float) -> float:
        if self._bye_at is not None:
            end = self._bye_at + self._limits.goodbye_s
        else:
            end = self.last_active + self._limits.idle_s
        if end <= now:  # calls are under way; look again when they may have ended
            end = now + min(self._limits.goodbye_s, self._limits.idle_s)
        return min(self._mux.next_tick, end)
