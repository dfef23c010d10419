"""The end of a run: one token-weighted mean of the replicas, and how far apart they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swarmtrain.layout import bf16_to_fp32, chunks

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WeightedReplica:
    """One replica's snapshot, shape (weights,), uint16, and the tokens that its peer has trained on."""

    bits: NDArray[np.uint16]
    tokens: int


@dataclass(frozen=True, slots=True)
class Merge:
    """The merged weights, FP32, shape (weights,).

    `spread` is the mean over replicas of ||theta_i - mean|| / ||mean||.
    """

    weights: NDArray[np.float32]
    spread: float
    replicas: int
    tokens: int


def merge_replicas(replicas: Sequence[WeightedReplica]) -> Merge:
    """Returns the token-weighted mean of at least one replica.  Temporary memory is bounded by chunks."""
    if not replicas:
        raise ValueError("nothing to merge")
    size = replicas[0].bits.size
    total = sum(max(1, replica.tokens) for replica in replicas)
    shares = [max(1, replica.tokens) / total for replica in replicas]
    merged = np.empty(size, dtype=np.float32)
    squared_distance = np.zeros(len(replicas))
    squared_norm = 0.0
    for part in chunks(size):
        values = [bf16_to_fp32(replica.bits[part]).astype(np.float64) for replica in replicas]
        mean = sum((share * value for share, value in zip(shares, values, strict=True)), np.zeros(values[0].size))
        squared_norm += float(mean @ mean)
        for index, value in enumerate(values):
            difference = value - mean
            squared_distance[index] += float(difference @ difference)
        merged[part] = mean
    norm = math.sqrt(squared_norm)
    spread = float(np.mean(np.sqrt(squared_distance)) / norm) if norm > 0 else 0.0
    return Merge(merged, spread, len(replicas), sum(replica.tokens for replica in replicas))
