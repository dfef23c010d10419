"""Sorted positions as gap symbols.

A position is coded as the number of skipped places before it. The largest symbol value means "skip that many,
no position here": for changes that are independent of each other the symbols are then independent too, and a
plain Huffman code is within a few percent of the entropy. Sortedness and uniqueness hold by construction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_compression.errors import CorruptPatch

_ESCAPES = {1: 255, 2: 65535}


def gap_width(count: int, population: int) -> int:
    """Return the cheaper symbol width in bytes for `count` positions among `population` places."""
    return 1 if count * 280 >= population else 2


def max_symbols(count: int, population: int, width: int) -> int:
    """Return the largest number of symbols that `count` positions in `population` places can need."""
    return count + population // _ESCAPES[width]


def encode_gaps(positions: NDArray[np.integer[Any]], width: int) -> NDArray[np.unsignedinteger[Any]]:
    """Turn ascending positions into gap symbols of `width` bytes."""
    escape = _ESCAPES[width]
    gaps = np.diff(positions.astype(np.int64, copy=False), prepend=-1)
    gaps -= 1
    dtype = np.dtype(f"<u{width}")
    if not gaps.size or int(gaps.max()) < escape:
        return gaps.astype(dtype)
    skips, rest = np.divmod(gaps, escape)
    symbols = np.full(gaps.size + int(skips.sum()), escape, dtype)
    ends = np.cumsum(skips + 1) - 1
    symbols[ends] = rest
    return symbols


def decode_gaps(symbols: NDArray[np.unsignedinteger[Any]], count: int, population: int) -> NDArray[np.int64]:
    """Invert `encode_gaps`; raise CorruptPatch unless exactly `count` positions below `population` come out."""
    escape = _ESCAPES[symbols.dtype.itemsize]
    is_position = symbols != escape
    if symbols.size == 0 or not is_position[-1]:
        raise CorruptPatch("positions end in a skip")
    ends = np.cumsum(symbols, dtype=np.int64)
    if symbols.size == count and bool(is_position.all()):
        ends += np.arange(count)
    else:
        if np.count_nonzero(is_position) != count:
            raise CorruptPatch("wrong number of positions")
        ends = ends[is_position]
        ends += np.arange(count)
    if ends[-1] >= population:
        raise CorruptPatch("position out of range")
    return ends
