"""All codecs behind one small interface, for callers that choose among them by size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swarm_compression.blocks import QuantizedBits, decode_blocks, encode_blocks
from swarm_compression.dense import decode_dense, encode_dense
from swarm_compression.estimate import estimate_patch_size
from swarm_compression.floats import from_float32, to_float32
from swarm_compression.limits import DEFAULT_LIMITS, Limits
from swarm_compression.patch import Level, apply_patch, encode_patch
from swarm_compression.tensors import Layout, State, flat_bits
from swarm_compression.top_k import ValueBits, decode_top_k, encode_top_k

# Bytes per element where nothing but the dtype decides; measured on trained weights.
_DENSE_SHARE = 0.665
_BLOCK_BYTES = {8: 0.92, 4: 0.44}


class Promise(Enum):
    """What the decoded state has to do with the encoded one."""

    LOSSLESS = "lossless"
    BOUNDED = "bounded"
    """No difference to the base is off by more than half a quantization step of its block."""
    PARTIAL = "partial"
    """Only the largest differences arrive; the rest is the sender's residual."""


class WeightCodec(Protocol):
    """Encodes a state relative to a base that both sides hold."""

    @property
    def promise(self) -> Promise: ...

    def encode(self, new: State, base: State) -> bytes: ...

    def decode(self, data: bytes, base: State, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, NDArray[Any]]:
        """Return the state. Raises only CodecError."""
        ...

    def estimate_size(self, new: State, base: State) -> int:
        """Estimate the bytes of `encode` without encoding."""
        ...


@dataclass(frozen=True, slots=True)
class PatchCodec:
    """See `patch`."""

    level: Level = "default"
    promise = Promise.LOSSLESS

    def encode(self, new: State, base: State) -> bytes:
        return encode_patch(new, base, level=self.level)

    def decode(self, data: bytes, base: State, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, NDArray[Any]]:
        return apply_patch(data, base, limits=limits)

    def estimate_size(self, new: State, base: State) -> int:
        return estimate_patch_size(new, base)


@dataclass(frozen=True, slots=True)
class DenseCodec:
    """See `dense`; the base only tells the layout."""

    promise = Promise.LOSSLESS

    def encode(self, new: State, base: State) -> bytes:
        return encode_dense(new)

    def decode(self, data: bytes, base: State, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, NDArray[Any]]:
        return decode_dense(data, Layout.of(base), limits=limits)

    def estimate_size(self, new: State, base: State) -> int:
        return int(Layout.of(new).size_bytes * _DENSE_SHARE)


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """See `blocks`."""

    bits: QuantizedBits = 8
    promise = Promise.BOUNDED

    def encode(self, new: State, base: State) -> bytes:
        return encode_blocks(new, base, bits=self.bits)

    def decode(self, data: bytes, base: State, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, NDArray[Any]]:
        return decode_blocks(data, base, limits=limits)

    def estimate_size(self, new: State, base: State) -> int:
        return int(Layout.of(new).elements * _BLOCK_BYTES[self.bits])


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """See `top_k`; for float states. The result is not hashed: any base will do."""

    k: int = 64
    bits: ValueBits = 2
    promise = Promise.PARTIAL

    def encode(self, new: State, base: State) -> bytes:
        layout = Layout.of(new)
        displacement = {}
        for spec in layout:
            moved = to_float32(flat_bits(new, spec), spec.kind) - to_float32(flat_bits(base, spec), spec.kind)
            displacement[spec.name] = moved.reshape(spec.shape)
        return encode_top_k(displacement, k=self.k, bits=self.bits)

    def decode(self, data: bytes, base: State, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, NDArray[Any]]:
        layout = Layout.of(base)
        shapes = Layout(type(spec)(spec.name, "f32", spec.shape) for spec in layout)
        entries = decode_top_k(data, shapes, limits=limits)
        result = {spec.name: np.array(base[spec.name], order="C") for spec in layout}
        for spec in layout:
            target, sparse = flat_bits(result, spec), entries[spec.name]
            with np.errstate(over="ignore", invalid="ignore"):
                moved = to_float32(target.take(sparse.positions), spec.kind) + sparse.values
            target[sparse.positions] = from_float32(moved, spec.kind)
        return result

    def estimate_size(self, new: State, base: State) -> int:
        return int(Layout.of(new).elements / 4096 * (self.k * (7.7 + self.bits) / 8 + 4))
