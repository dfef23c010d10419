"""Sizes to hold a lossless patch against: what other public systems send, and what no coder of a kind can go below."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import zstandard
from real_deltas import BF16, State
from swarm_compression.contexts import context_of
from swarm_compression.steps import steps_between


def flatten(state: State) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for _, array in sorted(state.items())])


def zstd_1(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def rival_raw(new: State, base: State) -> int:
    a, b = flatten(new), flatten(base)
    return 6 * int(np.count_nonzero(a != b))


def rival_pulse(new: State, base: State) -> int:
    a, b = flatten(new), flatten(base)
    at = np.flatnonzero(a != b).astype(np.int32)
    return len(zstd_1(np.diff(at, prepend=np.int32(0)).tobytes() + a[at].tobytes()))


def rival_gap_xor(new: State, base: State) -> int:
    a, b = flatten(new), flatten(base)
    at = np.flatnonzero(a != b)
    gaps = np.diff(at, prepend=-1) - 1
    width = np.uint16 if gaps.size == 0 or gaps.max() < 65536 else np.uint32
    return len(zstd_1(gaps.astype(width).tobytes() + (a[at] ^ b[at]).tobytes()))


def rival_dense_xor(new: State, base: State) -> int:
    a, b = flatten(new), flatten(base)
    return len(zstd_1((a ^ b).tobytes()))


RIVALS: dict[str, Callable[[State, State], int]] = {
    "int32 + values": rival_raw,
    "int32 + values, zstd": rival_pulse,
    "u16 gaps + XOR, zstd": rival_gap_xor,
    "dense XOR, zstd": rival_dense_xor,
}


def entropy_bits(counts: np.ndarray) -> float:
    counts = counts[counts > 0]
    if not counts.size:
        return 0.0
    return float((counts * (math.log2(counts.sum()) - np.log2(counts))).sum())


def floors(new: State, base: State) -> tuple[float, float]:
    """Bytes of an ideal coder: positions independent of everything, and given the old exponent; steps likewise."""
    a, b = flatten(new), flatten(base)
    changed = a != b
    steps = steps_between(a[changed], b[changed], BF16).view(np.int16)
    n = int(changed.sum())
    plain = entropy_bits(np.array([n, a.size - n])) + entropy_bits(np.unique(steps, return_counts=True)[1])
    exponents = context_of(b, BF16)
    given = 0.0
    for exponent in np.unique(exponents):
        mask = exponents == exponent
        hits = int(np.count_nonzero(changed & mask))
        given += entropy_bits(np.array([hits, int(mask.sum()) - hits]))
        given += entropy_bits(np.unique(steps[exponents[changed] == exponent], return_counts=True)[1])
    return plain / 8, given / 8
