"""Top-k displacements: the largest changes of every 4,096 elements, for links below a tenth of a byte per weight.

A displacement is what a peer has moved since its last exchange (FP32, any base). The k largest entries of each chunk
travel, with 2, 4 or 8 bits each and one or two scales per chunk, as in SparseLoCo (arXiv 2508.15706). Positions
are gap-coded, which takes about 7.5 bits instead of 12. What was not sent is the caller's residual:
`displacement - decoded`. Nothing here depends on a base, so a receiver may add the result to its own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm_compression.container import (
    HEADER_BYTES,
    Codec,
    Header,
    Section,
    layout_tag,
    read_header,
    read_sections,
    write_section,
)
from swarm_compression.errors import CorruptPatch, LayoutMismatch, LimitExceeded, NotFinite
from swarm_compression.floats import Float32, read_scales, scale_bits
from swarm_compression.limits import DEFAULT_LIMITS, Limits
from swarm_compression.planes import read_planes, write_planes
from swarm_compression.positions import read_gaps, write_gaps
from swarm_compression.spans import Cursor, slices
from swarm_compression.steps import unpack_flags
from swarm_compression.tensors import Layout, TensorSpec
from swarm_compression.wire import Reader, stream

CHUNK_ELEMENTS = 4096
TOP_K_KIND = 17
ValueBits = Literal[2, 4, 8]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Some entries of one tensor: ascending flat positions (int64) and FP32 values, both of shape (n,)."""

    positions: NDArray[np.int64]
    values: Float32


def displacement_layout(displacement: Mapping[str, NDArray[np.float32]]) -> Layout:
    """Return the layout of a displacement: every tensor is FP32."""
    return Layout(TensorSpec(name, "f32", tuple(array.shape)) for name, array in displacement.items())


def encode_top_k(displacement: Mapping[str, NDArray[np.float32]], *, k: int = 64, bits: ValueBits = 2) -> bytes:
    """Encode the `k` largest entries (by magnitude) of every 4,096 of each tensor; zeros are never sent.

    Raises NotFinite for NaN or infinity, LayoutMismatch for arrays that are not FP32.
    """
    if not 1 <= k <= CHUNK_ELEMENTS:
        raise ValueError(f"k must be 1 to {CHUNK_ELEMENTS}, not {k}")
    layout = displacement_layout(displacement)
    sections = []
    for spec in layout:
        if displacement[spec.name].dtype != np.float32:
            raise LayoutMismatch(f"tensor {spec.name!r}: a displacement is FP32")
        flat = np.ascontiguousarray(displacement[spec.name]).reshape(-1)
        for span in slices(Layout([spec]), [0]):
            part = flat[span.start : span.stop]
            if not np.isfinite(part).all():
                raise NotFinite(f"tensor {spec.name!r} is not finite")
            positions = _largest(part, k)
            body = _write_entries(positions, part.take(positions), part.size, bits)
            sections.append(write_section(TOP_K_KIND, part.size, positions.size, body))
    rest = b"".join((*sections, b"\0"))
    header = Header(Codec.TOP_K, len(layout), layout.size_bytes, layout_tag(layout), blake3(rest).digest())
    return header.encode() + rest


def decode_top_k(data: bytes | memoryview, layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, Sparse]:
    """Return the entries of each tensor of `layout` (see `displacement_layout`).

    The content hash is verified first. Raises LayoutMismatch, LimitExceeded or CorruptPatch, nothing else.
    """
    reader = Reader(data)
    header = read_header(reader, limits)
    if header.codec is not Codec.TOP_K or header.flags or header.base_hash is not None:
        raise CorruptPatch("not a top-k displacement")
    if header.layout_tag != layout_tag(layout) or header.state_bytes != layout.size_bytes:
        raise LayoutMismatch("made for tensors of other names or shapes")
    if blake3(memoryview(data)[HEADER_BYTES:]).digest() != header.result_hash:
        raise CorruptPatch("the content has another hash than stated")
    found: dict[int, list[Sparse]] = {index: [] for index in range(len(layout))}
    cursor = Cursor(layout, range(len(layout)))
    for section in read_sections(reader):
        _, spans = cursor.take(section.elements)
        if section.kind != TOP_K_KIND or len(spans) != 1:
            raise CorruptPatch("unknown section of a displacement")
        entries = _read_entries(section, limits)
        found[spans[0].tensor].append(Sparse(entries.positions + spans[0].start, entries.values))
    if not cursor.exhausted:
        raise CorruptPatch("sections missing")
    return {spec.name: _join(found[index]) for index, spec in enumerate(layout)}


