"""A blob on its way: which chunks are missing, who has been asked for which, and how far they are. No I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import trio

from swarm_peer.blob_store import Descriptor
from swarm_peer.identity import PeerId

_HALF_LIFE_S = 0.5


class LaneRate:
    """What comes in on one connection: bytes asked for and not yet here, and the rate of the last second or so."""

    def __init__(self, peer_id: PeerId, number: int) -> None:
        self.peer_id = peer_id
        self.number = number
        self.outstanding_bytes = 0
        self.requests = 0
        self._bytes = 0.0
        self._time_s = 0.0
        self._last_at = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0 before anything has come."""
        return self._bytes / self._time_s if self._time_s else 0.0

    def ask(self, size_bytes: int, now: float) -> None:
        """A request goes out. Time without one does not count as slowness."""
        if not self.requests:
            self._last_at = now
        self.requests += 1
        self.outstanding_bytes += size_bytes

    def arrive(self, size_bytes: int, now: float) -> None:
        """Bytes of some request are here."""
        elapsed_s = max(now - self._last_at, 1e-6)
        keep = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self._bytes = self._bytes * keep + size_bytes
        self._time_s = self._time_s * keep + elapsed_s
        self._last_at = now
        self.outstanding_bytes -= size_bytes

    def end(self, left_bytes: int) -> None:
        """A request has ended, with so many bytes that will not come."""
        self.requests -= 1
        self.outstanding_bytes -= left_bytes

    def expected_s(self, size_bytes: int) -> float:
        """How long so many further bytes take; infinite before anything has come."""
        rate = self.bytes_per_s
        return (self.outstanding_bytes + size_bytes) / rate if rate else math.inf


@dataclass(slots=True, eq=False)
class Request:
    """One chunk, asked of one holder on one lane."""

    index: int
    lane: LaneRate
    size_bytes: int
    asked_at: float
    moved_at: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    received_bytes: int = 0


class PartialBlob:
    """The buffer that a blob grows in, and the state of each chunk."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.buffer = bytearray(descriptor.size)
        self.missing: deque[int] = deque()
        self.in_flight: dict[int, list[Request]] = {}
        self.done: set[int] = set()
        self.done_bytes = 0
        self.changed = trio.Event()

    @property
    def is_complete(self) -> bool:
        return len(self.done) == len(self.descriptor.hashes)

    def resume(self) -> None:
        """Makes exactly the chunks that have not arrived the missing ones."""
        self.in_flight.clear()
        self.missing = deque(i for i in range(len(self.descriptor.hashes)) if i not in self.done)

    def take(self, index: int, chunk: bytes) -> bool:
        """Checks a chunk and copies it to its place. Work for a thread; False if it is wrong."""
        if not self.descriptor.check_chunk(index, chunk):
            return False
        start, end = self.descriptor.span(index)
        self.buffer[start:end] = chunk
        return True

    def choose(self, lane: LaneRate, now: float, hedge_after_s: float) -> int | None:
        """The next chunk for a lane: a missing one, else one that it would bring sooner than the lane that was asked,
        or that has not moved for `hedge_after_s`. No chunk is asked for more than twice at a time."""
        while self.missing:
            index = self.missing.popleft()
            if index not in self.done:
                return index
        slowest, longest_s = None, 0.0
        for index, requests in self.in_flight.items():
            if len(requests) != 1 or requests[0].lane is lane:
                continue
            other = requests[0]
            theirs_s = other.lane.expected_s(0)
            if now >= other.moved_at + hedge_after_s:
                theirs_s = math.inf
            elif theirs_s == math.inf or theirs_s <= 1.25 * lane.expected_s(other.size_bytes) + 0.1:
                continue
            if theirs_s > longest_s:
                slowest, longest_s = index, theirs_s
        return slowest

    def ask(self, index: int, lane: LaneRate, now: float) -> Request:
        """Notes that a chunk has been asked for."""
        start, end = self.descriptor.span(index)
        request = Request(index, lane, end - start, now, now)
        self.in_flight.setdefault(index, []).append(request)
        lane.ask(request.size_bytes, now)
        return request

    def arrive(self, request: Request, size_bytes: int, now: float) -> None:
        """Notes bytes of a chunk."""
        request.received_bytes += size_bytes
        request.moved_at = now
        request.lane.arrive(size_bytes, now)

    def finish(self, request: Request) -> None:
        """A chunk is in its place: whoever else was asked for it need not go on."""
        self.done.add(request.index)
        self.done_bytes += request.size_bytes
        for other in self.in_flight.get(request.index, ()):
            if other is not request:
                other.scope.cancel()

    def end(self, request: Request) -> None:
        """Ends the work on a request; unless the chunk has arrived or is asked of another, it is missing again."""
        request.lane.end(request.size_bytes - request.received_bytes)
        requests = self.in_flight.get(request.index, [])
        if request in requests:
            requests.remove(request)
        if not requests:
            self.in_flight.pop(request.index, None)
            if request.index not in self.done and request.index not in self.missing:
                self.missing.appendleft(request.index)
        self.stir()

    def stir(self) -> None:
        """Wakes those who wait for something to do."""
        self.changed.set()
        self.changed = trio.Event()
