"""Sections of a patch: which elements changed, and by how much or to what.

Five kinds. SPARSE holds positions and steps (or absolute values, which can be applied twice), CLASSED the
same per class of old values (see `contexts`), RECURRENT per class of old values and last steps, STEPS a step for
every element, PLANES every new value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from swarm_compression.acceleration import kernels
from swarm_compression.classed import apply_classed, write_classed
from swarm_compression.container import Section, write_section
from swarm_compression.contexts import Positions, choose_thresholds, context_histogram
from swarm_compression.errors import CorruptPatch, LimitExceeded
from swarm_compression.limits import Limits
from swarm_compression.planes import join_float, read_planes, split_float, write_planes
from swarm_compression.positions import read_gaps, write_gaps
from swarm_compression.spans import SLICE_ELEMENTS, Span
from swarm_compression.steps import apply_steps, read_steps, steps_between, unzigzag, write_steps, zigzag
from swarm_compression.tensors import Bits, DType
from swarm_compression.wire import Reader

# Above this share of changed elements a step for every element is the smaller form.
DENSE_SHARE = 0.45
STEP_VALUES = 0
ABSOLUTE_VALUES = 1
# Sections with fewer changes than this gain less from classes than their tables cost.
_MIN_CLASSED = 1024


class Kind(IntEnum):
    """Section kinds of a patch."""

    SPARSE = 1
    STEPS = 2
    PLANES = 3
    CLASSED = 4
    RECURRENT = 5


@dataclass(frozen=True, slots=True)
class Effort:
    """What a level spends: the most classes of old values (and last steps), and whether values are absolute."""

    classes: int
    history_classes: int = 0
    absolute: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice of both states, with the positions (within the slice) that differ and the bits found there.

    `history` is the same slice of the state before the base, where the patch may refer to it.
    """

    new: Bits
    base: Bits
    positions: Positions
    new_changed: Bits
    base_changed: Bits
    history: Bits | None = None


def compare(new: Bits, base: Bits) -> Piece:
    """Find what differs between two slices. Bit patterns are compared, never values."""
    loops = kernels()
    if loops:
        scratch = np.empty(new.size, np.int64)
        positions = scratch[: loops.find_changes(new, base, scratch)].copy()
    else:
        positions = np.flatnonzero(new != base)
    return Piece(new, base, positions, new.take(positions), base.take(positions))


def join(pieces: list[Piece]) -> Piece:
    """Lay slices end to end."""
    if len(pieces) == 1:
        return pieces[0]
    starts = np.cumsum([0] + [piece.new.size for piece in pieces[:-1]])
    return Piece(
        np.concatenate([piece.new for piece in pieces]),
        np.concatenate([piece.base for piece in pieces]),
        np.concatenate([piece.positions + start for piece, start in zip(pieces, starts, strict=True)]),
        np.concatenate([piece.new_changed for piece in pieces]),
        np.concatenate([piece.base_changed for piece in pieces]),
        np.concatenate(histories) if (histories := _histories(pieces)) else None,
    )


def _histories(pieces: list[Piece]) -> list[Bits]:
    return [piece.history for piece in pieces if piece.history is not None]


@dataclass(slots=True)
class Pending:
    """A section in the making: slices whose changes are found but not yet coded."""

    kind: DType
    elements: int = 0
    visible: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def suits(self, piece: Piece) -> bool:
        """Say whether a slice belongs in this section: not if one is dense and the other sparse."""
        is_dense = piece.positions.size > DENSE_SHARE * piece.new.size
        return is_dense == (self.visible > DENSE_SHARE * self.elements)

    def add(self, piece: Piece) -> None:
        """Append one slice."""
        self.pieces.append(piece)
        self.elements += piece.new.size
        self.visible += piece.positions.size

    @property
    def symbols(self) -> int:
        return self.elements if self.visible > DENSE_SHARE * self.elements else self.visible

    def changed(self) -> tuple[Bits, Bits]:
        """Return the new and the old bits of all changed elements."""
        return (
            np.concatenate([piece.new_changed for piece in self.pieces]),
            np.concatenate([piece.base_changed for piece in self.pieces]),
        )

    def history(self) -> tuple[list[Bits], Bits] | None:
        """Return the slices of the state before the base, and its bits of all changed elements."""
        parts = _histories(self.pieces)
        if not parts:
            return None
        changed = [part.take(piece.positions) for part, piece in zip(parts, self.pieces, strict=True)]
        return parts, np.concatenate(changed)

    def chunks(self) -> Iterator[Piece]:
        """Yield the slices, small ones joined to about `SLICE_ELEMENTS`."""
        group: list[Piece] = []
        size = 0
        for piece in self.pieces:
            if group and size + piece.new.size > SLICE_ELEMENTS:
                yield join(group)
                group, size = [], 0
            group.append(piece)
            size += piece.new.size
        if group:
            yield join(group)


def write_patch_section(pending: Pending, effort: Effort) -> bytes:
    """Code one section in the form that `effort` allows and the estimate favours; with a history, in the smaller one
    of that and of a RECURRENT section."""
    if pending.visible == 0:
        return write_section(Kind.SPARSE, pending.elements, 0, b"")
    form, body = _write_without_history(pending, effort)
    history = pending.history()
    if history and pending.kind.exponent_bits and pending.visible >= _MIN_CLASSED:
        recurrent = _write_by_class(pending, effort.history_classes, history)
        if recurrent and len(recurrent) < len(body):
            form, body = Kind.RECURRENT, recurrent
    return write_section(form, pending.elements, pending.visible, body)


