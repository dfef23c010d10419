"""The container that every codec of this package writes: header, tensor table, sections, end mark.

The header comes first and the sections follow in the order of the state, so that both sides can stream.
`describe` reads the header and the lengths and decodes nothing. FORMAT.md gives the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from swarm_compression.digest import layout_hash
from swarm_compression.errors import CorruptPatch, LayoutMismatch, LimitExceeded, UnsupportedFormat
from swarm_compression.limits import DEFAULT_LIMITS, Limits
from swarm_compression.tensors import Layout
from swarm_compression.wire import Reader, stream, varint

MAGIC = b"SWC"
VERSION = 1
MAX_SECTION_ELEMENTS = 1 << 26
_HEADER = struct.Struct("<3sBBBHIQ8s32s32s")
HEADER_BYTES = _HEADER.size
CHECK_BYTES = 4
_NO_HASH = bytes(32)


class Codec(IntEnum):
    """What the sections of a container hold."""

    PATCH = 1
    DENSE = 2
    BLOCKS = 3
    TOP_K = 4


class Flag(IntFlag):
    """Bits of the header's flag byte."""

    NONE = 0
    IDEMPOTENT = 1
    HISTORY = 2


class Action(IntEnum):
    """What happens to one tensor."""

    KEEP = 0
    CODED = 1
    SAME_AS = 2


@dataclass(frozen=True, slots=True)
class PatchInfo:
    """What a container says of itself; nothing of it is verified before it is decoded.

    Hashes are 32-byte state hashes (`state_hash`); `base_hash` is None where no base is needed. `visible`
    counts the elements that differ from the base (all elements of a coded tensor where there is none);
    tied tensors count once. `history_hash` is that of the state before the base where the patch needs it, else None.
    """

    codec: Codec
    version: int
    idempotent: bool
    tensors: int
    coded_tensors: int
    state_bytes: int
    visible: int
    encoded_bytes: int
    result_hash: bytes
    base_hash: bytes | None
    history_hash: bytes | None


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a container."""

    codec: Codec
    tensors: int
    state_bytes: int
    layout_tag: bytes
    result_hash: bytes
    base_hash: bytes | None = None
    flags: Flag = Flag.NONE
    history_hash: bytes | None = None

    def encode(self) -> bytes:
        return self._fixed() + (self.history_hash or b"")

    def _fixed(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.codec,
            self.flags | (Flag.HISTORY if self.history_hash else Flag.NONE),
            0,
            self.tensors,
            self.state_bytes,
            self.layout_tag,
            self.result_hash,
            self.base_hash or _NO_HASH,
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Per tensor: the action, which earlier tensor it equals, and a check of the coded ones."""

    actions: tuple[Action, ...]
    same_as: dict[int, int]
    checks: dict[int, bytes]

    @property
    def coded(self) -> list[int]:
        return [index for index, action in enumerate(self.actions) if action is Action.CODED]

    def encode(self) -> bytes:
        parts = [stream(np.array(self.actions, np.uint8))]
        parts += [varint(self.same_as[index]) for index in sorted(self.same_as)]
        parts += [self.checks[index] for index in sorted(self.checks)]
        return b"".join(parts)


def layout_tag(layout: Layout) -> bytes:
    """Return the eight bytes by which a header names the layout."""
    return layout_hash(layout)[:8]


