"""Named tensors as bit patterns: dtype tags, layouts, and the monotone integer map.

A state is a mapping of names to arrays that hold *bit patterns*. NumPy has no BF16, so a `uint16` array is
read as BF16 unless a layout says otherwise; the FP8 kinds come as `uint8` with a layout. Values are never
compared or computed as floats: `+0` and `-0` differ, and NaN payloads survive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm_compression.errors import LayoutMismatch

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
State: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype tag: its code on the wire, the NumPy carrier, and how its bit patterns are ordered.

    `exponent_bits` is 0 for integers; for floats the sign is the top bit and the mantissa fills the rest.
    """

    tag: str
    code: int
    carrier: np.dtype[Any]
    exponent_bits: int

    @property
    def width(self) -> int:
        """Bytes per element."""
        return int(self.carrier.itemsize)

    @property
    def bits_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{self.width}")

    @property
    def mantissa_bits(self) -> int:
        return 8 * self.width - 1 - self.exponent_bits if self.exponent_bits else 0


def _dtypes() -> Iterator[DType]:
    yield DType("bf16", 1, np.dtype("<u2"), 8)
    yield DType("f16", 2, np.dtype("<f2"), 5)
    yield DType("f32", 3, np.dtype("<f4"), 8)
    yield DType("f64", 4, np.dtype("<f8"), 11)
    yield DType("f8_e4m3", 5, np.dtype("u1"), 4)
    yield DType("f8_e5m2", 6, np.dtype("u1"), 5)
    yield DType("bool", 7, np.dtype("?"), 0)
    for code, width in enumerate((1, 2, 4, 8)):
        yield DType(f"u{8 * width}", 16 + code, np.dtype(f"<u{width}"), 0)
        yield DType(f"i{8 * width}", 24 + code, np.dtype(f"<i{width}"), 0)


DTYPES: dict[str, DType] = {dtype.tag: dtype for dtype in _dtypes()}

# What an array means when no layout says so. uint16 is BF16: the case that this package exists for.
_DEFAULT_TAGS = {
    "uint16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bool": "bool",
    "uint8": "u8",
    "uint32": "u32",
    "uint64": "u64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a decoder must know of one tensor: name, dtype tag (see `DTYPES`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LayoutMismatch(f"tensor {self.name!r}: unknown dtype {self.dtype!r}")
        if len(self.shape) > 255 or any(side < 0 for side in self.shape):
            raise LayoutMismatch(f"tensor {self.name!r}: impossible shape {self.shape}")

    @property
    def kind(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.kind.width


class Layout(tuple[TensorSpec, ...]):
    """The specs of a state in coding order: ascending UTF-8 bytes of the name. Names are unique."""

    __slots__ = ()

    def __new__(cls, specs: Iterable[TensorSpec] = ()) -> Layout:
        ordered = sorted(specs, key=lambda spec: spec.name.encode())
        for left, right in itertools.pairwise(ordered):
            if left.name == right.name:
                raise LayoutMismatch(f"tensor {left.name!r} is listed twice")
        return super().__new__(cls, ordered)

    @classmethod
    def of(cls, state: State, dtypes: Mapping[str, str] | None = None) -> Layout:
        """Derive the layout of `state`; `dtypes` names the tag of tensors whose NumPy dtype is ambiguous."""
        specs = []
        for name, array in state.items():
            tag = (dtypes or {}).get(name) or _DEFAULT_TAGS.get(array.dtype.name)
            if tag is None:
                raise LayoutMismatch(f"tensor {name!r}: no codec for NumPy dtype {array.dtype}")
            specs.append(TensorSpec(name, tag, tuple(array.shape)))
        return cls(specs)

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self)

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self)


def flat_bits(state: State, spec: TensorSpec) -> Bits:
    """Return tensor `spec.name` of `state` as a flat, contiguous, unsigned view of its bit pattern.

    Copies only if the array is not contiguous. Raises LayoutMismatch if name, shape or width differ.
    """
    array = state.get(spec.name)
    if array is None:
        raise LayoutMismatch(f"tensor {spec.name!r} is missing")
    if tuple(array.shape) != spec.shape:
        raise LayoutMismatch(f"tensor {spec.name!r}: shape {tuple(array.shape)} instead of {spec.shape}")
    if array.dtype.itemsize != spec.kind.width or array.dtype.kind not in "buif":
        raise LayoutMismatch(f"tensor {spec.name!r}: NumPy dtype {array.dtype} cannot carry {spec.dtype}")
    if array.dtype.byteorder == ">":
        raise LayoutMismatch(f"tensor {spec.name!r}: big-endian arrays are not supported")
    return np.ascontiguousarray(array).reshape(-1).view(spec.kind.bits_dtype)


def check_same_tensors(state: State, layout: Layout) -> list[Bits]:
    """Return the flat bits of all tensors, in the layout's order.

    Raises LayoutMismatch unless `state` holds exactly the tensors of `layout`, shapes and widths included.
    """
    if len(state) != len(layout):
        raise LayoutMismatch(f"{len(state)} tensors instead of {len(layout)}")
    return [flat_bits(state, spec) for spec in layout]


def to_ordered(bits: Bits, kind: DType) -> Bits:
    """Map bit patterns to unsigned integers that ascend with the float value; integers map to themselves.

    Sign-magnitude to offset binary: one unit of the result is one unit in the last place, across zero too.
    """
    if not kind.exponent_bits:
        return bits
    top = bits.dtype.type(1 << (8 * kind.width - 1))
    signed = bits.view(f"<i{kind.width}")
    mask = (signed >> (8 * kind.width - 1)).view(bits.dtype)
    mask |= top
    mask ^= bits
    return mask


def from_ordered(ordered: Bits, kind: DType) -> Bits:
    """Invert `to_ordered`."""
    if not kind.exponent_bits:
        return ordered
    top = ordered.dtype.type(1 << (8 * kind.width - 1))
    signed = ordered.view(f"<i{kind.width}")
    mask = (~(signed >> (8 * kind.width - 1))).view(ordered.dtype)
    mask |= top
    mask ^= ordered
    return mask
