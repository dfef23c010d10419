"""Sections of a patch: which elements changed, and by how much or to what.

Three kinds. SPARSE holds positions and steps (or absolute values, which can be applied twice), STEPS a step
for every element, PLANES every new value. The encoder takes the smallest by a quick estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from swarm_compression.container import Section, write_section
from swarm_compression.errors import CorruptPatch, LimitExceeded
from swarm_compression.limits import Limits
from swarm_compression.planes import join_float, read_planes, split_float, write_planes
from swarm_compression.positions import decode_gaps, encode_gaps, gap_width, max_symbols
from swarm_compression.spans import Span
from swarm_compression.steps import apply_steps, read_steps, steps_between, unzigzag, write_steps, zigzag
from swarm_compression.tensors import Bits, DType
from swarm_compression.wire import Reader, varint

# Above this share of changed elements a step for every element is the smaller form.
DENSE_SHARE = 0.45
STEP_VALUES = 0
ABSOLUTE_VALUES = 1


class Kind(IntEnum):
    """Section kinds of a patch."""

    SPARSE = 1
    STEPS = 2
    PLANES = 3


def changed_positions(new: Bits, base: Bits) -> NDArray[np.int64]:
    """Return the ascending positions at which the bit patterns differ."""
    per_word = 8 // new.dtype.itemsize
    whole = new.size // per_word * per_word
    if per_word == 1 or whole < 64 or new.ctypes.data % 8 or base.ctypes.data % 8:
        return np.flatnonzero(new != base)
    # Compare eight bytes at a time; look closer only where a word differs.
    words = np.flatnonzero(new[:whole].view(np.uint64) != base[:whole].view(np.uint64))
    if words.size * 4 > whole // per_word:
        return np.flatnonzero(new != base)
    tail = np.flatnonzero(new[whole:] != base[whole:]) + whole
    candidates = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    hits = candidates[new[candidates] != base[candidates]]
    return np.concatenate((hits, tail)) if tail.size else hits


@dataclass(slots=True)
class Pending:
    """A section in the making: slices whose changes are found but not yet coded."""

    kind: DType
    elements: int = 0
    visible: int = 0
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    new: list[Bits] = field(default_factory=list)
    base: list[Bits] = field(default_factory=list)

    def suits(self, elements: int, visible: int) -> bool:
        """Say whether a slice with so many changes belongs in this section: not if one is dense, one sparse."""
        return (visible > DENSE_SHARE * elements) == (self.visible > DENSE_SHARE * self.elements)

    def add(self, new: Bits, base: Bits, found: NDArray[np.int64]) -> None:
        """Append one slice of both states and the positions at which they differ."""
        self.positions.append(found + self.elements)
        self.new.append(new)
        self.base.append(base)
        self.elements += new.size
        self.visible += found.size

    @property
    def symbols(self) -> int:
        return self.elements if self.visible > DENSE_SHARE * self.elements else self.visible


def write_patch_section(pending: Pending, *, absolute: bool, level: int) -> bytes:
    """Code one section in its smallest form."""
    kind = pending.kind
    form, body = Kind.SPARSE, b""
    if pending.visible > DENSE_SHARE * pending.elements:
        new, base = np.concatenate(pending.new), np.concatenate(pending.base)
        form, body = Kind.PLANES, write_planes(split_float(new, kind), level)
        if not absolute:
            steps = write_planes(zigzag(steps_between(new, base, kind)), level)
            if len(steps) < len(body):
                form, body = Kind.STEPS, steps
    else:
        body = _write_sparse(pending, absolute=absolute, level=level)
    return write_section(form, pending.elements, pending.visible, body)


def _write_sparse(pending: Pending, *, absolute: bool, level: int) -> bytes:
    positions = np.concatenate(pending.positions)
    if not positions.size:
        return b""
    new, base = _gather(pending.new, pending.positions), _gather(pending.base, pending.positions)
    width = gap_width(positions.size, pending.elements)
    gaps = encode_gaps(positions, width)
    body = bytes([ABSOLUTE_VALUES if absolute else STEP_VALUES, width]) + varint(gaps.size)
    body += write_planes(gaps, level)
    if absolute:
        return body + write_planes(split_float(new, pending.kind), level)
    return body + write_steps(steps_between(new, base, pending.kind), level)


def _gather(parts: list[Bits], positions: list[NDArray[np.int64]]) -> Bits:
    taken, start = [], 0
    for part, found in zip(parts, positions, strict=True):
        taken.append(part[found - start])
        start += part.size
    return np.concatenate(taken)


def apply_section(section: Section, kind: DType, spans: list[Span], targets: list[Bits], limits: Limits) -> None:
    """Bring `targets` (flat tensors of the base, indexed as `spans` do) to the new values, in place."""
    reader = Reader(section.body)
    symbols = section.visible if section.kind == Kind.SPARSE else section.elements
    if symbols > limits.max_section_symbols:
        raise LimitExceeded(f"section of {symbols} symbols, at most {limits.max_section_symbols} allowed")
    if section.kind == Kind.SPARSE:
        if section.visible:
            _apply_sparse(reader, section, kind, spans, targets)
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
    form, width = reader.byte(), reader.byte()
    if form not in (STEP_VALUES, ABSOLUTE_VALUES) or width not in (1, 2):
        raise CorruptPatch("unknown form of a sparse section")
    count = reader.varint(max_symbols(section.visible, section.elements, width))
    positions = decode_gaps(read_planes(reader, count, np.dtype(f"<u{width}")), section.visible, section.elements)
    if form == STEP_VALUES:
        values = read_steps(reader, section.visible, kind.bits_dtype)
    else:
        values = join_float(read_planes(reader, section.visible, kind.bits_dtype), kind)
    start, low = 0, 0
    for span in spans:
        high = int(np.searchsorted(positions, start + span.elements))
        at = positions[low:high] + (span.start - start)
        target = targets[span.tensor]
        piece = values[low:high]
        target[at] = apply_steps(target[at], piece, kind) if form == STEP_VALUES else piece
        low, start = high, start + span.elements
