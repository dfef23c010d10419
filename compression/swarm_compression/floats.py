"""Bit patterns to FP32 and back, the same to the bit on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_compression.errors import LayoutMismatch
from swarm_compression.tensors import Bits, DType

Float32 = NDArray[np.float32]
LOSSY_KINDS = frozenset({"bf16", "f16", "f32"})


def to_float32(bits: Bits, kind: DType) -> Float32:
    """Return the values of BF16, FP16 or FP32 bit patterns; exact."""
    if kind.tag == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind.tag == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind.tag == "f32":
        return bits.view(np.float32)
    raise LayoutMismatch(f"no lossy codec for {kind.tag}")


def from_float32(values: Float32, kind: DType) -> Bits:
    """Return bit patterns, rounded to nearest even; NaN stays NaN, too large becomes infinite."""
    if kind.tag == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        return np.asarray(np.where(np.isnan(values), quiet, rounded), np.uint16)
    if kind.tag == "f16":
        with np.errstate(over="ignore"):
            return np.asarray(values.astype(np.float16).view(np.uint16))
    if kind.tag == "f32":
        return values.view(np.uint32)
    raise LayoutMismatch(f"no lossy codec for {kind.tag}")


def scale_bits(scales: Float32) -> Bits:
    """Round non-negative finite scales up to BF16, so that nothing exceeds its scale."""
    top = (scales.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    return np.asarray(np.minimum(top, np.uint32(0x7F7F)), np.uint16)


def read_scales(bits: Bits) -> Float32:
    """Invert `scale_bits`."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