def _write_without_history(pending: Pending, effort: Effort) -> tuple[Kind, bytes]:
    kind = pending.kind
    is_dense = pending.visible > DENSE_SHARE * pending.elements
    if not effort.absolute and effort.classes > 1 and kind.exponent_bits and pending.visible >= _MIN_CLASSED:
        body = _write_by_class(pending, effort.classes, None)
        if body and (not is_dense or len(body) < _plain_bytes(pending)):
            return Kind.CLASSED, body
    if not is_dense:
        return Kind.SPARSE, _write_sparse(pending, effort)
    whole = join(pending.pieces)
    planes = write_planes(split_float(whole.new, kind))
    if not effort.absolute:
        steps = write_planes(zigzag(steps_between(whole.new, whole.base, kind)))
        if len(steps) < len(planes):
            return Kind.STEPS, steps
    return Kind.PLANES, planes


def _write_by_class(pending: Pending, classes: int, history: tuple[list[Bits], Bits] | None) -> bytes:
    """Return the body of a CLASSED section, or of a RECURRENT one; nothing where a single class is best."""
    changed = pending.changed()
    histogram = context_histogram([piece.base for piece in pending.pieces], *changed, pending.kind, history)
    thresholds = choose_thresholds(histogram, classes)
    if not thresholds:
        return b""
    # Compiled loops take slices of any length; for NumPy small ones are joined.
    slices = pending.pieces if kernels() and not history else pending.chunks()
    return write_classed(slices, changed[1], pending.kind, thresholds, histogram)


def _plain_bytes(pending: Pending) -> float:
    """Return about what the elements take as planes: exponents shrink, mantissas do not."""
    return 0.66 * pending.elements * pending.kind.width


def _write_sparse(pending: Pending, effort: Effort) -> bytes:
    starts = np.cumsum([0] + [piece.new.size for piece in pending.pieces[:-1]])
    positions = np.concatenate([piece.positions + start for piece, start in zip(pending.pieces, starts, strict=True)])
    new, base = pending.changed()
    form = ABSOLUTE_VALUES if effort.absolute else STEP_VALUES
    body = bytes([form]) + write_gaps(positions, pending.elements)
    if effort.absolute:
        return body + write_planes(split_float(new, pending.kind))
    return body + write_steps(steps_between(new, base, pending.kind))


def apply_section(
    section: Section,
    kind: DType,
    spans: list[Span],
    targets: list[Bits],
    limits: Limits,
    history: list[Bits] | None = None,
) -> None:
    """Bring `targets` (flat tensors of the base, indexed as `spans` do) to the new values, in place.

    `history` are the flat tensors of the state before the base, without which no RECURRENT section is possible.
    """
    reader = Reader(section.body)
    symbols = section.elements if section.kind in (Kind.STEPS, Kind.PLANES) else section.visible
    if symbols > limits.max_section_symbols:
        raise LimitExceeded(f"section of {symbols} symbols, at most {limits.max_section_symbols} allowed")
    if section.kind == Kind.SPARSE:
        if section.visible:
            _apply_sparse(reader, section, kind, spans, targets)
    elif section.kind == Kind.CLASSED:
        apply_classed(reader, section, kind, (spans, targets), limits)
    elif section.kind == Kind.RECURRENT and history is not None:
        apply_classed(reader, section, kind, (spans, targets), limits, history)
    elif section.kind in (Kind.STEPS, Kind.PLANES):
        values = read_planes(reader, section.elements, kind.bits_dtype)
        values = unzigzag(values) if section.kind == Kind.STEPS else join_float(values, kind)
        start = 0
        for span in spans:
            part = targets[span.tensor][span.start : span.stop]
            piece = values[start : start + span.elements]
            part[:] = apply_steps(part, piece, kind) if section.kind == Kind.STEPS else piece
            start += span.elements
    else:
        raise CorruptPatch(f"unknown section kind {section.kind}")
    reader.end()


def _apply_sparse(reader: Reader, section: Section, kind: DType, spans: list[Span], targets: list[Bits]) -> None:
    form = reader.byte()
    if form not in (STEP_VALUES, ABSOLUTE_VALUES):
        raise CorruptPatch("unknown form of a sparse section")
    positions = read_gaps(reader, section.visible, section.elements)
    if form == STEP_VALUES:
        values = read_steps(reader, section.visible, kind.bits_dtype)
    else:
        values = join_float(read_planes(reader, section.visible, kind.bits_dtype), kind)
    start, low = 0, 0
    loops = kernels() if form == STEP_VALUES and kind.exponent_bits and kind.width < 8 else None
    for span in spans:
        high = low + int(np.searchsorted(positions[low:], start + span.elements))
        target, piece = targets[span.tensor], values[low:high]
        if loops:
            loops.apply_at(target, positions[low:high], span.start - start, piece, 1 << (8 * kind.width - 1))
        else:
            at = positions[low:high] + (span.start - start)
            target[at] = apply_steps(target[at], piece, kind) if form == STEP_VALUES else piece
        low, start = high, start + span.elements
