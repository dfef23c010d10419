"""Lossless patches: the difference between two states, exact to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swarm_compression.acceleration import prepare
from swarm_compression.container import (
    CHECK_BYTES,
    Action,
    Codec,
    Flag,
    Header,
    Table,
    expect_layout,
    layout_tag,
    read_header,
    read_sections,
    read_table,
)
from swarm_compression.digest import Digest, digest_state, tensor_hash
from swarm_compression.errors import CorruptPatch, WrongBase, WrongHistory
from swarm_compression.limits import DEFAULT_LIMITS, Limits
from swarm_compression.spans import Cursor, Span, slices
from swarm_compression.sparse import Effort, Pending, Piece, apply_section, compare, write_patch_section
from swarm_compression.tensors import Bits, Layout, State, check_same_tensors, flat_bits
from swarm_compression.wire import Reader

Level = Literal["fast", "default", "best"]
Progress = Callable[[int], None]
EFFORTS = {"fast": Effort(1), "default": Effort(8), "best": Effort(24, history_classes=48)}
# A section is closed when it holds this many coded symbols or elements: large enough that the tables of the
# entropy coder weigh nothing, small enough that the working memory does too.
SECTION_SYMBOLS = 1 << 17
SECTION_ELEMENTS = 1 << 24
# With a history there are more classes, hence more tables.
HISTORY_SYMBOLS = 1 << 19
# Fewer elements than this do not open a section of their own because they are dense or sparse.
MIN_SECTION = 4096


def encode_patch(
    new: State,
    base: State,
    *,
    level: Level = "default",
    layout: Layout | None = None,
    absolute: bool = False,
    new_digest: Digest | None = None,
    base_digest: Digest | None = None,
    history: State | None = None,
    history_digest: Digest | None = None,
) -> bytes:
    """Encode the difference that turns `base` into `new`, without loss.

    `layout` is needed only where a NumPy dtype does not tell the kind (see `tensors`). With `absolute` the
    patch holds new values instead of steps: about twice as large, but it may be applied twice or over a
    half-applied one. `history` is the state before `base` and makes the patch smaller, at level "best" only (and not
    with `absolute`: ValueError); whoever applies the patch then needs it too. Raises LayoutMismatch if the states
    differ in names, dtypes or shapes.
    """
    return b"".join(
        stream_patch(
            new,
            base,
            level=level,
            layout=layout,
            absolute=absolute,
            new_digest=new_digest,
            base_digest=base_digest,
            history=history,
            history_digest=history_digest,
        )
    )


def stream_patch(
    new: State,
    base: State,
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
    """Yield the bytes of `encode_patch` piece by piece; both states must stay unchanged meanwhile.

    `on_progress` is told the number of elements of each slice that is looked at (tensors that changed only).
    """
    layout = layout or Layout.of(new)
    new_bits = check_same_tensors(new, layout)
    base_bits = check_same_tensors(base, layout)
    prepare(layout.elements)
    new_digest = new_digest or digest_state(new, layout)
    base_digest = base_digest or digest_state(base, layout)

    def look(span: Span) -> Piece:
        part = slice(span.start, span.stop)
        return compare(new_bits[span.tensor][part], base_bits[span.tensor][part])

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


@dataclass(frozen=True, slots=True)
class History:
    """The state before a patch's base: its flat tensors in the layout's order, and its hash."""

    bits: list[Bits]
    state_hash: bytes

    @classmethod
    def of(cls, state: State | None, layout: Layout, digest: Digest | None) -> History | None:
        """Check the layout of `state` and hash it, unless `digest` is known. Raises LayoutMismatch."""
        if state is None:
            return None
        return cls(check_same_tensors(state, layout), (digest or digest_state(state, layout)).state_hash)


def write_patch(
    layout: Layout,
    new_digest: Digest,
    base_digest: Digest,
    look: Callable[[Span], Piece],
    *,
    level: Level,
    absolute: bool,
    history: History | None,
    on_progress: Progress | None,
) -> Iterator[bytes]:
    """Yield a patch of what `look` finds, which is asked for each slice of the tensors that changed, in order."""
    if history and (level != "best" or absolute):
        raise ValueError("a history is for patches of level 'best' that are not absolute")
    table = make_table(layout, new_digest.tensor_hashes, base_digest.tensor_hashes)
    header = Header(
        Codec.PATCH,
        len(layout),
        layout.size_bytes,
        layout_tag(layout),
        new_digest.state_hash,
        base_digest.state_hash,
        Flag.IDEMPOTENT if absolute else Flag.NONE,
        history.state_hash if history else None,
    )
    yield header.encode() + table.encode()
    effort = dataclasses.replace(EFFORTS[level], absolute=absolute)
    symbols = HISTORY_SYMBOLS if history else SECTION_SYMBOLS
    pending: Pending | None = None
    for span in slices(layout, table.coded):
        kind = layout[span.tensor].kind
        if on_progress:
            on_progress(span.elements)
        piece = look(span)
        if history:
            piece = dataclasses.replace(piece, history=history.bits[span.tensor][span.start : span.stop])
        if pending and (
            pending.kind is not kind
            or pending.symbols >= symbols
            or pending.elements + span.elements > SECTION_ELEMENTS
            or (min(pending.elements, span.elements) >= MIN_SECTION and not pending.suits(piece))
        ):
            yield write_patch_section(pending, effort)
            pending = None
        pending = pending or Pending(kind)
        pending.add(piece)
    if pending:
        yield write_patch_section(pending, effort)
    yield b"\0"


def make_table(layout: Layout, new_hashes: Sequence[bytes], base_hashes: Sequence[bytes | None]) -> Table:
    """Decide per tensor: unchanged, equal to an earlier tensor (tied weights), or coded."""
    actions, same_as, checks = [], {}, {}
    seen: dict[tuple[str, int, bytes], int] = {}
    for index, (spec, new, old) in enumerate(zip(layout, new_hashes, base_hashes, strict=True)):
        key = (spec.dtype, spec.elements, new)
        if new == old:
            actions.append(Action.KEEP)
        elif key in seen:
            actions.append(Action.SAME_AS)
            same_as[index] = seen[key]
            continue
        else:
            actions.append(Action.CODED)
            checks[index] = new[:CHECK_BYTES]
        seen.setdefault(key, index)
    return Table(tuple(actions), same_as, checks)


def apply_patch(
    patch: bytes | memoryview,
    base: State,
    *,
    layout: Layout | None = None,
    base_digest: Digest | None = None,
    history: State | None = None,
    history_digest: Digest | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> dict[str, NDArray[Any]]:
    """Return the state that `patch` makes of `base`, which is left as it is.

    A base that already is the result is returned as a copy. The result's hash is verified before it is handed
    out. `history` is the state before `base`; it is looked at only if the patch needs it. Raises WrongBase or
    WrongHistory (recoverable: the patch is for other states), LayoutMismatch, LimitExceeded or CorruptPatch; nothing
    else, whatever the bytes are.
    """
    opened = _Opened.read(patch, base, layout, base_digest, limits, history, history_digest)
    result = {spec.name: np.array(base[spec.name], order="C") for spec in opened.layout}
    opened.apply(result, limits)
    return result


def apply_patch_in_place(
    patch: bytes | memoryview,
    state: State,
    *,
    layout: Layout | None = None,
    base_digest: Digest | None = None,
    history: State | None = None,
    history_digest: Digest | None = None,
    limits: Limits = DEFAULT_LIMITS,
    verify: bool = True,
    on_progress: Progress | None = None,
) -> None:
    """Turn `state` into the patch's result without a second copy of it; its arrays must be contiguous and writable.

    Raises what `apply_patch` raises. WrongBase, WrongHistory and LayoutMismatch leave the state as it was, but after
    CorruptPatch or LimitExceeded it may be half changed: work on a copy (a file, say) that can be thrown away. With
    `verify` off the hash of the result is not compared: do it elsewhere (`describe(patch).result_hash`) before the
    state is used.
    """
    opened = _Opened.read(patch, state, layout, base_digest, limits, history, history_digest)
    opened.apply(state, limits, verify=verify, on_progress=on_progress)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A patch whose header fits the state at hand."""

    reader: Reader
    header: Header
    table: Table
    layout: Layout
    digest: Digest
    history: History | None

    @classmethod
    def read(
        cls,
        patch: bytes | memoryview,
        base: State,
        layout: Layout | None,
        digest: Digest | None,
        limits: Limits,
        history: State | None,
        history_digest: Digest | None,
    ) -> _Opened:
        reader = Reader(patch)
        header = read_header(reader, limits)
        if header.codec is not Codec.PATCH or header.base_hash is None:
            raise CorruptPatch("not a patch")
        table = read_table(reader, header.tensors)
        layout = layout or Layout.of(base)
        check_same_tensors(base, layout)
        expect_layout(header, table, layout)
        digest = digest or digest_state(base, layout)
        if digest.state_hash not in (header.base_hash, header.result_hash) and not (header.flags & Flag.IDEMPOTENT):
            raise WrongBase(header.base_hash, digest.state_hash)
        before = None
        if header.history_hash and digest.state_hash != header.result_hash:
            before = History.of(history, layout, history_digest)
            if before is None or before.state_hash != header.history_hash:
                raise WrongHistory(header.history_hash, before.state_hash if before else None)
        return cls(reader, header, table, layout, digest, before)

    def apply(self, state: State, limits: Limits, *, verify: bool = True, on_progress: Progress | None = None) -> None:
        """Change `state`, which holds the digested base."""
        found = self.digest.state_hash
        if found == self.header.result_hash:
            return
        prepare(self.layout.elements)
        targets = [flat_bits(state, spec) for spec in self.layout]
        history = self.history.bits if self.history else None
        apply_sections(self.reader, self.layout, self.table, targets, limits, on_progress, history)
        if not verify:
            return
        try:
            verify_result(self.header, self.layout, self.table, targets, self.digest.tensor_hashes)
        except CorruptPatch:
            if self.header.base_hash is not None and found != self.header.base_hash:
                raise WrongBase(self.header.base_hash, found) from None
            raise


