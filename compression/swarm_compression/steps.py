"""Signed steps between old and new values, counted in units of the last place.

Steps are differences on the monotone integer map (`tensors.to_ordered`), modulo 2^bits: exact for every pair
of bit patterns, NaN and infinity included. Most steps of a small learning rate are one unit up or down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_compression.errors import CorruptPatch
from swarm_compression.planes import read_planes, write_planes
from swarm_compression.tensors import Bits, DType, from_ordered, to_ordered
from swarm_compression.wire import Reader, stream

# How the magnitudes of a group of steps are stored.
PAIRS_OF_BITS = 0
BYTES = 1
_ESCAPE = 3


def steps_between(new: Bits, base: Bits, kind: DType) -> Bits:
    """Return `new - base` in units of the last place, modulo 2^bits."""
    return to_ordered(new, kind) - to_ordered(base, kind)


def apply_steps(base: Bits, steps: Bits, kind: DType) -> Bits:
    """Invert `steps_between`."""
    return from_ordered(to_ordered(base, kind) + steps, kind)


def zigzag(steps: Bits) -> Bits:
    """Fold signed steps into unsigned ones of the same size: 0, -1, 1, -2, … become 0, 1, 2, 3, …"""
    signed = steps.view(f"<i{steps.dtype.itemsize}")
    sign = (signed >> (8 * steps.dtype.itemsize - 1)).view(steps.dtype)
    return (steps << steps.dtype.type(1)) ^ sign


def unzigzag(folded: Bits) -> Bits:
    """Invert `zigzag`."""
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def write_steps(steps: Bits) -> bytes:
    """Encode non-zero steps: a bit per sign, then the magnitudes less one."""
    negative = (steps >> steps.dtype.type(8 * steps.dtype.itemsize - 1)).astype(bool)
    excess = np.where(negative, ~steps, steps - steps.dtype.type(1))
    signs = stream(np.packbits(negative, bitorder="little"))
    is_large = excess >= _ESCAPE
    large_count = int(np.count_nonzero(is_large))
    if large_count * 5 > steps.size:
        return signs + bytes([BYTES]) + write_planes(excess)
    codes = np.minimum(excess, _ESCAPE).astype(np.uint8)
    packed = np.zeros((steps.size + 3) // 4 * 4, np.uint8)
    packed[: steps.size] = codes
    quads = packed.reshape(-1, 4)
    joined = (quads << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8)
    large = excess[is_large] - steps.dtype.type(_ESCAPE)
    return signs + bytes([PAIRS_OF_BITS]) + stream(joined) + write_planes(large)


def read_steps(reader: Reader, count: int, dtype: np.dtype[Any]) -> Bits:
    """Invert `write_steps` for `count` steps; raise CorruptPatch for a zero step or stray padding bits."""
    negative = unpack_flags(reader.stream((count + 7) // 8), count)
    style = reader.byte()
    if style == BYTES:
        excess = read_planes(reader, count, dtype)
    elif style == PAIRS_OF_BITS:
        joined = reader.stream((count + 3) // 4)
        quads = np.empty((joined.size, 4), np.uint8)
        for k in range(4):
            quads[:, k] = joined >> 2 * k & 3
        codes = quads.reshape(-1)
        if codes[count:].any():
            raise CorruptPatch("padding is not zero")
        excess = codes[:count].astype(dtype)
        is_large = excess == _ESCAPE
        large = read_planes(reader, int(np.count_nonzero(is_large)), dtype)
        excess[is_large] = large + dtype.type(_ESCAPE)
    else:
        raise CorruptPatch(f"unknown step style {style}")
    if excess.size and int(excess.max()) >> (8 * dtype.itemsize - 1):
        raise CorruptPatch("step out of range")
    return np.where(negative, ~excess, excess + dtype.type(1))


def unpack_flags(packed: NDArray[np.uint8], count: int) -> NDArray[np.bool_]:
    """Return `count` flags, lowest bit first; raise CorruptPatch if the bits after them are not zero."""
    flags = np.unpackbits(packed, bitorder="little").view(bool)
    if flags[count:].any():
        raise CorruptPatch("padding is not zero")
    return flags[:count]
