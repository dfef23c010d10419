"""Damage control: what a partner may do to a replica, and what it may not."""

from __future__ import annotations

import math

import pytest

from swarmtrain.guard import FAR_PARTNERS_BEFORE_ACCEPTING, MIN_SAMPLES_FOR_Z, Guard


def settled_guard(norm: float = 1.0, exchanges: int = 80) -> Guard:
    guard = Guard(outer_gain=1.4)
    for index in range(exchanges):
        assert guard.judge(bytes([index % 5]), {"mlp": norm}, {"mlp": norm}).accepted
    return guard


def test_ordinary_exchanges_pass_unclipped() -> None:
    verdict = settled_guard().judge(b"p", {"mlp": 1.05}, {"mlp": 1.0})
    assert verdict.accepted
    assert not verdict.clipped


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_norms_that_are_no_numbers_are_refused(norm: float) -> None:
    verdict = settled_guard().judge(b"p", {"mlp": norm}, {"mlp": 1.0})
    assert not verdict.accepted
    assert verdict.reason == "not-finite"


def test_one_huge_vector_is_refused_and_never_counts() -> None:
    guard = settled_guard()
    before = guard.threshold("mlp", 0.0)
    assert guard.judge(b"attacker", {"mlp": 1e6}, {"mlp": 1.0}).reason == "norm-outlier"
    assert guard.threshold("mlp", 0.0) == before


def test_without_history_a_huge_vector_is_clipped_to_the_own_drift() -> None:
    verdict = Guard(outer_gain=1.0).judge(b"p", {"mlp": 100.0}, {"mlp": 1.0})
    assert verdict.accepted
    assert verdict.factors["mlp"] * 100.0 == pytest.approx(math.sqrt(2))


def test_an_attacker_at_the_threshold_cannot_raise_it() -> None:
    guard = settled_guard()
    start = guard.threshold("mlp", 0.2)
    for _ in range(500):
        # The attacker knows tau and always sends somewhat more; own drift is small and honest.
        guard.judge(b"attacker", {"mlp": 1.3 * guard.threshold("mlp", 0.2)}, {"mlp": 0.2})
    assert guard.threshold("mlp", 0.2) <= start


def test_threshold_grows_with_the_own_drift() -> None:
    guard = settled_guard(norm=1.0)
    assert guard.threshold("mlp", 5.0) == pytest.approx(math.sqrt(2) * 1.4 * 5.0)


def test_groups_are_clipped_apart() -> None:
    guard = Guard(outer_gain=1.0)
    verdict = guard.judge(b"p", {"mlp": 10.0, "norm": 0.1}, {"mlp": 1.0, "norm": 1.0})
    assert verdict.factors["mlp"] < 0.2
    assert verdict.factors["norm"] == 1.0


def test_when_everybody_is_far_it_is_not_the_partners_who_are_odd() -> None:
    guard = settled_guard(exchanges=MIN_SAMPLES_FOR_Z + 10)
    verdicts = [
        guard.judge(bytes([partner]), {"mlp": 50.0}, {"mlp": 1.0}) for partner in range(FAR_PARTNERS_BEFORE_ACCEPTING)
    ]
    assert [verdict.accepted for verdict in verdicts] == [False, False, True]
    assert verdicts[-1].clipped


def test_one_attacker_alone_never_gets_that_far() -> None:
    guard = settled_guard()
    for _ in range(50):
        assert not guard.judge(b"attacker", {"mlp": 50.0}, {"mlp": 1.0}).accepted
