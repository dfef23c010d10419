"""Patches from changes that were found elsewhere, such as on a GPU: positions and new values, no second state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm_compression.digest import Digest, digest_state
from swarm_compression.errors import LayoutMismatch
from swarm_compression.patch import History, Level, Progress, write_patch
from swarm_compression.spans import SLICE_ELEMENTS, Span
from swarm_compression.sparse import Piece
from swarm_compression.tensors import Bits, Layout, State, TensorSpec, check_same_tensors


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs in one tensor, both of shape (n,): flat positions, ascending, and the new bit patterns there.

    `values` has the unsigned dtype of the tensor's width, as `numpy.uint16` for BF16.
    """

    positions: NDArray[np.int64]
    values: Bits


def stream_changes(
    base: State,
    changes: Mapping[str, Changes],
    *,
    level: Level = "default",
    layout: Layout | None = None,
    absolute: bool = False,
    new_digest: Digest | None = None,
    base_digest: Digest | None = None,
    history: State | None = None,
    history_digest: Digest | None = None,
    on_progress: Progress | None = None,
) -> Iterator[bytes]:
    """Yield the bytes that `stream_patch` gives for `base` and the state that `changes` make of it.

    Tensors without an entry are unchanged. The new state is never held as a whole, only a slice at a time; without
    `new_digest` it is hashed that way first. Raises LayoutMismatch for a tensor that `base` lacks, positions that
    do not ascend or lie outside, and values of another width.
    """
    layout = layout or Layout.of(base)
    base_bits = check_same_tensors(base, layout)
    found = [_differing(bits, changes.get(spec.name), spec) for bits, spec in zip(base_bits, layout, strict=True)]
    for name in changes.keys() - {spec.name for spec in layout}:
        raise LayoutMismatch(f"changes of tensor {name!r}, which is missing")
    base_digest = base_digest or digest_state(base, layout)
    if new_digest is None:
        hashes = zip(base_digest.tensor_hashes, base_bits, found, strict=True)
        new_digest = Digest.combine(layout, (_new_hash(old, bits, changed) for old, bits, changed in hashes))

    def look(span: Span) -> Piece:
        return _piece(base_bits[span.tensor], found[span.tensor], span.start, span.stop)

    yield from write_patch(
        layout,
        new_digest,
        base_digest,
        look,
        level=level,
        absolute=absolute,
        history=History.of(history, layout, history_digest),
        on_progress=on_progress,
    )


def _differing(base: Bits, changes: Changes | None, spec: TensorSpec) -> Changes:
    """Check the changes of one tensor and leave out those that change nothing."""
    if changes is None:
        return Changes(np.empty(0, np.int64), np.empty(0, base.dtype))
    positions, values = changes.positions, changes.values
    if positions.dtype != np.int64 or values.dtype != base.dtype or positions.shape != (values.size,):
        raise LayoutMismatch(f"tensor {spec.name!r}: changes are int64 positions and as many {base.dtype} values")
    if positions.size and (positions[0] < 0 or positions[-1] >= base.size or (np.diff(positions) <= 0).any()):
        raise LayoutMismatch(f"tensor {spec.name!r}: positions of changes ascend within the tensor")
    differ = base.take(positions) != values
    return changes if differ.all() else Changes(positions[differ], values[differ])


def _piece(base: Bits, changes: Changes, start: int, stop: int) -> Piece:
    low, high = np.searchsorted(changes.positions, (start, stop))
    old = base[start:stop]
    at, values = changes.positions[low:high] - start, changes.values[low:high]
    new = old.copy()
    new[at] = values
    return Piece(new, old, at, values, old.take(at))


def _new_hash(old_hash: bytes, base: Bits, changes: Changes) -> bytes:
    if not changes.positions.size:
        return old_hash
    hasher = blake3()
    for start in range(0, base.size, SLICE_ELEMENTS):
        piece = _piece(base, changes, start, min(start + SLICE_ELEMENTS, base.size))
        hasher.update(piece.new.view(np.uint8).data)
    return hasher.digest()