def read_header(reader: Reader, limits: Limits = DEFAULT_LIMITS) -> Header:
    """Read and check the fixed part."""
    if reader.remaining > limits.max_input_bytes:
        raise LimitExceeded(f"{reader.remaining} bytes, at most {limits.max_input_bytes} allowed")
    fields = _HEADER.unpack(reader.take(HEADER_BYTES))
    magic, version, codec, flags, reserved, tensors, state_bytes, tag, result, base = fields
    if magic != MAGIC:
        raise CorruptPatch("not a container of swarm_compression")
    if version != VERSION:
        raise UnsupportedFormat(f"format version {version}, this release reads {VERSION}")
    try:
        codec = Codec(codec)
    except ValueError:
        raise UnsupportedFormat(f"unknown codec {codec}") from None
    if flags & ~(Flag.IDEMPOTENT | Flag.HISTORY) or reserved:
        raise UnsupportedFormat("unknown flags")
    if flags & Flag.HISTORY and (codec is not Codec.PATCH or flags & Flag.IDEMPOTENT):
        raise CorruptPatch("a history where none is possible")
    if tensors > limits.max_tensors:
        raise LimitExceeded(f"{tensors} tensors, at most {limits.max_tensors} allowed")
    if state_bytes > limits.max_state_bytes:
        raise LimitExceeded(f"{state_bytes} bytes of state, at most {limits.max_state_bytes} allowed")
    history = bytes(reader.take(len(_NO_HASH))) if flags & Flag.HISTORY else None
    return Header(codec, tensors, state_bytes, tag, result, None if base == _NO_HASH else base, Flag(flags), history)


def read_table(reader: Reader, tensors: int) -> Table:
    """Read the tensor table; an equal tensor must come earlier and must not itself be a reference."""
    try:
        actions = tuple(map(Action, reader.stream(tensors).tolist()))
    except ValueError as error:
        raise CorruptPatch("unknown tensor action") from error
    same_as = {}
    for index, action in enumerate(actions):
        if action is Action.SAME_AS:
            target = reader.varint(max(index - 1, 0))
            if actions[target] is Action.SAME_AS:
                raise CorruptPatch("reference to a reference")
            same_as[index] = target
    checks = {index: bytes(reader.take(CHECK_BYTES)) for index, action in enumerate(actions) if action is Action.CODED}
    return Table(actions, same_as, checks)


def expect_layout(header: Header, table: Table, layout: Layout) -> None:
    """Raise LayoutMismatch unless header and table fit `layout`."""
    if (
        header.tensors != len(layout)
        or header.state_bytes != layout.size_bytes
        or header.layout_tag != layout_tag(layout)
    ):
        raise LayoutMismatch(
            f"made for {header.tensors} tensors of {header.state_bytes} bytes, not for these "
            f"{len(layout)} of {layout.size_bytes} bytes (or names, dtypes, shapes differ)"
        )
    for index, target in table.same_as.items():
        left, right = layout[index], layout[target]
        if (left.dtype, left.elements) != (right.dtype, right.elements):
            raise CorruptPatch(f"tensor {left.name!r} cannot equal {right.name!r}")


@dataclass(frozen=True, slots=True)
class Section:
    """One run of elements of the coded tensors, all of one dtype."""

    kind: int
    elements: int
    visible: int
    body: memoryview


END = 0


def write_section(kind: int, elements: int, visible: int, body: bytes) -> bytes:
    """Frame one section."""
    return bytes([kind]) + varint(elements) + varint(visible) + varint(len(body)) + body


def read_sections(reader: Reader) -> Iterator[Section]:
    """Yield the sections up to the end mark, which must be the last byte."""
    while kind := reader.byte():
        elements = reader.varint(MAX_SECTION_ELEMENTS)
        visible = reader.varint(elements)
        body = reader.take(reader.varint(reader.remaining))
        yield Section(kind, elements, visible, body)
    reader.end()


def describe(data: bytes | memoryview, *, limits: Limits = DEFAULT_LIMITS) -> PatchInfo:
    """Say what `data` is without decoding it. Raises CorruptPatch or LimitExceeded."""
    reader = Reader(data)
    header = read_header(reader, limits)
    # A displacement has no table: there is nothing per tensor to say.
    coded = header.tensors if header.codec is Codec.TOP_K else len(read_table(reader, header.tensors).coded)
    visible = sum(section.visible for section in read_sections(reader))
    return PatchInfo(
        codec=header.codec,
        version=VERSION,
        idempotent=bool(header.flags & Flag.IDEMPOTENT),
        tensors=header.tensors,
        coded_tensors=coded,
        state_bytes=header.state_bytes,
        visible=visible,
        encoded_bytes=len(data),
        result_hash=header.result_hash,
        base_hash=header.base_hash,
        history_hash=header.history_hash,
    )
