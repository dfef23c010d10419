"""Where each weight lies in the flat vector that trainer, node and codecs share.

A replica is one flat vector in the model's fixed parameter order; a snapshot is the same vector as BF16 bit
patterns (uint16).  This module needs no torch, so the node can check and name tensors without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


# First match wins: "input_layernorm" is a norm, although it stands in front of the attention.
_GROUP_MARKS = (
    ("embed", "embedding"),
    ("norm", "norm"),
    ("attn", "attention"),
    ("mlp", "mlp"),
    ("lm_head", "head"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor's place: elements [start, stop) of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def group(self) -> str:
        return module_group(self.name)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The fixed order of all tensors of a model."""

    spans: tuple[Span, ...]
    size: int

    @classmethod
    def of(cls, specs: Sequence[tuple[str, tuple[int, ...]]]) -> FlatLayout:
        """Builds the layout from (name, shape) pairs in the model's order."""
        spans = []
        start = 0
        for name, shape in specs:
            stop = start + math.prod(shape)
            spans.append(Span(name, tuple(shape), start, stop))
            start = stop
        return cls(tuple(spans), start)

    def views(self, flat: NDArray[np.uint16]) -> dict[str, NDArray[np.uint16]]:
        """Returns each tensor as a view into the flat snapshot."""
        return {span.name: flat[span.start : span.stop].reshape(span.shape) for span in self.spans}

    def groups(self) -> dict[str, list[slice]]:
        """Returns, per module group, the slices of the flat vector that belong to it (neighbours joined)."""
        found: dict[str, list[slice]] = {}
        for span in self.spans:
            slices = found.setdefault(span.group, [])
            if slices and slices[-1].stop == span.start:
                slices[-1] = slice(slices[-1].start, span.stop)
            else:
                slices.append(slice(span.start, span.stop))
        return found


def module_group(name: str) -> str:
    """Returns the module group of a parameter: weights of one kind move at one scale and are clipped together."""
    for mark, group in _GROUP_MARKS:
        if mark in name:
            return group
    return "other"


def bf16_to_fp32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widens BF16 bit patterns to FP32 exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds FP32 to BF16 bit patterns, to nearest even as the forward cast does; NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = ((bits[nan] >> 16) | 0x0040).astype(np.uint16)
    return rounded


def chunks(size: int, chunk: int = 1 << 20) -> Iterator[slice]:
    """Yields slices of at most `chunk` elements that cover a flat vector, to bound temporary memory."""
    for start in range(0, size, chunk):
        yield slice(start, min(start + chunk, size))
