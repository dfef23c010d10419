"""The merge against plain float64 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarmtrain import merge as merge_module
from swarmtrain.layout import bf16_to_fp32, chunks, fp32_to_bf16
from swarmtrain.merge import WeightedReplica, merge_replicas


def replica(seed: int, size: int, tokens: int) -> WeightedReplica:
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return WeightedReplica(fp32_to_bf16(values), tokens)


def plainly(replicas: list[WeightedReplica]) -> tuple[NDArray[np.float64], float]:
    values = np.stack([bf16_to_fp32(r.bits).astype(np.float64) for r in replicas])
    mean = np.average(values, axis=0, weights=[max(1, r.tokens) for r in replicas])
    distances = np.linalg.norm(values - mean, axis=1)
    return mean, float(distances.mean() / np.linalg.norm(mean))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 300),
    tokens=st.lists(st.integers(0, 10**12), min_size=1, max_size=6),
)
def test_the_merge_is_the_token_weighted_mean(seed: int, size: int, tokens: list[int]) -> None:
    replicas = [replica(seed + index, size, count) for index, count in enumerate(tokens)]
    merge = merge_replicas(replicas)
    mean, spread = plainly(replicas)
    np.testing.assert_allclose(merge.weights, mean, rtol=1e-6, atol=1e-7)
    assert merge.weights.dtype == np.float32
    assert merge.spread == pytest.approx(spread, rel=1e-9, abs=1e-12)
    assert merge.replicas == len(tokens)
    assert merge.tokens == sum(tokens)


@pytest.mark.parametrize("size", [1, 6, 7, 8, 13, 14, 15])
def test_chunk_borders_lose_and_repeat_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [replica(1, size, 3), replica(2, size, 5)]
    whole = merge_replicas(replicas)
    monkeypatch.setattr(merge_module, "chunks", lambda size: chunks(size, 7))
    pieces = merge_replicas(replicas)
    np.testing.assert_array_equal(whole.weights, pieces.weights)
    assert pieces.spread == pytest.approx(whole.spread, rel=1e-12)


def test_more_weights_than_one_chunk() -> None:
    size = (1 << 20) + 3
    replicas = [replica(1, size, 1), replica(2, size, 3)]
    np.testing.assert_allclose(merge_replicas(replicas).weights, plainly(replicas)[0], rtol=1e-6, atol=1e-7)


def test_one_replica_is_itself() -> None:
    alone = replica(1, 50, 0)
    merge = merge_replicas([alone])
    np.testing.assert_array_equal(merge.weights, bf16_to_fp32(alone.bits))
    assert merge.spread == 0.0


def test_identical_replicas_have_no_spread() -> None:
    merge = merge_replicas([replica(1, 50, 10), replica(1, 50, 10**9)])
    assert merge.spread == pytest.approx(0.0, abs=1e-12)


def test_a_mean_of_zero_has_no_relative_spread() -> None:
    ones = fp32_to_bf16(np.ones(4, np.float32))
    merge = merge_replicas([WeightedReplica(ones, 1), WeightedReplica(ones ^ 0x8000, 1)])
    assert not merge.weights.any()
    assert merge.spread == 0.0


def test_a_peer_without_tokens_hardly_counts() -> None:
    merge = merge_replicas([replica(1, 50, 0), replica(2, 50, 10**9)])
    np.testing.assert_allclose(merge.weights, bf16_to_fp32(replica(2, 50, 0).bits), atol=1e-7)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_replicas([])
