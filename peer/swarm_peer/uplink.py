"""How fast bulk may be sent so that the uplink's queue stays empty, found out from what is sent. No I/O, no clock.

In the spirit of LEDBAT (RFC 6817): a round trip that is longer than the shortest one seen means that a queue stands
somewhere on the way, and most likely at the home's uplink. `AutoUploadLimit` starts without a limit. When all round
trips of loaded connections have grown by 50 ms, the uplink is full and what got through in the last second is what
it carries: the limit becomes 85 % of that, and the queue drains. A delay may also come from elsewhere, so the first
finding is tried out at once: the limit rises quickly until the delay shows again. Once two findings agree it holds
for a while, and then rises slowly, because an uplink may have become faster or other traffic may have ended. On a path
that loses packets before a queue builds up nothing is limited, and nothing needs to be.

Only connections that send bulk are asked, and the smallest growth of the last second counts: a lost packet or a
burst delays some, a standing queue all. Paths on the same machine or network (below 5 ms) neither pay nor are asked.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from swarm_peer.identity import PeerId
from swarm_peer.pacing import PathDelay, UploadLimit

SHARE = 0.85  # of what the uplink carries
QUEUE_S = 0.05  # so much longer than the shortest round trip means that a queue stands
NEAR_S = 0.005
SAMPLE_INTERVAL_S = 0.25

_GOODPUT_S = 1.0
_MIN_BYTES_PER_S = 16_000.0
_STANDS_S = 0.5  # a delay that lasts so long is a queue that stands
_DRAIN_S = 0.5  # after lowering, before the delay counts again
_HOLD_S = 20.0  # after lowering, before the limit rises above its share of the best
_BEST_S = 60.0
_BASE_S = 300.0
_RISE_PER_S = 0.03
_RECOVERY_PER_S = 0.25
_TRIAL_PER_S = 0.5
_AGREE = 1.3
_MAX_REMOTES = 1024


class _Base:
    """The shortest round trip of the last minutes: of this span of time, or of the one before."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._current = self._former = math.inf

    def note(self, rtt_s: float, now: float) -> float:
        if now - self._since > _BASE_S:
            self._former, self._current, self._since = self._current, math.inf, now
        self._current = min(self._current, rtt_s)
        return min(self._current, self._former)


class AutoUploadLimit(UploadLimit):
    """An `UploadLimit` that finds its own rate."""

    def __init__(self) -> None:
        super().__init__(None)
        self._sent: deque[tuple[float, int]] = deque()
        self._bases: OrderedDict[PeerId, _Base] = OrderedDict()
        self._queueing: deque[tuple[float, float]] = deque()  # when, how much longer than the shortest
        self._best: deque[tuple[float, float]] = deque()  # when, bytes/s
        self._full_at_bytes_per_s = 0.0
        self._is_confirmed = False
        self._lowered_at = -math.inf
        self._raised_at = -math.inf

    def exempts(self, path: PathDelay) -> bool:
        """Whether bulk on this path pays nothing."""
        return path.is_near

    def charge(self, size_bytes: int, now: float) -> None:
        """Counts what was sent."""
        super().charge(size_bytes, now)
        self._sent.append((now, size_bytes))
        while self._sent[0][0] < now - _GOODPUT_S:
            self._sent.popleft()

    def goodput(self, now: float, queueing_s: float = 0.0) -> float:
        """Bytes per second that have left the uplink in the last second, of which `queueing_s` still stand there."""
        recent = [(at, size) for at, size in self._sent if at >= now - _GOODPUT_S]
        elapsed_s = now - recent[0][0] if recent else 0.0
        return sum(size for _, size in recent) / (max(elapsed_s, SAMPLE_INTERVAL_S) + queueing_s)

    def note_rtt(self, path: PathDelay, rtt_s: float, now: float) -> None:
        """A round trip of a connection that sends bulk."""
        path.rtt_s = rtt_s
        base = self._bases.get(path.remote)
        if base is None:
            base = self._bases[path.remote] = _Base(now)
            if len(self._bases) > _MAX_REMOTES:
                self._bases.popitem(last=False)
        self._bases.move_to_end(path.remote)
        shortest_s = base.note(rtt_s, now)
        path.is_near = path.is_near or shortest_s < NEAR_S
        if path.is_near:
            return
        if now < self._lowered_at + _DRAIN_S:
            return
        self._queueing.append((now, rtt_s - shortest_s))
        while self._queueing[0][0] < now - _GOODPUT_S:
            self._queueing.popleft()
        self._adapt(min(queueing_s for _, queueing_s in self._queueing), now)

    def _adapt(self, queueing_s: float, now: float) -> None:
        if queueing_s > QUEUE_S:
            if now - self._queueing[0][0] >= _STANDS_S:
                self._lower(queueing_s, now)
            return
        limit = self.bytes_per_s
        elapsed_s = now - max(self._raised_at, self._lowered_at)
        if limit is None or elapsed_s < SAMPLE_INTERVAL_S or queueing_s > QUEUE_S / 2:
            return
        self._raised_at = now
        if self.goodput(now) < 0.7 * limit:
            return  # it is not the limit that holds us up, so nothing can be learned about a higher one
        best = max((rate for at, rate in self._best if at > now - _BEST_S), default=0.0)
        if now < self._lowered_at + 2 * _GOODPUT_S:
            return
        if not self._is_confirmed:
            self.bytes_per_s = limit * (1 + _TRIAL_PER_S * min(elapsed_s, 1.0))
        elif limit < SHARE * best:
            self.bytes_per_s = min(limit * (1 + _RECOVERY_PER_S * min(elapsed_s, 1.0)), SHARE * best)
        elif now >= self._lowered_at + _HOLD_S:
            # Well above what was full the last time, the uplink is another one by now.
            per_s = _RISE_PER_S if limit < 1.1 * self._full_at_bytes_per_s else _RECOVERY_PER_S
            self.bytes_per_s = limit * (1 + per_s * min(elapsed_s, 1.0))

    def _lower(self, queueing_s: float, now: float) -> None:
        goodput = self.goodput(now, queueing_s)
        if goodput < _MIN_BYTES_PER_S:
            return  # not our queue
        self._best.append((now, goodput))
        while self._best[0][0] < now - _BEST_S:
            self._best.popleft()
        low, high = sorted((goodput, self._full_at_bytes_per_s))
        self._is_confirmed = high < _AGREE * low
        self._full_at_bytes_per_s = goodput
        self.bytes_per_s = max(SHARE * goodput, _MIN_BYTES_PER_S)
        self._lowered_at = now
        self._queueing.clear()