def _join(parts: list[Sparse]) -> Sparse:
    if not parts:
        return Sparse(np.empty(0, np.int64), np.empty(0, np.float32))
    return Sparse(np.concatenate([part.positions for part in parts]), np.concatenate([part.values for part in parts]))


def _largest(part: Float32, k: int) -> NDArray[np.int64]:
    """Return the ascending positions of the k largest magnitudes of every chunk, without zeros."""
    magnitudes = np.abs(part)
    whole = part.size // CHUNK_ELEMENTS * CHUNK_ELEMENTS
    picks = []
    if whole:
        rows = magnitudes[:whole].reshape(-1, CHUNK_ELEMENTS)
        chosen = np.argpartition(rows, CHUNK_ELEMENTS - k, axis=1)[:, CHUNK_ELEMENTS - k :]
        picks.append((chosen + np.arange(rows.shape[0])[:, None] * CHUNK_ELEMENTS).reshape(-1))
    tail = magnitudes[whole:]
    if tail.size:
        count = max(1, round(k * tail.size / CHUNK_ELEMENTS))
        picks.append(np.argpartition(tail, tail.size - count)[tail.size - count :] + whole)
    if not picks:
        return np.empty(0, np.int64)
    positions = np.sort(np.concatenate(picks))
    return positions[magnitudes.take(positions) > 0]


def _level_count(bits: int) -> int:
    return 1 << (bits - 1)


def _write_entries(positions: NDArray[np.int64], values: Float32, elements: int, bits: int) -> bytes:
    chunk_of = positions // CHUNK_ELEMENTS
    chunks = -(-elements // CHUNK_ELEMENTS)
    magnitudes = np.abs(values)
    head = bytes([bits]) + write_gaps(positions, elements)
    signs = stream(np.packbits(values < 0, bitorder="little"))
    if bits == 2:
        # Two centroids per chunk: the means below and above the chunk's mean magnitude.
        middle = _chunk_mean(magnitudes, chunk_of, chunks)
        is_high = magnitudes > middle[chunk_of]
        low = scale_bits(_chunk_mean(magnitudes[~is_high], chunk_of[~is_high], chunks))
        high = scale_bits(_chunk_mean(magnitudes[is_high], chunk_of[is_high], chunks))
        levels = stream(np.packbits(is_high, bitorder="little"))
        return head + signs + write_planes(low) + write_planes(high) + levels
    largest = np.zeros(chunks, np.float32)
    np.maximum.at(largest, chunk_of, magnitudes)
    scales = scale_bits(largest)
    count = _level_count(bits)
    ratios = magnitudes / read_scales(scales)[chunk_of] * np.float32(count)
    levels_8 = np.minimum(ratios, count - 1).astype(np.uint8)
    return head + signs + write_planes(scales) + stream(levels_8)


def _chunk_mean(magnitudes: Float32, chunk_of: NDArray[np.int64], chunks: int) -> Float32:
    counts = np.maximum(np.bincount(chunk_of, minlength=chunks), 1)
    return np.asarray(np.bincount(chunk_of, magnitudes, chunks) / counts, np.float32)


def _read_entries(section: Section, limits: Limits) -> Sparse:
    if section.visible > limits.max_section_symbols:
        raise LimitExceeded(f"section of {section.visible} symbols")
    reader = Reader(section.body)
    bits, count = reader.byte(), section.visible
    chunks = -(-section.elements // CHUNK_ELEMENTS)
    if bits not in (2, 4, 8):
        raise CorruptPatch(f"{bits} bits per value")
    positions = read_gaps(reader, count, section.elements)
    chunk_of = positions // CHUNK_ELEMENTS
    negative = unpack_flags(reader.stream((count + 7) // 8), count)
    scales = read_scales(read_planes(reader, chunks, np.dtype("<u2")))
    if bits == 2:
        high = read_scales(read_planes(reader, chunks, np.dtype("<u2")))
        is_high = unpack_flags(reader.stream((count + 7) // 8), count)
        magnitudes = np.where(is_high, high[chunk_of], scales[chunk_of])
    else:
        levels = reader.stream(count)
        if count and int(levels.max()) >= _level_count(bits):
            raise CorruptPatch("level out of range")
        shares = (levels.astype(np.float32) + np.float32(0.5)) / np.float32(_level_count(bits))
        magnitudes = scales[chunk_of] * shares
    reader.end()
    if not np.isfinite(magnitudes).all():
        raise CorruptPatch("value is not finite")
    return Sparse(positions, np.where(negative, -magnitudes, magnitudes))
