"""What both sides know of an element before it is coded: the size class of its old value.

An update of a given size moves a small weight across a rounding boundary far more often than a large one. The
old value's exponent therefore tells how likely a change is, and how many units in the last place it spans.
Elements are put into classes by ranges of a context byte (for BF16 the exponent); positions are counted
within a class.

Where both sides also hold the state before the old one, its *history*, the last step of an element counts too: what
moved is likelier to move again, and which way depends on the way it went.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm_compression.steps import steps_between, zigzag
from swarm_compression.tensors import Bits, DType

Bytes = NDArray[np.uint8]
Contexts: TypeAlias = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.int64]

SYMBOLS = 64
OLD_VALUES = 256
# Groups of last steps: two or more units down, one down, none, one up, two or more up.
LAST_STEPS = 5
_FAR = 2
# What one more class costs beside its symbols: lengths and the tables of its entropy codes, in bits.
_CLASS_BITS = 1000.0
# Finding one member by its rank costs about so many times what listing a member does.
_SELECT_COST = 150
_SAMPLE_ELEMENTS = 1 << 17
_SAMPLE_CHANGES = 1 << 15
_RUN_ELEMENTS = 1 << 10
# NumPy 1.26 cannot count bits; a slower way gives the same result there.
_HAS_BIT_COUNT = hasattr(np, "bitwise_count")


def context_of(bits: Bits, kind: DType) -> Bytes:
    """Return the context byte of each element: the top byte of the bit pattern without its sign."""
    width_bits = 8 * kind.width
    if width_bits == 8:
        return (bits << np.uint8(1)).astype(np.uint8, copy=False)
    return (bits >> bits.dtype.type(width_bits - 9)).astype(np.uint8)


def contexts_of(bits: Bits, history: Bits | None, kind: DType) -> Contexts:
    """Return the context of each element: `context_of` and, above it, the group of its last step if that is known."""
    contexts = context_of(bits, kind)
    if history is None:
        return contexts
    steps = steps_between(bits, history, kind).view(f"<i{kind.width}")
    groups = np.clip(steps, -_FAR, _FAR).astype(np.int16) + np.int16(_FAR)
    return np.asarray(groups * np.int16(OLD_VALUES) + contexts, np.uint16)


class ClassIndex:
    """The elements of one slice whose context lies in `low … high - 1`, for counting and finding them."""

    __slots__ = ("_bits", "_mask", "_starts", "size")

    def __init__(self, contexts: Contexts, low: int, high: int) -> None:
        number = contexts.dtype.type
        self._mask = (contexts - number(low)) < number(high - low)
        self._bits: NDArray[np.uint64] | None = None
        if _HAS_BIT_COUNT:
            packed = np.packbits(self._mask, bitorder="little")
            words = np.zeros((packed.size + 7) // 8, np.uint64)
            words.view(np.uint8)[: packed.size] = packed
            starts = np.zeros(words.size + 1, np.int64)
            starts[1:] = np.bitwise_count(words)
            self._bits, self._starts = words, np.cumsum(starts, out=starts)
            self.size = int(self._starts[-1])
        else:
            self.size = int(np.count_nonzero(self._mask))

    def members(self) -> Positions:
        """Return the positions of all members."""
        return np.flatnonzero(self._mask)

    def rank(self, positions: Positions) -> Positions:
        """Return how many members come before each of `positions`."""
        if self._bits is None:
            return np.asarray((np.cumsum(self._mask) - self._mask)[positions])
        word = positions >> 6
        below = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        return np.asarray(self._starts[word] + np.bitwise_count(self._bits[word] & below))

    def select(self, ranks: Positions) -> Positions:
        """Return the positions of the members with the given ascending ranks, each below `size`."""
        if self._bits is None or ranks.size * _SELECT_COST > self._mask.size // 2 + self.size:
            return self.members()[ranks]
        word = np.searchsorted(self._starts, ranks, side="right") - 1
        left = (ranks - self._starts[word]).astype(np.uint8)
        bits = self._bits[word]
        offset = np.zeros(ranks.size, np.uint64)
        for half in (32, 16, 8, 4, 2, 1):
            low = np.bitwise_count(bits & np.uint64((1 << half) - 1))
            above = left >= low
            left -= np.where(above, low, np.uint8(0))
            shift = above * np.uint64(half)
            bits >>= shift
            offset += shift
        return (word << 6) + offset.astype(np.int64)


def choose_thresholds(histogram: NDArray[np.float64], most: int) -> list[int]:
    """Cut the contexts into at most `most` ranges so that the coded size is least; return the inner
    bounds.

    `histogram` counts elements by context and by folded step (0 = unchanged, larger ones share the last
    column). Solved exactly by dynamic programming over the contexts that occur.
    """
    used = np.flatnonzero(histogram.sum(axis=1))
    if used.size < 2:
        return []
    histogram = histogram[:, histogram.any(axis=0)]
    sums = np.concatenate((np.zeros((1, histogram.shape[1])), np.cumsum(histogram[used], axis=0)))
    cost = np.full((used.size + 1, used.size + 1), np.inf)
    for start in range(used.size):
        counts = sums[start + 1 :] - sums[start]
        cost[start, start + 1 :] = _x_log2_x(counts.sum(axis=1)) - _x_log2_x(counts).sum(axis=1) + _CLASS_BITS
    best = cost[0].copy()
    cuts: list[list[int]] = [[] for _ in range(used.size + 1)]
    for _ in range(most - 1):
        totals = best[:, None] + cost
        start_at = np.argmin(totals, axis=0)
        improved = totals[start_at, np.arange(used.size + 1)]
        better = improved < best - 1e-9
        if not better.any():
            break
        previous = cuts
        cuts = [
            [*previous[start_at[end]], int(start_at[end])] if better[end] else previous[end]
            for end in range(used.size + 1)
        ]
        best = np.where(better, improved, best)
    return [int(used[cut]) for cut in cuts[used.size]]


def _x_log2_x(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(counts * np.log2(np.maximum(counts, 1e-9)))


def context_histogram(
    base: list[Bits], new_changed: Bits, base_changed: Bits, kind: DType, history: tuple[list[Bits], Bits] | None = None
) -> NDArray[np.float64]:
    """Estimate the histogram that `choose_thresholds` wants, from a sample of the elements and of the changes.

    `base` are the slices of the section; the next two hold the bits of its changed elements. `history` has the same
    of the state before the base.
    """
    count = OLD_VALUES * (LAST_STEPS if history else 1)
    elements = sum(part.size for part in base)
    stride = max(elements // _SAMPLE_ELEMENTS, 1)
    before = np.concatenate([_sample(part, stride) for part in history[0]]) if history else None
    sample = contexts_of(np.concatenate([_sample(part, stride) for part in base]), before, kind)
    population = np.bincount(sample, minlength=count) * (elements / sample.size)
    every = max(base_changed.size // _SAMPLE_CHANGES, 1)
    old, new = base_changed[::every], new_changed[::every]
    symbols = np.minimum(zigzag(steps_between(new, old, kind)), SYMBOLS - 1).astype(np.int64)
    contexts = contexts_of(old, history[1][::every] if history else None, kind)
    flat = np.bincount(contexts.astype(np.int64) * SYMBOLS + symbols, minlength=count * SYMBOLS)
    histogram = flat.reshape(count, SYMBOLS) * (base_changed.size / old.size)
    histogram[:, 0] = np.maximum(population - histogram.sum(axis=1), 0)
    return np.asarray(histogram, np.float64)


def _sample(part: Bits, stride: int) -> Bits:
    """Return about one in `stride` elements: whole runs of a long slice, so that few cache lines are touched."""
    period = stride * _RUN_ELEMENTS
    periods = part.size // period
    if stride == 1 or not periods:
        return part[::stride]
    return np.asarray(part[: periods * period].reshape(periods, period)[:, :_RUN_ELEMENTS].reshape(-1))
