"""How many connections one transfer should use: more while each addition pays, found out by trying. No I/O, no clock.

A single TCP connection on a path that loses packets gets about 1.2 segments per round trip and square root of the
loss rate (Mathis et al. 1997), whatever the link could carry; N connections get N times that until the link is full.
On a path that loses nothing one connection fills the link, and more of them gain nothing.
"""

from __future__ import annotations

import math

MAX_LANES = 8
GAIN = 1.15  # what an addition must bring
_RETRY_S = 30.0
_MIN_SETTLE_S = 0.2
_MIN_MEASURE_S = 0.3


class LaneCount:
    """Tries two, four, eight lanes and goes back to what was before if an addition brings less than 15 %.

    `start`: the lanes to begin with. `most`: never more. `rtt_s`: a new connection needs some round trips to be set
    up and to find its speed, and does not count before.
    """

    def __init__(self, now: float, rtt_s: float, *, start: int = 1, most: int = MAX_LANES) -> None:
        self.most = most
        self.wanted = min(start, most)
        self._settle_s = max(_MIN_SETTLE_S, 6 * rtt_s)
        self._measure_s = max(_MIN_MEASURE_S, 4 * rtt_s)
        self._before: tuple[int, float] | None = None  # lanes and bytes/s before the addition that is being tried
        self._retry_at = -math.inf
        self._judged_by = 0.0
        self._begin(now)

    def update(self, received_bytes: int, left_bytes: int, now: float) -> None:
        """Takes what has been received in all, and what is still to come; changes `wanted`."""
        if now < self._from:
            self._start_bytes, self._started = received_bytes, now
            return
        elapsed_s = now - self._started
        if elapsed_s < self._measure_s:
            return
        goodput = (received_bytes - self._start_bytes) / elapsed_s
        if self._before is not None:
            lanes, former = self._before
            self._before = None
            if goodput < GAIN * former:
                self.wanted = lanes
                self._retry_at, self._judged_by = now + _RETRY_S, former
                self._begin(now)
                return
        can_pay = left_bytes > 2 * goodput * (self._settle_s + self._measure_s)
        # A new connection is quick until its first loss. What fewer lanes brought then does not last, and the
        # addition that failed against it deserves another try.
        may_try = now >= self._retry_at or goodput < self._judged_by / GAIN
        if self.wanted < self.most and goodput and can_pay and may_try:
            self._before = (self.wanted, goodput)
            self.wanted = min(2 * self.wanted, self.most)
            self._begin(now)
        else:
            self._start_bytes, self._started = received_bytes, now

    def give_up_on_more(self, lanes: int) -> None:
        """A lane could not be opened: so many have to do."""
        self.most = self.wanted = max(1, lanes)
        self._before = None

    def _begin(self, now: float) -> None:
        self._from = now + self._settle_s
        self._start_bytes = 0
        self._started = now
