"""Damage control: what a partner may do to a replica, and what it may not."""

from __future__ import annotations

import math

import pytest

from swarmtrain.guard import DRIFT_HISTORY, MAX_FAR_PARTNERS, Guard


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
    before = guard.threshold("mlp")
    assert guard.judge(b"attacker", {"mlp": 1e6}, {"mlp": 1.0}).reason == "norm-outlier"
    assert guard.threshold("mlp") == before


def test_without_history_a_huge_vector_is_clipped_to_the_own_drift() -> None:
    verdict = Guard(outer_gain=1.0).judge(b"p", {"mlp": 100.0}, {"mlp": 1.0})
    assert verdict.accepted
    assert verdict.factors["mlp"] * 100.0 == pytest.approx(math.sqrt(2))


def test_an_attacker_at_the_threshold_cannot_raise_it() -> None:
    guard = settled_guard()
    for _ in range(DRIFT_HISTORY):  # own drift is small and honest from now on
        guard.judge(b"honest", {"mlp": 1.0}, {"mlp": 0.2})
    start = guard.threshold("mlp")
    for _ in range(500):
        # The attacker knows tau and always sends somewhat more.
        guard.judge(b"attacker", {"mlp": 1.3 * guard.threshold("mlp")}, {"mlp": 0.2})
    assert guard.threshold("mlp") <= start


def test_threshold_grows_with_the_own_drift_and_outlives_short_rounds() -> None:
    guard = settled_guard(norm=1.0)
    guard.judge(b"p", {"mlp": 1.0}, {"mlp": 5.0})
    for _ in range(DRIFT_HISTORY - 1):
        guard.judge(b"p", {"mlp": 1.0}, {"mlp": 0.1})
    assert guard.threshold("mlp") == pytest.approx(math.sqrt(2) * 1.4 * 5.0)
    guard.judge(b"p", {"mlp": 1.0}, {"mlp": 0.1})
    assert guard.threshold("mlp") == pytest.approx(1.0)


def test_groups_are_clipped_apart() -> None:
    guard = Guard(outer_gain=1.0)
    verdict = guard.judge(b"p", {"mlp": 10.0, "norm": 0.1}, {"mlp": 1.0, "norm": 1.0})
    assert verdict.factors["mlp"] < 0.2
    assert verdict.factors["norm"] == 1.0


def test_an_honest_partner_that_is_far_is_refused_once_and_then_mixed_with_clipped() -> None:
    # Two peers only: a rule that asked for several far partners could never bring them together again.
    guard = settled_guard()
    verdicts = [guard.judge(b"far", {"mlp": 50.0}, {"mlp": 1.0}) for _ in range(2)]
    assert [verdict.accepted for verdict in verdicts] == [False, True]
    assert verdicts[1].factors["mlp"] * 50.0 <= guard.threshold("mlp") + 1e-9


def test_being_far_moves_us_less_than_sitting_at_the_threshold() -> None:
    moved = {}
    for name, excess in (("far", 1000.0), ("at the threshold", 1.0)):
        guard = settled_guard()
        moved[name] = 0.0
        for _ in range(200):
            norm = excess * guard.threshold("mlp")
            verdict = guard.judge(b"attacker", {"mlp": norm}, {"mlp": 0.2})
            if verdict.accepted:
                moved[name] += norm * verdict.factors["mlp"]
    assert moved["far"] <= 0.6 * moved["at the threshold"]


def test_strangers_are_not_remembered_without_end() -> None:
    guard = settled_guard()
    for number in range(2 * MAX_FAR_PARTNERS):
        guard.judge(number.to_bytes(4, "big"), {"mlp": 1e6}, {"mlp": 1.0})
    assert len(guard._far_partners) == MAX_FAR_PARTNERS
