"""The schedule against values computed by hand."""

from __future__ import annotations

import pytest

from swarmtrain.schedule import Schedule

PLAIN = Schedule(peak_lr=1.0, total_steps=110, warmup_steps=10, min_ratio=0.2)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.1),  # the first step already moves
        (4, 0.5),
        (9, 1.0),
        (10, 1.0),
        (35, 0.2 + 0.8 * 0.5 * (1 + 2**-0.5)),  # a quarter of the cosine
        (60, 0.6),  # half of it
        (85, 0.2 + 0.8 * 0.5 * (1 - 2**-0.5)),
        (110, 0.2),
        (10_000, 0.2),
    ],
)
def test_rate_follows_warm_up_and_cosine(step: int, expected: float) -> None:
    assert PLAIN.lr(step) == pytest.approx(expected)


def test_rate_without_warm_up_starts_at_the_peak() -> None:
    schedule = Schedule(peak_lr=0.5, total_steps=100, min_ratio=0.0)
    assert schedule.lr(0) == 0.5
    assert schedule.lr(100) == 0.0


def test_rate_with_nothing_but_warm_up() -> None:
    schedule = Schedule(peak_lr=1.0, total_steps=4, warmup_steps=4, min_ratio=0.5)
    assert [schedule.lr(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.5]


def test_a_late_joiner_warms_up_on_top_of_the_schedule() -> None:
    schedule = Schedule(peak_lr=1.0, total_steps=110, warmup_steps=10, min_ratio=0.2, joiner_warmup_steps=5)
    assert schedule.lr(60, joined_at=60) == pytest.approx(0.6 / 5)
    assert schedule.lr(62, joined_at=60) == pytest.approx(schedule.lr(62) * 3 / 5)
    assert schedule.lr(64, joined_at=60) == pytest.approx(schedule.lr(64))
    assert schedule.lr(90, joined_at=60) == schedule.lr(90)
    assert schedule.lr(0, joined_at=0) == pytest.approx(0.1)  # there from the start: no second warm-up
    assert schedule.lr(59, joined_at=60) == 0.0


def test_rounds_are_shorter_in_the_last_twentieth() -> None:
    schedule = Schedule(peak_lr=1.0, total_steps=400)
    assert [schedule.round_steps(step, 20) for step in (0, 379, 380, 399)] == [20, 20, 5, 5]
    assert schedule.round_steps(399, 3) == 1
    assert schedule.round_steps(0, 1) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"peak_lr": 0.0},
        {"peak_lr": float("inf")},
        {"total_steps": 0},
        {"warmup_steps": -1},
        {"warmup_steps": 11},
        {"min_ratio": 1.5},
        {"joiner_warmup_steps": -1},
    ],
)
def test_impossible_schedules_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Schedule(**({"peak_lr": 1.0, "total_steps": 10} | fields))  # type: ignore[arg-type]
