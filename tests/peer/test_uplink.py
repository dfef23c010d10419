"""The automatic upload limit against a simulated uplink: a queue, a rate, and whatever else uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from swarm_peer.identity import PeerId
from swarm_peer.pacing import DownloadLimit, PathDelay, UploadLimit
from swarm_peer.uplink import AutoUploadLimit

REMOTE = PeerId(b"r" * 32)

TICK_S = 0.005


class Uplink:
    """Takes what is sent and keeps what exceeds its rate in a queue. Bulk comes as fast as the limit lets it, `wants`
    bytes/s at most. `other(now)` is the rate that others use."""

    def __init__(self, rate: float, *, base_s: float = 0.05, queue_s: float = 0.15) -> None:
        self.rate = rate
        self.piece = int(rate * 0.002)
        self.base_s = base_s
        self.queue_s = queue_s
        self.queued = 0.0
        self.now = 0.0
        self.limit = AutoUploadLimit()
        self.path = PathDelay(REMOTE, is_loopback=False)
        self.other: Callable[[float], float] = lambda now: 0.0
        self.limit.note_rtt(self.path, base_s, 0.0)  # the kernel knows it from the handshake

    @property
    def delay_s(self) -> float:
        return self.queued / self.rate

    def run(self, seconds: float, wants: float = 1e9) -> tuple[float, float]:
        """Sends bulk for a while; returns its rate and the median queueing delay."""
        sent, delays, credit, sample_at = 0.0, [], 0.0, self.now
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            credit = min(credit + wants * TICK_S, 50 * self.piece)
            self.queued = max(0.0, self.queued + (self.other(self.now) - self.rate) * TICK_S)
            delays.append(self.delay_s)
            is_exempt = self.limit.exempts(self.path)
            # A congestion control keeps the queue full but for what it drops.
            while credit >= self.piece and self.queued < self.queue_s * self.rate:
                if not is_exempt and self.limit.free_at() > self.now:
                    break
                if not is_exempt:
                    self.limit.charge(self.piece, self.now)
                credit -= self.piece
                self.queued += self.piece
                sent += self.piece
            if self.now >= sample_at:
                sample_at += 0.25
                self.limit.note_rtt(self.path, self.base_s + self.delay_s, self.now)
        return sent / seconds, sorted(delays)[len(delays) // 2]


@pytest.mark.parametrize("mbit", [2, 20, 200])
def test_bulk_ends_up_somewhat_below_the_uplink_and_the_queue_empty(mbit: int) -> None:
    uplink = Uplink(mbit * 125_000)
    uplink.run(5)
    rate, delay_s = uplink.run(60)
    assert 0.8 < rate / uplink.rate < 1.0
    assert delay_s < 0.005


def test_a_full_queue_is_noticed_within_seconds() -> None:
    uplink = Uplink(2_500_000)
    uplink.run(8)
    _, delay_s = uplink.run(5)
    assert delay_s < 0.002
    assert uplink.limit.bytes_per_s == pytest.approx(0.85 * uplink.rate, rel=0.1)


def test_an_uplink_that_becomes_faster_is_found_out() -> None:
    uplink = Uplink(1_000_000)
    uplink.run(10)
    uplink.rate = 2_000_000
    uplink.run(90)
    rate, _ = uplink.run(20)
    assert rate > 1_500_000


def test_other_traffic_makes_bulk_step_back_and_come_back() -> None:
    uplink = Uplink(2_000_000)
    uplink.run(10)
    uplink.other = lambda now: 1_200_000.0
    uplink.run(10)
    beside, delay_s = uplink.run(20)
    assert beside < 900_000
    assert delay_s < 0.06
    uplink.other = lambda now: 0.0
    uplink.run(10)
    assert uplink.run(20)[0] > 1_500_000, "the best of the last minute is remembered"


def test_what_does_not_fill_the_uplink_is_never_limited() -> None:
    uplink = Uplink(2_500_000)
    rate, _ = uplink.run(60, wants=1_500_000)
    assert rate == pytest.approx(1_500_000, rel=0.02)
    assert uplink.limit.bytes_per_s is None


def test_a_delay_that_is_not_ours_holds_us_up_for_a_while_only() -> None:
    uplink = Uplink(2_500_000)
    uplink.other = lambda now: 2_500_000.0
    uplink.queued = 0.1 * uplink.rate
    uplink.run(2, wants=0)
    assert uplink.limit.bytes_per_s is None, "nothing was sent"
    uplink.run(2, wants=100_000)
    uplink.other = lambda now: 0.0
    assert uplink.limit.bytes_per_s is not None
    uplink.run(10)
    assert uplink.run(10)[0] > 2_000_000, "one finding that no other confirms does not stand"


@pytest.mark.parametrize(("base_s", "is_loopback"), [(0.002, False), (0.0, True)])
def test_near_paths_are_exempt(base_s: float, is_loopback: bool) -> None:
    uplink = Uplink(1_000_000, base_s=base_s)
    uplink.path = PathDelay(REMOTE, is_loopback=is_loopback)
    uplink.limit.note_rtt(uplink.path, base_s, 0.0)
    uplink.run(20)
    assert uplink.limit.bytes_per_s is None
    assert uplink.limit.exempts(uplink.path)


def test_one_delayed_connection_among_several_is_no_queue() -> None:
    limit, paths = AutoUploadLimit(), [PathDelay(REMOTE, is_loopback=False) for _ in range(4)]
    for step in range(200):
        now = step * 0.05
        limit.charge(16_384, now)
        for number, path in enumerate(paths):
            late = step > 20 and step % 4 == number
            limit.note_rtt(path, 0.3 if late else 0.05, now)
    assert limit.bytes_per_s is None


def test_a_fixed_limit_holds_everywhere_and_makes_up_for_late_timers() -> None:
    limit = UploadLimit(1_000_000)
    near = PathDelay(REMOTE, is_loopback=True)
    limit.note_rtt(near, 0.0001, 0.0)
    assert not limit.exempts(near)
    now, sent = 0.0, 0
    while now < 10:
        limit.charge(10_000, now)
        sent += 10_000
        now = max(now, limit.free_at()) + 0.002  # each time 2 ms late
    assert sent == pytest.approx(10_000_000, rel=0.01)
    assert UploadLimit().exempts(near)


def test_downloads_are_asked_for_at_the_rate_of_their_limit() -> None:
    limit = DownloadLimit(100.0)
    assert [limit.reserve(50, now) for now in (10.0, 10.1, 10.2)] == [10.0, 10.5, 11.0]
    assert limit.reserve(50, 20.0) == 20.0, "time without transfers is not saved up"
    assert DownloadLimit().reserve(10**9, 3.0) == 3.0
