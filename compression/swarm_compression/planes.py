"""Byte planes: arrays of integers as separate streams of bytes, most alike bytes together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_compression.tensors import Bits, DType
from swarm_compression.wire import Reader, stream

Bytes = NDArray[np.uint8]


def write_planes(values: NDArray[np.unsignedinteger[Any]]) -> bytes:
    """Encode `values` as one stream per byte, lowest byte first. Planes of zeros cost a few bytes."""
    width = values.dtype.itemsize
    if width == 1:
        return stream(values.view(np.uint8))
    shifts = (values.dtype.type(8 * k) for k in range(width))
    return b"".join(stream((values >> shift).astype(np.uint8)) for shift in shifts)


def read_planes(reader: Reader, count: int, dtype: np.dtype[Any]) -> NDArray[np.unsignedinteger[Any]]:
    """Invert `write_planes`."""
    values = reader.stream(count).astype(dtype)
    for k in range(1, dtype.itemsize):
        plane = reader.stream(count).astype(dtype)
        plane <<= dtype.type(8 * k)
        values |= plane
    return values


def split_float(bits: Bits, kind: DType) -> Bits:
    """Move the sign below the exponent's lowest bit, so that the top byte of BF16 and FP32 is the exponent
    alone.

    A rotation of the bit pattern left by one. Integers are left as they are.
    """
    if not kind.exponent_bits:
        return bits
    return (bits << bits.dtype.type(1)) | (bits >> bits.dtype.type(8 * kind.width - 1))


def join_float(rotated: Bits, kind: DType) -> Bits:
    """Invert `split_float`."""
    if not kind.exponent_bits:
        return rotated
    return (rotated >> rotated.dtype.type(1)) | (rotated << rotated.dtype.type(8 * kind.width - 1))
