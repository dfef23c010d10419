"""The equations of the exchange, against the paper, the textbook and their own invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarmtrain.layout import FlatLayout, bf16_to_fp32, fp32_to_bf16
from swarmtrain.mixing import (
    Effort,
    largest_stable_gamma,
    mix,
    mix_weight,
    noloco_outer_step,
    noloco_target,
    outer_step,
    relative_weight,
    staleness_in_rounds,
    staleness_scale,
)
from swarmtrain.replica import MatchedReplica, NolocoReplica

F32 = NDArray[np.float32]


def vector(rng: np.random.Generator, size: int = 257, scale: float = 1.0) -> F32:
    return (scale * rng.standard_normal(size)).astype(np.float32)


def visible(own: F32, partner: F32) -> F32:
    return bf16_to_fp32(fp32_to_bf16(partner)) - bf16_to_fp32(fp32_to_bf16(own))


# ------------------------------------------------------------------------------------------------------- outer step


def test_outer_step_follows_the_design_line_by_line() -> None:
    rng = np.random.default_rng(0)
    theta, phi, m = vector(rng), vector(rng), vector(rng)
    delta = theta - phi
    expected_m = np.float32(0.5) * m + np.float32(0.7) * delta
    expected_phi = phi + expected_m
    outer_step(theta, phi, m, alpha=0.5, beta=0.7)
    np.testing.assert_allclose(m, expected_m, rtol=1e-6)
    np.testing.assert_allclose(phi, expected_phi, rtol=1e-6)
    np.testing.assert_array_equal(theta, phi)


def test_outer_step_is_the_same_for_numpy_and_torch() -> None:
    rng = np.random.default_rng(1)
    arrays = [vector(rng) for _ in range(3)]
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    outer_step(*arrays, alpha=0.5, beta=0.7)
    outer_step(*tensors, alpha=0.5, beta=0.7)
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------- the mix


def test_equal_weights_preserve_the_pairs_mean_over_thousands_of_mixes() -> None:
    rng = np.random.default_rng(2)
    replicas = [vector(rng) for _ in range(8)]
    before = np.mean([r.astype(np.float64) for r in replicas], axis=0)
    largest = 0.0
    for _ in range(5000):
        i, j = rng.choice(8, 2, replace=False)
        d_i = visible(replicas[i], replicas[j])
        d_j = visible(replicas[j], replicas[i])
        np.testing.assert_array_equal(d_i, -d_j)
        pair_before = replicas[i].astype(np.float64) + replicas[j]
        scratch_i, scratch_j = replicas[i].copy(), replicas[j].copy()
        mix(scratch_i, replicas[i], d_i, 0.5)
        mix(scratch_j, replicas[j], d_j, 0.5)
        error = np.abs(replicas[i].astype(np.float64) + replicas[j] - pair_before)
        # Rounding of the two additions: half a unit in the last place of each sum.
        bound = 0.5 * (np.spacing(np.abs(replicas[i])) + np.spacing(np.abs(replicas[j]))).astype(np.float64)
        assert (error <= bound + 1e-12).all()
        largest = max(largest, float(error.max()))
        for replica in (replicas[i], replicas[j]):  # fresh local progress, equal and opposite, keeps the mean
            kick = vector(rng, scale=1e-3)
            replica += kick
            replicas[(i + 1) % 8 if replica is replicas[i] else (j + 1) % 8] -= kick
    after = np.mean([r.astype(np.float64) for r in replicas], axis=0)
    # 40,000 roundings of about 6e-8 relative, without a preferred direction.
    assert np.abs(after - before).max() < 1e-5
    assert largest > 0.0


def test_unequal_weights_land_both_on_the_weighted_mean() -> None:
    rng = np.random.default_rng(3)
    own, partner = Effort(tokens=3000, steps=10), Effort(tokens=2500, steps=10)
    phi_i = bf16_to_fp32(fp32_to_bf16(vector(rng)))
    phi_j = bf16_to_fp32(fp32_to_bf16(vector(rng)))
    share = own.weight / (own.weight + partner.weight)
    expected = share * phi_i.astype(np.float64) + (1 - share) * phi_j
    d = visible(phi_i, phi_j)
    mix(phi_i.copy(), phi_i, d, mix_weight(relative_weight(own, partner), 0))
    mix(phi_j.copy(), phi_j, -d, mix_weight(relative_weight(partner, own), 0))
    np.testing.assert_allclose(phi_i, expected, atol=1e-6)
    np.testing.assert_allclose(phi_j, expected, atol=1e-6)


def test_invisible_progress_is_kept() -> None:
    phi = np.full(4, 1.0, np.float32)
    partner = phi + np.float32(1e-4)  # below half a unit of BF16 at 1.0
    d = visible(phi, partner)
    np.testing.assert_array_equal(d, np.zeros(4, np.float32))
    theta = phi + np.float32(2e-4)
    mix(theta, phi, d, 0.5)
    np.testing.assert_array_equal(theta, np.full(4, 1.0002, np.float32))


def test_mixing_keeps_local_progress_made_meanwhile() -> None:
    rng = np.random.default_rng(4)
    phi, local = vector(rng), vector(rng, scale=1e-2)
    theta = phi + local
    mix(theta, phi, vector(rng), 0.5)
    np.testing.assert_allclose(theta - phi, local, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- the weight


@pytest.mark.parametrize(
    ("theta", "eta", "gradient", "delay", "expected"),
    [
        # theta - eta grad, fresh
        ([0.8, 1.1], 0.05, [0.2, -0.1], 0, [0.79, 1.105]),
        # the plain stale update with delay 3 takes the same step: the gradient is merely old
        ([0.8, 1.1], 0.05, [0.2, -0.1], 3, [0.79, 1.105]),
    ],
)
def test_textbook_update(
    theta: list[float], eta: float, gradient: list[float], delay: int, expected: list[float]
) -> None:
    fast = np.array(theta, np.float32)
    # Undo the scaling of our rule to get the textbook's unscaled stale step.
    mix(fast, fast.copy(), -np.array(gradient, np.float32), eta * staleness_scale(delay) * (1 + delay))
    np.testing.assert_allclose(fast, expected, rtol=1e-6)


def test_textbook_inverse_staleness_scaling() -> None:
    # 0.1 / (1 + 2) · [0.6, -0.3] = [0.02, -0.01], to be subtracted
    theta = np.zeros(2, np.float32)
    mix(theta, np.zeros(2, np.float32), -np.array([0.6, -0.3], np.float32), 0.1 * staleness_scale(2))
    np.testing.assert_allclose(theta, [-0.02, 0.01], rtol=1e-6)


def test_mix_weight_is_half_at_equal_effort_and_falls_with_staleness() -> None:
    effort = Effort(tokens=1000, steps=10)
    assert mix_weight(relative_weight(effort, effort), 0) == 0.5
    assert mix_weight(relative_weight(effort, effort), 1) == 0.25
    assert mix_weight(relative_weight(effort, effort), 4) == pytest.approx(0.1)


@pytest.mark.parametrize(("own", "partner", "expected"), [(1, 10**9, 1.5), (10**9, 1, 0.25), (0, 0, 1.0)])
def test_relative_weight_is_capped(own: int, partner: int, expected: float) -> None:
    assert relative_weight(Effort(own, 1), Effort(partner, 1)) == expected


@pytest.mark.parametrize(
    ("own", "partner", "round_steps", "expected"),
    [(100, 100, 20, 0), (100, 81, 20, 0), (100, 60, 20, 2), (60, 100, 20, 0)],
)
def test_staleness_counts_whole_rounds_behind(own: int, partner: int, round_steps: int, expected: int) -> None:
    assert staleness_in_rounds(own, partner, round_steps) == expected


# ------------------------------------------------------------------------------------------------------------ noloco


def noloco_of_the_paper(
    phi: list[F32], theta: list[F32], delta: list[F32], *, alpha: float, beta: float, gamma: float
) -> list[F32]:
    """NoLoCo equations 1 to 3 for one pair, as printed (with the sign of appendix equation 32)."""
    n = len(phi)
    drift = [theta[i] - phi[i] for i in range(n)]  # (1)
    mean_drift = sum(drift) / n
    mean_phi = sum(phi) / n
    return [
        alpha * delta[i] + beta * mean_drift - gamma * (phi[i] - mean_phi)  # (2)
        for i in range(n)
    ]


@pytest.mark.parametrize("gamma", [0.7, 0.9, 0.4])
def test_noloco_mixer_equals_the_paper(gamma: float) -> None:
    alpha, beta = 0.5, 0.7
    rng = np.random.default_rng(5)
    phi = [vector(rng) for _ in range(2)]
    m = [np.zeros_like(phi[0]) for _ in range(2)]
    for _ in range(20):
        theta = [p + vector(rng, scale=0.1) for p in phi]
        delta = noloco_of_the_paper(phi, theta, m, alpha=alpha, beta=beta, gamma=gamma)
        expected = [p + d for p, d in zip(phi, delta, strict=True)]  # (3)
        targets = [noloco_target(theta[i], phi[i], beta=beta, gamma=gamma) for i in range(2)]
        for i in range(2):
            noloco_outer_step(phi[i], m[i], targets[i], targets[1 - i] - targets[i], alpha=alpha, gamma=gamma)
        for i in range(2):
            np.testing.assert_allclose(phi[i], expected[i], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(m[i], delta[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 2.0), (0.3, 1.82), (0.5, 1.5), (0.9, 0.38)])
def test_gamma_bound(alpha: float, limit: float) -> None:
    assert largest_stable_gamma(alpha) == pytest.approx(limit)
    layout = FlatLayout.of([("w", (4,))])
    with pytest.raises(ValueError, match="diverges"):
        NolocoReplica(torch.zeros(4), layout, alpha=alpha, beta=0.7, gamma=limit)
    NolocoReplica(torch.zeros(4), layout, alpha=alpha, beta=0.7, gamma=limit * 0.99)


@pytest.mark.parametrize(("alpha", "gamma", "grows"), [(0.5, 0.7, False), (0.5, 1.6, True), (0.9, 0.7, True)])
def test_the_bound_separates_replicas_that_meet_from_replicas_that_part(
    alpha: float, gamma: float, grows: bool
) -> None:
    """Monte-Carlo of the consensus dynamics for 64 replicas in random pairs, without training."""
    rng = np.random.default_rng(6)
    phi = rng.standard_normal((64, 16)).astype(np.float32)
    m = np.zeros_like(phi)
    for _ in range(60):
        order = rng.permutation(64)
        for i, j in zip(order[:32], order[32:], strict=True):
            target_i, target_j = phi[i].copy(), phi[j].copy()
            noloco_outer_step(phi[i], m[i], target_i, target_j - target_i, alpha=alpha, gamma=gamma)
            noloco_outer_step(phi[j], m[j], target_j, target_i - target_j, alpha=alpha, gamma=gamma)
    spread = float(np.std(phi - phi.mean(axis=0)))
    assert (spread > 1.0) is grows


# ----------------------------------------------------------------------------------------------------------- replica


def make_pair(kind: str, seed: int) -> list[MatchedReplica | NolocoReplica]:
    layout = FlatLayout.of([("model.embed_tokens.weight", (8, 4)), ("model.norm.weight", (4,))])
    start = torch.from_numpy(vector(np.random.default_rng(seed), 36))
    if kind == "matched":
        return [MatchedReplica(start.clone(), layout, alpha=0.5, beta=0.7) for _ in range(2)]
    return [NolocoReplica(start.clone(), layout, alpha=0.5, beta=0.7, gamma=0.7) for _ in range(2)]


@pytest.mark.parametrize("kind", ["matched", "noloco"])
def test_replicas_that_exchange_come_together(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = make_pair(kind, 7)
    for replica in (a, b):
        replica.theta += 0.1 * torch.randn(36, generator=generator)
    apart = float((a.theta - b.theta).norm())
    for _ in range(12):
        slots = [torch.zeros(36, dtype=torch.bfloat16) for _ in range(2)]
        for replica, slot in zip((a, b), slots, strict=True):
            replica.close_round(slot)
        a.mix(slots[0], slots[1], 0.5, {})
        b.mix(slots[1], slots[0], 0.5, {})
    assert float((a.theta - b.theta).norm()) < 0.05 * apart


@pytest.mark.parametrize("kind", ["matched", "noloco"])
def test_abandoned_exchange_is_the_peers_own_outer_step(kind: str) -> None:
    (a, _), generator = make_pair(kind, 8), torch.Generator().manual_seed(8)
    before = a.phi.clone()
    drift = 0.1 * torch.randn(36, generator=generator)
    a.theta += drift
    a.close_round(torch.zeros(36, dtype=torch.bfloat16))
    progress = 0.01 * torch.randn(36, generator=generator)
    a.theta += progress
    a.abandon()
    torch.testing.assert_close(a.phi, before + 0.7 * drift, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.theta, a.phi + progress, rtol=1e-4, atol=1e-5)


def test_a_late_noloco_mix_after_a_newer_round_still_brings_the_pair_together() -> None:
    a, b = make_pair("noloco", 10)
    b.theta += 0.5
    old = [torch.zeros(36, dtype=torch.bfloat16) for _ in range(2)]
    for replica, slot in zip((a, b), old, strict=True):
        replica.close_round(slot)
        replica.abandon()  # as when a newer round was closed and settled while the exchange was under way
    apart = float((a.theta - b.theta).norm())
    a.mix(old[0], old[1], 0.5, {})
    b.mix(old[1], old[0], 0.5, {})
    assert float((a.theta - b.theta).norm()) < apart


def test_close_round_reports_drift_per_module_group() -> None:
    a, _ = make_pair("matched", 9)
    a.theta[:32] += 0.5
    norms = a.close_round(torch.zeros(36, dtype=torch.bfloat16))
    assert norms["embedding"] == pytest.approx(0.5 * 32**0.5, rel=1e-5)
    assert norms["norm"] == 0.0
