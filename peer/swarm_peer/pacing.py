"""How much to send, and when: sizes and delays that keep queues short and memory bounded. No I/O, no clock."""

from __future__ import annotations

import math
from collections import Counter

from swarm_peer.identity import PeerId

MIN_OUTPUT_BYTES = 16 * 1024
MAX_OUTPUT_BYTES = 256 * 1024
_TARGET_S = 0.01
_CATCH_UP_S = 0.01  # timers are late; what a late one lost may be made up for


class Pace:
    """How much one connection sends at a time: about 10 ms of what its link takes, so that urgent frames wait
    little and a fast link is not cut into small pieces."""

    def __init__(self) -> None:
        self.output_bytes = 4 * MIN_OUTPUT_BYTES
        self._s_per_byte: float | None = None

    def sent(self, size_bytes: int, elapsed_s: float) -> None:
        """Learns from one send. Small ones say nothing about the link."""
        if size_bytes < MIN_OUTPUT_BYTES:
            return
        # Averaging times, not rates, lets the first slow send outweigh all that only filled a buffer.
        latest = max(elapsed_s, 1e-5) / size_bytes
        self._s_per_byte = latest if self._s_per_byte is None else 0.7 * self._s_per_byte + 0.3 * latest
        self.output_bytes = _output_bytes(1 / self._s_per_byte)


class PathDelay:
    """The round trips of one connection."""

    def __init__(self, remote: PeerId, *, is_loopback: bool) -> None:
        self.remote = remote
        self.rtt_s: float | None = None
        self.is_near = is_loopback
        self.next_sample_at = -math.inf


class UploadLimit:
    """One limit for the bulk of all connections. Everything sent is charged, but only bulk waits.

    A limit somewhat below the uplink keeps the router's queue empty, which no priority can do
    (measured at 20 Mbit/s: calls beside a transfer take 58 ms at 85 % of the uplink, 141 ms without a limit).
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def free_at(self) -> float:
        """The time from which bulk may be sent."""
        return self._free_at if self.bytes_per_s is not None else 0.0

    def exempts(self, path: PathDelay) -> bool:
        """Whether bulk on this path pays nothing: a rate that a person has set holds everywhere."""
        return self.bytes_per_s is None

    def note_rtt(self, path: PathDelay, rtt_s: float, now: float) -> None:
        """A round trip of a connection that sends bulk. A fixed limit learns nothing from it."""
        path.rtt_s = rtt_s

    def output_bytes(self, wanted: int) -> int:
        """How much to send at a time: not more than the limit allows in 10 ms."""
        return wanted if self.bytes_per_s is None else min(wanted, _output_bytes(self.bytes_per_s))

    def charge(self, size_bytes: int, now: float) -> None:
        """Counts what was sent."""
        if self.bytes_per_s is not None:
            self._free_at = max(self._free_at, now - _CATCH_UP_S) + size_bytes / self.bytes_per_s


class DownloadLimit:
    """One limit for the bulk that this peer asks for, paced by asking later and granting credit later."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, size_bytes: int, now: float) -> float:
        """Takes the room for so many bytes; the time from which they may be asked for."""
        if self.bytes_per_s is None:
            return now
        start = max(self._free_at, now)
        self._free_at = start + size_bytes / self.bytes_per_s
        return start


MAX_WINDOW_BYTES = 16 * 1024 * 1024


class CreditBudget:
    """Credit beyond the initial windows, over all streams of an endpoint: what strangers might make it buffer.

    One remote gets `per_remote_bytes` at most, over all its connections, and all together `total_bytes`. Where it is
    used up, streams go on with the windows that they have.
    """

    def __init__(self, total_bytes: int = 256 * 1024 * 1024, per_remote_bytes: int = 32 * 1024 * 1024) -> None:
        self._left = total_bytes
        self._per_remote_bytes = per_remote_bytes
        self._taken: Counter[bytes] = Counter()

    def take(self, remote: bytes, wanted_bytes: int) -> int:
        """Takes as much as is left of what is wanted; returns it."""
        granted = max(0, min(wanted_bytes, self._left, self._per_remote_bytes - self._taken[remote]))
        self._left -= granted
        self._taken[remote] += granted
        return granted

    def give_back(self, remote: bytes, size_bytes: int) -> None:
        """A stream with so much of it has ended."""
        self._left += size_bytes
        self._taken[remote] -= size_bytes
        if self._taken[remote] <= 0:
            del self._taken[remote]


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
        """Returns what was taken."""
        self._left += size_bytes


def _output_bytes(bytes_per_s: float) -> int:
    return int(min(max(bytes_per_s * _TARGET_S, MIN_OUTPUT_BYTES), MAX_OUTPUT_BYTES))
