"""The connections of the in-memory network: a pipe for each direction, with delay, bandwidth, an end, and a break."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import trio

_MAX_QUEUED_BYTES = 4 * 1024 * 1024  # like a socket's buffers and the path between them


@dataclass(frozen=True, slots=True)
class Link:
    """How bytes travel from one host to another. `dial_loss` is the share of dials that get no answer."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    dial_loss: float = 0.0
    bandwidth_bytes_per_s: float | None = None


class Wires(Protocol):
    """What a pipe needs of the network that it is part of."""

    rng: random.Random
    pipes: dict[Pipe, None]

    def is_cut(self, source: str, target: str) -> bool:
        """Whether bytes from `source` to `target` wait."""
        ...


class MemoryStream:
    """One end of a connection."""

    rtt_s: float | None = None

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self._incoming = incoming
        self._outgoing = outgoing
        self._is_closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Queues the bytes; waits only while the far end reads too slowly."""
        if self._is_closed:
            raise trio.ClosedResourceError
        await self._outgoing.put(bytes(data))
        self.bytes_sent += len(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Waits until the link has taken what was sent before."""
        await self._outgoing.wait_free()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Bytes that have arrived; b"" when the far end has closed."""
        if self._is_closed:
            raise trio.ClosedResourceError
        data = await self._incoming.get(max_bytes)
        self.bytes_received += len(data)
        return data

    async def send_eof(self) -> None:
        """Says that nothing more will be sent."""
        self._outgoing.end()
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Closes at once."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As `aclose`, where nothing may wait."""
        if not self._is_closed:
            self._is_closed = True
            self._outgoing.end()
            self._incoming.stop_reading()


class Pipe:
    """One direction of a connection."""

    def __init__(self, wires: Wires, source: str, target: str, link: Link) -> None:
        self.source = source
        self.target = target
        self._wires = wires
        self._link = link
        self._queue: deque[tuple[float, bytes]] = deque()  # arrival time, bytes; b"" is the end
        self._queued_bytes = 0
        self._free_at = 0.0
        self._last_arrival = 0.0
        self._has_ended = False
        self._is_broken = False
        self._nobody_reads = False
        self._change = trio.Event()
        wires.pipes[self] = None

    def changed(self) -> None:
        self._change.set()
        self._change = trio.Event()

    def break_off(self) -> None:
        self._is_broken = True
        self._queue.clear()
        self._forget()

    def end(self) -> None:
        if not self._is_broken and not self._has_ended:
            self._has_ended = True
            self._push(b"")

    def stop_reading(self) -> None:
        self._nobody_reads = True
        self._queue.clear()
        self._queued_bytes = 0
        self._forget()

    def _forget(self) -> None:
        self._wires.pipes.pop(self, None)
        self.changed()

    def _push(self, data: bytes) -> None:
        now = trio.current_time()
        if self._link.bandwidth_bytes_per_s is not None:
            self._free_at = max(now, self._free_at) + len(data) / self._link.bandwidth_bytes_per_s
        else:
            self._free_at = now
        delay_s = self._link.latency_s
        if self._link.jitter_s:
            delay_s += self._wires.rng.random() * self._link.jitter_s
        self._last_arrival = max(self._last_arrival, self._free_at + delay_s)
        self._queue.append((self._last_arrival, data))
        self._queued_bytes += len(data)
        self.changed()

    async def put(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        while True:
            if self._is_broken or (self._nobody_reads and not self._wires.is_cut(self.source, self.target)):
                raise trio.BrokenResourceError("the far end is gone")
            if self._has_ended:
                raise trio.ClosedResourceError
            if self._queued_bytes < _MAX_QUEUED_BYTES:
                self._push(data)
                return
            await self._change.wait()

    async def wait_free(self) -> None:
        await trio.lowlevel.checkpoint()
        while trio.current_time() < self._free_at and not self._is_broken:
            with trio.move_on_at(self._free_at):
                await self._change.wait()
        while self._queued_bytes >= _MAX_QUEUED_BYTES and not self._is_broken:
            await self._change.wait()

    async def get(self, max_bytes: int | None) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            if self._is_broken:
                raise trio.BrokenResourceError("the connection was reset")
            if self._nobody_reads:
                raise trio.ClosedResourceError
            if not self._queue or self._wires.is_cut(self.source, self.target):
                await self._change.wait()
                continue
            arrival, data = self._queue[0]
            if arrival > trio.current_time():
                with trio.move_on_at(arrival):
                    await self._change.wait()
                continue
            if not data:
                return b""
            self._queue.popleft()
            if max_bytes is not None and len(data) > max_bytes:
                self._queue.appendleft((arrival, data[max_bytes:]))
                data = data[:max_bytes]
            was_full = self._queued_bytes >= _MAX_QUEUED_BYTES
            self._queued_bytes -= len(data)
            if was_full:
                self.changed()
            return data
