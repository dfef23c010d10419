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
    return (steps << steps.dtype.type(1)) ^ _sign_fill(steps)


def _sign_fill(steps: Bits) -> Bits:
    """Return all ones where a step is negative, else zero."""
    signed = steps.view(f"<i{steps.dtype.itemsize}")
    return np.asarray((signed >> (8 * steps.dtype.itemsize - 1)).view(steps.dtype))


def unzigzag(folded: Bits) -> Bits:
    """Invert `zigzag`."""
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def write_steps(steps: Bits) -> bytes:
    """Encode non-zero steps: a bit per sign, then the magnitudes less one."""
    one = steps.dtype.type(1)
    fill = _sign_fill(steps)
    excess = (steps ^ fill) - (fill + one)  # |step| - 1
    signs = stream(np.packbits(fill.astype(bool), bitorder="little"))
    is_large = excess >= _ESCAPE
    large_count = int(np.count_nonzero(is_large))
    if large_count * 5 > steps.size:
        return signs + bytes([BYTES]) + write_planes(excess)
    packed = np.zeros((steps.size + 3) // 4 * 4, np.uint8)
    np.minimum(excess, _ESCAPE, out=packed[: steps.size], casting="unsafe")
    quads = packed.view("<u4")
    joined = (quads | quads >> np.uint32(6) | quads >> np.uint32(12) | quads >> np.uint32(18)).astype(np.uint8)
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
        quads = joined.astype("<u4")
        spread = quads | quads << np.uint32(6) | quads << np.uint32(12) | quads << np.uint32(18)
        codes = (spread & np.uint32(0x03030303)).view(np.uint8)
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
    fill = (~negative.astype(dtype)) + dtype.type(1)
    return np.asarray((excess ^ fill) + (fill + dtype.type(1)))


def unpack_flags(packed: NDArray[np.uint8], count: int) -> NDArray[np.bool_]:
    """Return `count` flags, lowest bit first; raise CorruptPatch if the bits after them are not zero."""
    flags = np.unpackbits(packed, bitorder="little").view(bool)
    if flags[count:].any():
        raise CorruptPatch("padding is not zero")
    return flags[:count]
