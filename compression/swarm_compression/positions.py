"""Sorted positions as gap symbols.

A position is coded as the number of skipped places before it. The largest symbol value means "skip that many,
no position here": for changes that are independent of each other the symbols are then independent too, and a
plain Huffman code is within a few percent of the entropy. Sortedness and uniqueness hold by construction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_compression.acceleration import kernels
from swarm_compression.errors import CorruptPatch
from swarm_compression.planes import read_planes, write_planes
from swarm_compression.wire import Reader, varint

_ESCAPES = {1: 255, 2: 65535}


def gap_width(count: int, population: int) -> int:
    """Return the cheaper symbol width in bytes for `count` positions among `population` places."""
    return 1 if count * 280 >= population else 2


def write_gaps(positions: NDArray[np.signedinteger[Any]], population: int) -> bytes:
    """Encode ascending `positions` below `population`: symbol width, number of symbols, planes."""
    width = gap_width(positions.size, population)
    symbols = encode_gaps(positions, width)
    return bytes([width]) + varint(symbols.size) + write_planes(symbols)


def read_gaps(reader: Reader, count: int, population: int) -> NDArray[np.int64]:
    """Invert `write_gaps`; raise CorruptPatch unless `count` positions below `population` come out."""
    width = reader.byte()
    if width not in _ESCAPES:
        raise CorruptPatch("unknown width of gap symbols")
    symbols = reader.varint(max_symbols(count, population, width))
    return decode_gaps(read_planes(reader, symbols, np.dtype(f"<u{width}")), count, population)


def max_symbols(count: int, population: int, width: int) -> int:
    """Return the largest number of symbols that `count` positions in `population` places can need."""
    return count + population // _ESCAPES[width]


def encode_gaps(positions: NDArray[np.integer[Any]], width: int) -> NDArray[np.unsignedinteger[Any]]:
    """Turn ascending positions into gap symbols of `width` bytes."""
    escape = _ESCAPES[width]
    if not positions.size:
        return np.empty(0, np.dtype(f"<u{width}"))
    loops = kernels()
    if loops:
        compiled = np.empty(positions.size + int(positions[-1]) // escape, np.dtype(f"<u{width}"))
        return np.asarray(compiled[: loops.gap_symbols(positions, escape, compiled)])
    gaps = np.empty(positions.size, np.int64)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    wide = np.flatnonzero(gaps >= escape)
    skips, rest = np.divmod(gaps.take(wide), escape)
    gaps[wide] = rest
    # Escapes go in before the symbol that they belong to.
    return np.insert(gaps.astype(np.dtype(f"<u{width}")), np.repeat(wide, skips), escape)


def decode_gaps(symbols: NDArray[np.unsignedinteger[Any]], count: int, population: int) -> NDArray[np.int64]:
    """Invert `encode_gaps`; raise CorruptPatch unless exactly `count` positions below `population` come out."""
    escape = _ESCAPES[symbols.dtype.itemsize]
    if count == 0 and symbols.size == 0:
        return np.empty(0, np.int64)
    loops = kernels()
    if loops:
        positions = np.empty(min(count, symbols.size), np.int64)
        if loops.positions_of(symbols, escape, population, positions) != count:
            raise CorruptPatch("wrong positions")
        return positions
    is_position = symbols != escape
    if symbols.size == 0 or not is_position[-1]:
        raise CorruptPatch("positions end in a skip")
    # Converting first is much faster than a cumulative sum that converts.
    ends = symbols.astype(np.int64)
    np.cumsum(ends, out=ends)
    if symbols.size != count:
        if np.count_nonzero(is_position) != count:
            raise CorruptPatch("wrong number of positions")
        ends = ends[is_position]
    elif not is_position.all():
        raise CorruptPatch("wrong number of positions")
    ends += np.arange(count)
    if ends[-1] >= population:
        raise CorruptPatch("position out of range")
    return ends