def apply_sections(
    reader: Reader,
    layout: Layout,
    table: Table,
    targets: list[Bits],
    limits: Limits,
    on_progress: Progress | None = None,
    history: list[Bits] | None = None,
) -> None:
    """Apply every section to `targets` in place, then the references between tensors."""
    cursor = Cursor(layout, table.coded)
    for section in read_sections(reader):
        kind, spans = cursor.take(section.elements)
        apply_section(section, kind, spans, targets, limits, history)
        if on_progress:
            on_progress(section.elements)
    if not cursor.exhausted:
        raise CorruptPatch("sections missing")
    for index, target in table.same_as.items():
        targets[index][:] = targets[target]


def verify_result(
    header: Header, layout: Layout, table: Table, targets: Sequence[Bits], base_hashes: Sequence[bytes]
) -> None:
    """Raise CorruptPatch, naming the first wrong tensor, unless `targets` hash to the header's result."""
    hashes = list(base_hashes)
    for index in table.coded:
        hashes[index] = tensor_hash(targets[index])
        if hashes[index][:CHECK_BYTES] != table.checks[index]:
            raise CorruptPatch(f"tensor {layout[index].name!r} comes out wrong")
    for index, target in table.same_as.items():
        hashes[index] = hashes[target]
    if Digest.combine(layout, hashes).state_hash != header.result_hash:
        raise CorruptPatch("the result has another hash than stated")
