"""Blockwise quantized differences: 8 or 4 bits per weight against a base, the same decoded values on both sides.

Within a block of 64 elements the difference is rounded to a multiple of `largest difference / 127` (or `/ 7`). The
sender decodes its own bytes to learn what the receiver will hold; the header carries the hash of that state. Decoding
is one FP32 multiplication and one addition per weight in a fixed order, so it is exact everywhere. Tensors that are
not BF16, FP16 or FP32 travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swarm_compression.container import (
    CHECK_BYTES,
    Action,
    Codec,
    Header,
    Section,
    Table,
    expect_layout,
    layout_tag,
    read_header,
    read_sections,
    read_table,
    write_section,
)
from swarm_compression.digest import Digest, digest_state
from swarm_compression.errors import CorruptPatch, LimitExceeded, NotFinite, WrongBase
from swarm_compression.floats import LOSSY_KINDS, Float32, from_float32, read_scales, scale_bits, to_float32
from swarm_compression.limits import DEFAULT_LIMITS, Limits
from swarm_compression.patch import verify_result
from swarm_compression.planes import read_planes, write_planes
from swarm_compression.spans import Cursor, slices
from swarm_compression.sparse import Kind, apply_section
from swarm_compression.tensors import Bits, DType, Layout, State, check_same_tensors, flat_bits
from swarm_compression.wire import Reader, stream

BLOCK_ELEMENTS = 64
BLOCKS_KIND = 16
QuantizedBits = Literal[4, 8]
_LARGEST = {8: 127, 4: 7}


def encode_blocks(new: State, base: State | None, *, bits: QuantizedBits = 8, layout: Layout | None = None) -> bytes:
    """Encode `new` as a quantized difference to `base` (to zero if None).

    Raises LayoutMismatch, or NotFinite if a float of either state is NaN or infinite.
    """
    layout = layout or Layout.of(new)
    check_same_tensors(new, layout)
    if base is not None:
        check_same_tensors(base, layout)
    decoded: dict[str, Bits] = {}
    sections = []
    for spec in layout:
        new_bits = flat_bits(new, spec)
        old_bits = flat_bits(base, spec) if base is not None else np.zeros_like(new_bits)
        decoded[spec.name] = np.empty_like(new_bits)
        for span in slices(Layout([spec]), [0]):
            part = slice(span.start, span.stop)
            if spec.dtype in LOSSY_KINDS:
                body, result = _encode_slice(new_bits[part], old_bits[part], spec.kind, bits)
                sections.append(write_section(BLOCKS_KIND, span.elements, span.elements, body))
            else:
                result = new_bits[part]
                sections.append(write_section(Kind.PLANES, span.elements, span.elements, write_planes(result)))
            decoded[spec.name][part] = result
    shaped = {spec.name: decoded[spec.name].reshape(spec.shape) for spec in layout}
    digest = digest_state(shaped, layout)
    actions = (Action.CODED,) * len(layout)
    table = Table(actions, {}, {index: hashed[:CHECK_BYTES] for index, hashed in enumerate(digest.tensor_hashes)})
    header = Header(
        Codec.BLOCKS,
        len(layout),
        layout.size_bytes,
        layout_tag(layout),
        digest.state_hash,
        digest_state(base, layout).state_hash if base is not None else None,
    )
    return b"".join((header.encode(), table.encode(), *sections, b"\0"))


def decode_blocks(
    data: bytes | memoryview,
    base: State | None,
    *,
    layout: Layout | None = None,
    base_digest: Digest | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> dict[str, NDArray[Any]]:
    """Return the quantized state; `base` must be the encoder's, `layout` is needed where there is no base.

    The result's hash is verified. Raises WrongBase, LayoutMismatch, LimitExceeded or CorruptPatch, nothing else.
    """
    reader = Reader(data)
    header = read_header(reader, limits)
    if header.codec is not Codec.BLOCKS or header.flags:
        raise CorruptPatch("not a quantized state")
    table = read_table(reader, header.tensors)
    if any(action is not Action.CODED for action in table.actions):
        raise CorruptPatch("a quantized state codes every tensor")
    layout = layout or Layout.of(base or {})
    expect_layout(header, table, layout)
    if base is not None:
        check_same_tensors(base, layout)
    if header.base_hash is not None:
        digest = base_digest or (digest_state(base, layout) if base is not None else None)
        if digest is None or digest.state_hash != header.base_hash:
            raise WrongBase(header.base_hash, digest.state_hash if digest else bytes(32))
    result = _start(base if header.base_hash is not None else None, layout)
    targets = [flat_bits(result, spec) for spec in layout]
    cursor = Cursor(layout, table.coded)
    for section in read_sections(reader):
        kind, spans = cursor.take(section.elements)
        if section.kind == BLOCKS_KIND:
            if len(spans) != 1:
                raise CorruptPatch("blocks reach into a second tensor")
            part = targets[spans[0].tensor][spans[0].start : spans[0].stop]
            _decode_slice(section, part, kind, limits)
        elif section.kind == Kind.PLANES:
            apply_section(section, kind, spans, targets, limits)
        else:
            raise CorruptPatch(f"unknown section kind {section.kind}")
    if not cursor.exhausted:
        raise CorruptPatch("sections missing")
    verify_result(header, layout, table, targets, [b""] * len(layout))
    return result


def _start(base: Mapping[str, NDArray[Any]] | None, layout: Layout) -> dict[str, NDArray[Any]]:
    if base is None:
        return {spec.name: np.zeros(spec.shape, spec.kind.carrier) for spec in layout}
    return {spec.name: np.array(base[spec.name], order="C") for spec in layout}


def _encode_slice(new: Bits, base: Bits, kind: DType, bits: QuantizedBits) -> tuple[bytes, Bits]:
    """Return the body of one section and the bit patterns that it decodes to."""
    old = to_float32(base, kind)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = to_float32(new, kind) - old
    if not np.isfinite(difference).all():
        raise NotFinite("a quantized difference needs finite weights")
    padded = np.zeros(-(-difference.size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS, np.float32)
    padded[: difference.size] = difference
    rows = padded.reshape(-1, BLOCK_ELEMENTS)
    largest = _LARGEST[bits]
    scales = scale_bits(np.abs(rows).max(axis=1) / np.float32(largest))
    steps = read_scales(scales)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotients = np.where(steps > 0, np.rint(rows / steps), 0)
    levels = np.clip(quotients, -largest, largest).astype(np.int8).reshape(-1)[: difference.size]
    packed = levels.view(np.uint8) if bits == 8 else _pack_nibbles(levels)
    body = bytes([bits]) + write_planes(scales) + stream(packed)
    return body, from_float32(_dequantize(levels, scales, old), kind)


def _dequantize(levels: NDArray[np.int8], scales: Bits, old: Float32) -> Float32:
    steps = np.repeat(read_scales(scales), BLOCK_ELEMENTS)[: levels.size]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(old + levels.astype(np.float32) * steps, np.float32)


def _decode_slice(section: Section, target: Bits, kind: DType, limits: Limits) -> None:
    if kind.tag not in LOSSY_KINDS:
        raise CorruptPatch(f"blocks of {kind.tag}")
    if section.elements > limits.max_section_symbols:
        raise LimitExceeded(f"section of {section.elements} symbols")
    reader = Reader(section.body)
    bits = reader.byte()
    if bits not in _LARGEST:
        raise CorruptPatch(f"{bits} bits per element")
    scales = read_planes(reader, -(-section.elements // BLOCK_ELEMENTS), np.dtype("<u2"))
    if bits == 8:
        levels = reader.stream(section.elements).view(np.int8)
    else:
        levels = _unpack_nibbles(reader.stream((section.elements + 1) // 2), section.elements)
    reader.end()
    target[:] = from_float32(_dequantize(levels, scales, to_float32(target, kind)), kind)


def _pack_nibbles(levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    padded = np.zeros((levels.size + 1) // 2 * 2, np.uint8)
    padded[: levels.size] = levels.view(np.uint8) & 15
    return padded[0::2] | padded[1::2] << np.uint8(4)


def _unpack_nibbles(packed: NDArray[np.uint8], count: int) -> NDArray[np.int8]:
    levels = np.empty(packed.size * 2, np.uint8)
    levels[0::2], levels[1::2] = packed & 15, packed >> 4
    # Sign extension of four bits.
    return ((levels ^ np.uint8(8)).view(np.int8) - np.int8(8))[:count]
