"""The measure of a while: the length of a peer's own rounds."""

from __future__ import annotations

import pytest

from swarmtrain.round_pace import RoundPace


def test_before_the_first_round_nothing_is_known() -> None:
    pace = RoundPace()
    assert pace.at_most_a_round(15.0) == 15.0
    assert pace.steps_within(2.0) == 0
    assert pace.staleness(100, 60, round_steps=10, floor_s=2.0) == 4


def test_a_while_is_at_most_a_round() -> None:
    pace = RoundPace()
    pace.record(0.1, 10)
    assert pace.at_most_a_round(15.0) == pytest.approx(0.1)
    for _ in range(50):
        pace.record(60.0, 10)
    assert pace.at_most_a_round(15.0) == 15.0


def test_rounds_shorter_than_a_messages_way_do_not_make_others_stale() -> None:
    pace = RoundPace()
    pace.record(0.1, 10)  # 200 steps in two seconds
    assert pace.staleness(1000, 900, round_steps=10, floor_s=2.0) == 0
    assert pace.staleness(1000, 590, round_steps=10, floor_s=2.0) == 2


def test_long_rounds_are_counted_as_they_are() -> None:
    pace = RoundPace()
    pace.record(30.0, 10)
    assert pace.staleness(100, 55, round_steps=10, floor_s=2.0) == 4
