"""How many lanes are used: against simulated paths on which each lane brings so much, up to what the link carries."""

from __future__ import annotations

import pytest
from swarm_peer.lane_count import MAX_LANES, LaneCount


def settle(per_lane: float, link: float, *, start: int = 1, size: float = 1e9, rtt_s: float = 0.1) -> tuple[int, int]:
    """The lanes wanted in the end, and the most that were."""
    count = LaneCount(0.0, rtt_s, start=start)
    received, now, most = 0.0, 0.0, 0
    while now < 20.0 and received < size:
        now += 0.1
        received += 0.1 * min(link, count.wanted * per_lane)
        count.update(int(received), int(size - received), now)
        most = max(most, count.wanted)
    return count.wanted, most


@pytest.mark.parametrize(
    ("per_lane", "link", "lanes"),
    [
        (250e3, 2.5e6, 8),  # loss keeps each lane at a tenth of the link
        (1e6, 2.5e6, 4),  # two bring 2, four bring 2.5, eight no more
        (2.5e6, 2.5e6, 1),  # one fills the link
        (2.4e6, 2.5e6, 1),
    ],
)
@pytest.mark.parametrize("start", [1, 2])
def test_lanes_are_added_while_they_pay(per_lane: float, link: float, lanes: int, start: int) -> None:
    assert settle(per_lane, link, start=start)[0] == max(lanes, start)


def test_one_addition_that_does_not_pay_is_tried_and_taken_back() -> None:
    assert settle(2.5e6, 2.5e6) == (1, 2)


def test_an_addition_that_failed_against_a_quick_start_is_tried_again() -> None:
    count = LaneCount(0.0, 0.1, start=2)
    received, now = 0.0, 0.0
    while now < 15.0:
        now += 0.1
        per_lane = 1e6 if now < 2.0 else 250e3  # what a lane brings before and after its first loss
        received += 0.1 * min(2.2e6, count.wanted * per_lane)
        count.update(int(received), 10**9, now)
    assert count.wanted == 8


def test_there_are_never_more_than_eight_nor_more_than_allowed() -> None:
    assert settle(1e3, 1e9)[1] == MAX_LANES
    count = LaneCount(0.0, 0.05, start=4, most=2)
    assert count.wanted == 2


def test_a_transfer_that_is_nearly_over_adds_none() -> None:
    assert settle(250e3, 2.5e6, size=400e3) == (1, 1)


def test_what_cannot_be_opened_is_not_asked_for_again() -> None:
    count = LaneCount(0.0, 0.1, start=8)
    count.give_up_on_more(3)
    for step in range(1, 100):
        count.update(step * 300_000, 10**9, step * 0.5)
        assert count.wanted == 3
    count.give_up_on_more(0)
    assert count.wanted == 1
