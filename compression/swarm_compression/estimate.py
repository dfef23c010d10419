"""Sizes before the work is done: what a patch would weigh, and how much has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_compression.container import CHECK_BYTES, HEADER_BYTES
from swarm_compression.spans import slices
from swarm_compression.steps import steps_between, zigzag
from swarm_compression.tensors import Layout, State, check_same_tensors, flat_bits

_SAMPLE_RUN = 4096
_WHOLE_ELEMENTS = 65536
# Share of its size that a dense section takes: exponents shrink, mantissas do not.
_DENSE_SHARE = 0.67


def count_visible(new: State, base: State, *, layout: Layout | None = None) -> int:
    """Return the number of elements whose bit patterns differ. Raises LayoutMismatch."""
    layout = layout or Layout.of(new)
    new_bits = check_same_tensors(new, layout)
    base_bits = check_same_tensors(base, layout)
    visible = 0
    for span in slices(layout, range(len(layout))):
        part = slice(span.start, span.stop)
        visible += int(np.count_nonzero(new_bits[span.tensor][part] != base_bits[span.tensor][part]))
    return visible


def estimate_patch_size(new: State, base: State, *, layout: Layout | None = None, sample_share: float = 1 / 16) -> int:
    """Estimate the bytes of `encode_patch` from runs of elements taken at even distances.

    Tensors of up to 64 Ki elements are looked at as a whole. Raises LayoutMismatch.
    """
    layout = layout or Layout.of(new)
    check_same_tensors(new, layout)
    check_same_tensors(base, layout)
    total = float(HEADER_BYTES + 1)
    for spec in layout:
        new_bits, base_bits = flat_bits(new, spec), flat_bits(base, spec)
        stride = _SAMPLE_RUN if spec.elements <= _WHOLE_ELEMENTS else int(_SAMPLE_RUN / sample_share)
        seen, steps = 0, []
        for start in range(0, spec.elements, stride):
            left, right = new_bits[start : start + _SAMPLE_RUN], base_bits[start : start + _SAMPLE_RUN]
            seen += left.size
            at = np.flatnonzero(left != right)
            if at.size:
                steps.append(zigzag(steps_between(left[at], right[at], spec.kind)))
        if steps:
            total += CHECK_BYTES + spec.elements / 8 * _bits_per_element(np.concatenate(steps), seen)
    return int(total)


def _bits_per_element(folded: NDArray[np.unsignedinteger[Any]], seen: int) -> float:
    """Return the entropy of independent positions and steps, but never more than a dense section takes."""
    dense_bits = 8 * folded.dtype.itemsize * _DENSE_SHARE
    density = folded.size / seen
    clipped = np.minimum(folded, 255).astype(np.uint8)
    counts = np.bincount(clipped, minlength=256)
    shares = counts[counts > 0] / folded.size
    step_bits = float(-(shares * np.log2(shares)).sum()) + 8 * (folded.dtype.itemsize - 1) * counts[255] / folded.size
    hidden = 1 - density
    position_bits = -density * np.log2(density) - (hidden * np.log2(hidden) if hidden > 0 else 0)
    return float(min(1.03 * position_bits + density * step_bits, dense_bits))
