"""The CLASSED and the RECURRENT section: changes coded class by class of old values, or of these and last steps.

Each class has its own density of changes and its own sizes of steps, so its own entropy codes. Positions are
ranks among the members of the class, in the order of the section; both sides find the members from the old
values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swarm_compression.acceleration import kernels
from swarm_compression.container import Section
from swarm_compression.contexts import LAST_STEPS, OLD_VALUES, ClassIndex, Contexts, Positions, context_of, contexts_of
from swarm_compression.errors import CorruptPatch, LimitExceeded
from swarm_compression.limits import Limits
from swarm_compression.planes import read_planes, write_planes
from swarm_compression.positions import read_gaps, write_gaps
from swarm_compression.spans import SLICE_ELEMENTS, Span
from swarm_compression.steps import apply_steps, read_steps, steps_between, unzigzag, write_steps, zigzag
from swarm_compression.tensors import Bits, DType
from swarm_compression.wire import Reader, varint

MAX_CLASSES = 32
MAX_CLASSES_OF_LAST_STEPS = 64
# Above this share of changed members a step for every member is the smaller form.
_ALL_SHARE = 0.6
# The compiled loops look at so many elements at once.
_BLOCK = 64
_ALL_ONES = np.uint64(2**64 - 1)


class Mode(IntEnum):
    """How one class is coded."""

    UNCHANGED = 0
    CHANGES = 1
    ALL = 2


class Slice(Protocol):
    """What the encoder needs of one slice (see `sparse.Piece`)."""

    @property
    def new(self) -> Bits: ...
    @property
    def base(self) -> Bits: ...
    @property
    def positions(self) -> Positions: ...
    @property
    def new_changed(self) -> Bits: ...
    @property
    def base_changed(self) -> Bits: ...
    @property
    def history(self) -> Bits | None: ...


@dataclass(slots=True)
class _Class:
    low: int
    high: int
    mode: Mode
    members: int = 0
    ranks: list[NDArray[np.signedinteger[Any]]] = field(default_factory=list)
    steps: list[Bits] = field(default_factory=list)


def _classes(thresholds: list[int], histogram: NDArray[np.float64]) -> list[_Class]:
    bounds = [0, *thresholds, len(histogram)]
    classes = []
    for low, high in itertools.pairwise(bounds):
        part = histogram[low:high]
        changed = float(part[:, 1:].sum())
        share = changed / max(float(part.sum()), 1.0)
        mode = Mode.ALL if share > _ALL_SHARE else Mode.CHANGES
        classes.append(_Class(low, high, mode))
    return classes


def write_classed(
    chunks: Iterable[Slice],
    base_changed: Bits,
    kind: DType,
    thresholds: list[int],
    histogram: NDArray[np.float64],
) -> bytes:
    """Return the body of a CLASSED section: thresholds, then each class.

    `base_changed` are the old bits of all changed elements of `chunks`. Where `histogram` counts by last steps too, the
    section is a RECURRENT one, and `chunks` must have a history.
    """
    classes = _classes(thresholds, histogram)
    has_history = len(histogram) > OLD_VALUES
    inner = np.array(thresholds, _bound_dtype(has_history))
    class_numbers = np.searchsorted(inner, np.arange(len(histogram)), side="right").astype(np.uint8)
    loops = None if has_history else kernels()
    if loops:
        _collect_compiled(loops, chunks, base_changed, kind, classes)
        return _write_classes(inner, classes)
    any_ranked = any(group.mode is Mode.CHANGES for group in classes)
    for chunk in chunks:
        contexts = contexts_of(chunk.base, chunk.history if has_history else None, kind)
        if any_ranked:
            class_of = class_numbers.take(contexts.take(chunk.positions))
            steps = steps_between(chunk.new_changed, chunk.base_changed, kind)
        for number, group in enumerate(classes):
            index = ClassIndex(contexts, group.low, group.high)
            if group.mode is Mode.ALL:
                at = index.members()
                group.steps.append(steps_between(chunk.new.take(at), chunk.base.take(at), kind))
            else:
                at = np.flatnonzero(class_of == number)
                group.ranks.append(index.rank(chunk.positions.take(at)) + group.members)
                group.steps.append(steps.take(at))
            group.members += index.size
    return _write_classes(inner, classes)


def _bound_dtype(has_history: bool) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype("<u2" if has_history else "u1")


def _write_classes(inner: NDArray[np.unsignedinteger[Any]], classes: list[_Class]) -> bytes:
    body = bytes([inner.size]) + inner.tobytes()
    return body + b"".join(_write_class(group) for group in classes)


def _collect_compiled(
    loops: ModuleType, chunks: Iterable[Slice], base_changed: Bits, kind: DType, classes: list[_Class]
) -> None:
    """Fill ranks, steps and members of `classes`, as the NumPy loop of `write_classed` does."""
    counters = _Counters(classes, kind)
    is_collected = np.array([group.mode is Mode.ALL for group in classes])
    collected = np.flatnonzero(is_collected)
    class_of = counters.class_numbers.take(context_of(base_changed, kind))
    ends = np.cumsum(np.bincount(class_of, minlength=len(classes)))
    slots = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    starts = slots.copy()  # the slots of collected classes stay empty
    # A section has at most 2^26 elements.
    ranks = np.empty(class_of.size, np.int32)
    old_bits, new_bits = np.empty_like(base_changed), np.empty_like(base_changed)
    members = np.empty((3, SLICE_ELEMENTS if collected.size else 0), kind.bits_dtype)
    collections = []
    for chunk in chunks:
        for offset, block in counters.blocks(chunk.base):
            found = loops.rank_changes(
                block,
                counters.inner,
                counters.class_numbers,
                collected,
                chunk.positions,
                chunk.new_changed,
                int(np.searchsorted(chunk.positions, offset)) if offset else 0,
                offset,
                counters.totals,
                slots,
                ranks,
                old_bits,
                new_bits,
                counters.masks,
                counters.contexts,
                members,
            )
            if found:
                collections.append(members[:, :found].copy())
    steps = steps_between(new_bits, old_bits, kind)
    for group, is_whole, start, end in zip(classes, is_collected, starts, ends, strict=True):
        if not is_whole:
            group.ranks.append(ranks[start:end])
            group.steps.append(steps[start:end])
    if collections:
        numbers, old, new = np.concatenate(collections, axis=1)
        moved = steps_between(new, old, kind)
        for number in collected:
            classes[number].steps.append(moved[numbers == number])
    for group, size in zip(classes, counters.totals[:-1] - counters.totals[1:], strict=True):
        group.members = int(size)


class _Counters:
    """What the compiled loops carry from slice to slice: how many elements reach each bound, and scratch."""

    def __init__(self, classes: Sequence[_Class | _Decoded], kind: DType) -> None:
        self.inner = inner = np.array([group.low for group in classes[1:]], np.uint8)
        self.class_numbers = np.searchsorted(inner, np.arange(256), side="right").astype(np.uint8)
        self.totals = np.zeros(inner.size + 2, np.int64)
        self.masks = np.zeros(inner.size + 2, np.uint64)
        self.contexts = np.zeros(_BLOCK, np.uint8)
        self._padded = np.zeros(_BLOCK, kind.bits_dtype)

    def blocks(self, bits: Bits) -> Iterator[tuple[int, Bits]]:
        """Yield `bits` as whole blocks, then the rest padded to one; what is done to the latter is written back."""
        whole = bits.size // _BLOCK * _BLOCK
        if whole:
            self.masks[0] = _ALL_ONES
            yield 0, bits[:whole]
        rest = bits.size - whole
        if rest:
            self._padded[:rest] = bits[whole:]
            self._padded[rest:] = 0
            self.masks[0] = np.uint64((1 << rest) - 1)
            yield whole, self._padded


def _write_class(group: _Class) -> bytes:
    steps = np.concatenate(group.steps)
    if group.mode is Mode.ALL:
        return bytes([Mode.ALL]) + varint(steps.size) + write_planes(zigzag(steps))
    if not steps.size:
        return bytes([Mode.UNCHANGED])
    ranks = np.concatenate(group.ranks)
    head = bytes([Mode.CHANGES]) + varint(ranks.size)
    return head + write_gaps(ranks, group.members) + write_steps(steps)


@dataclass(slots=True)
class _Decoded:
    low: int
    high: int
    mode: Mode
    ranks: Positions
    steps: Bits
    at: int = 0
    members: int = 0

    def next_changes(self, contexts: Contexts) -> tuple[Positions, Bits]:
        """Return positions and steps of this class within the next slice."""
        index = ClassIndex(contexts, self.low, self.high)
        if self.mode is Mode.ALL:
            positions = index.members()
            end = self.at + positions.size
            if end > self.steps.size:
                raise CorruptPatch("fewer steps than members of a class")
        else:
            end = self.at + int(np.searchsorted(self.ranks[self.at :], self.members + index.size))
            positions = index.select(self.ranks[self.at : end] - self.members)
        steps = self.steps[self.at : end]
        self.at, self.members = end, self.members + index.size
        return positions, steps


def _apply_classes(classes: list[_Decoded], kind: DType, parts: list[Bits], history: list[Bits] | None) -> None:
    """Bring some slices, which are taken as one, to their new values."""
    chunk = parts[0] if len(parts) == 1 else np.concatenate(parts)
    contexts = contexts_of(chunk, np.concatenate(history) if history else None, kind)
    for decoded in classes:
        if decoded.mode is Mode.UNCHANGED:
            continue
        positions, steps = decoded.next_changes(contexts)
        chunk[positions] = apply_steps(chunk.take(positions), steps, kind)
    if len(parts) > 1:
        start = 0
        for part in parts:
            part[:] = chunk[start : start + part.size]
            start += part.size


class _CompiledClasses:
    """The same with compiled loops, all classes at once."""

    def __init__(self, loops: ModuleType, classes: list[_Decoded], kind: DType) -> None:
        self._loops, self._classes, self._kind = loops, classes, kind
        self._counters = _Counters(classes, kind)
        self._collected = np.flatnonzero([decoded.mode is Mode.ALL for decoded in classes])
        end = np.array([loops.NEVER])
        ranks, steps = [], []
        for decoded in classes:
            # A class of which all members are coded has no ranks: only its steps are looked at.
            unread = np.full(decoded.steps.size - decoded.ranks.size, loops.NEVER)
            ranks += [decoded.ranks, unread, end]
            steps += [decoded.steps, np.zeros(1, kind.bits_dtype)]
        sizes = np.array([decoded.steps.size for decoded in classes])
        self._ranks, self._steps = np.concatenate(ranks), np.concatenate(steps)
        self._ends = np.cumsum(sizes + 1) - 1
        self._slots = self._ends - sizes
        self._due = self._ranks[self._slots]

    def apply(self, chunk: Bits) -> None:
        """Bring one slice to its new values."""
        counters = self._counters
        for offset, block in counters.blocks(chunk):
            enough = self._loops.apply_ranked(
                block,
                counters.inner,
                self._collected,
                counters.totals,
                self._due,
                self._slots,
                self._ends,
                self._ranks,
                self._steps,
                1 << (8 * self._kind.width - 1),
                counters.masks,
                counters.contexts,
            )
            if not enough:
                raise CorruptPatch("fewer steps than members of a class")
            if block.size > chunk.size - offset:
                chunk[offset:] = block[: chunk.size - offset]

    def finish(self) -> None:
        """Tell each class how many of its steps were applied."""
        for decoded, slot, end in zip(self._classes, self._slots, self._ends, strict=True):
            decoded.at = decoded.steps.size - int(end - slot)


def apply_classed(
    reader: Reader,
    section: Section,
    kind: DType,
    place: tuple[list[Span], list[Bits]],
    limits: Limits,
    history: list[Bits] | None = None,
) -> None:
    """Apply a CLASSED section in place; `place` holds the spans and the flat tensors that they index.

    With `history`, the flat tensors of the state before the base, the section is a RECURRENT one.
    """
    if not kind.exponent_bits:
        raise CorruptPatch("classes of a tensor without exponents")
    classes = _read_classes(reader, section, kind, limits, has_history=history is not None)
    spans, targets = place
    loops = kernels() if kind.width < 8 and history is None else None
    if loops:
        compiled = _CompiledClasses(loops, classes, kind)
        for span in spans:
            compiled.apply(targets[span.tensor][span.start : span.stop])
        compiled.finish()
    else:
        for group in _groups(spans):
            parts = [targets[span.tensor][span.start : span.stop] for span in group]
            before = [history[span.tensor][span.start : span.stop] for span in group] if history else None
            _apply_classes(classes, kind, parts, before)
    if any(decoded.at != decoded.steps.size for decoded in classes):
        raise CorruptPatch("more changes than members of a class")


def _read_classes(
    reader: Reader, section: Section, kind: DType, limits: Limits, *, has_history: bool
) -> list[_Decoded]:
    count = reader.byte()
    if not 1 <= count < (MAX_CLASSES_OF_LAST_STEPS if has_history else MAX_CLASSES):
        raise CorruptPatch("impossible number of classes")
    dtype = _bound_dtype(has_history)
    inner = np.frombuffer(reader.take(count * dtype.itemsize), dtype)
    bounds = [0, *inner.tolist(), OLD_VALUES * (LAST_STEPS if has_history else 1)]
    classes = []
    visible, symbols = 0, 0
    for low, high in itertools.pairwise(bounds):
        if low >= high:
            raise CorruptPatch("class bounds do not ascend")
        mode = reader.byte()
        if mode == Mode.UNCHANGED:
            decoded = _Decoded(low, high, Mode.UNCHANGED, np.empty(0, np.int64), np.empty(0, kind.bits_dtype))
        elif mode == Mode.ALL:
            size = reader.varint(section.elements)
            symbols += size
            _check_symbols(symbols, limits)
            steps = unzigzag(read_planes(reader, size, kind.bits_dtype))
            visible += int(np.count_nonzero(steps))
            decoded = _Decoded(low, high, Mode.ALL, np.empty(0, np.int64), steps)
        elif mode == Mode.CHANGES:
            size = reader.varint(section.visible)
            symbols += size
            _check_symbols(symbols, limits)
            visible += size
            ranks = read_gaps(reader, size, section.elements)
            decoded = _Decoded(low, high, Mode.CHANGES, ranks, read_steps(reader, size, kind.bits_dtype))
        else:
            raise CorruptPatch(f"unknown class mode {mode}")
        classes.append(decoded)
    if visible != section.visible:
        raise CorruptPatch("section states another number of changes")
    return classes


def _check_symbols(symbols: int, limits: Limits) -> None:
    if symbols > limits.max_section_symbols:
        raise LimitExceeded(f"section of {symbols} symbols, at most {limits.max_section_symbols} allowed")


def _groups(spans: list[Span]) -> Iterator[list[Span]]:
    """Cut long spans and group short ones, so that a group fits a CPU cache."""
    group: list[Span] = []
    size = 0
    for span in spans:
        for start in range(span.start, span.stop, SLICE_ELEMENTS):
            piece = Span(span.tensor, start, min(start + SLICE_ELEMENTS, span.stop))
            if group and size + piece.elements > SLICE_ELEMENTS:
                yield group
                group, size = [], 0
            group.append(piece)
            size += piece.elements
    if group:
        yield group
