"""Reading and writing the small parts: bounded cursor, variable-length integers, compressed streams.

Every read is checked against the bytes at hand and every stream against the size that the decoder already
expects, so nothing a sender states is ever allocated on its word.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm_compression.errors import CorruptPatch

_MAX_VARINT_BYTES = 9  # 63 bits
# Below this a frame costs more than it saves.
_MIN_FRAME_BYTES = 24
# A sample of so many random bytes shows 7.989 bits of entropy on average; true mantissas lie just below.
_SAMPLE_BYTES = 1 << 14
_RANDOM_BITS = 7.96


class Reader:
    """A cursor over received bytes that refuses to run past the end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.remaining:
            raise CorruptPatch(f"truncated: {size} bytes wanted, {self.remaining} left")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, maximum: int) -> int:
        """Read an unsigned LEB128 integer of at most `maximum`, in its shortest form."""
        value = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            piece = self.byte()
            value |= (piece & 0x7F) << shift
            if piece < 0x80:
                if piece == 0 and shift:
                    raise CorruptPatch("integer not in its shortest form")
                if value > maximum:
                    raise CorruptPatch(f"{value} where at most {maximum} is possible")
                return value
        raise CorruptPatch("integer too long")

    def stream(self, size: int) -> NDArray[np.uint8]:
        """Read one stream whose decoded form has exactly `size` bytes."""
        head = self.varint(2 * self.remaining + 1)
        body = self.take(head >> 1)
        if not head & 1:
            if len(body) != size:
                raise CorruptPatch(f"stored stream of {len(body)} bytes instead of {size}")
            return np.frombuffer(body, np.uint8)
        return np.frombuffer(decompress(body, size), np.uint8)

    def end(self) -> None:
        if self.remaining:
            raise CorruptPatch(f"{self.remaining} bytes after the end")


def varint(value: int) -> bytes:
    """Encode an unsigned integer as LEB128."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def stream(data: NDArray[np.uint8]) -> bytes:
    """Encode one stream: a varint of twice the size, plus one if the bytes are a zstd frame."""
    raw = np.ascontiguousarray(data)
    if raw.size >= _MIN_FRAME_BYTES and not _looks_random(raw):
        packed = compress(raw)
        if len(packed) < raw.size:
            return varint(2 * len(packed) + 1) + packed
    return varint(2 * raw.size) + raw.tobytes()


# The streams are near-independent symbols: what zstd is wanted for is its Huffman coder. A hash table of 64 entries
# and matches of at least seven bytes keep it from breaking the symbols up with chance matches, which cost up to a
# tenth of the size and most of the time; runs of equal bytes are still found.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
    write_dict_id=False,
)


def _looks_random(data: NDArray[np.uint8]) -> bool:
    """Say whether a sample of a long stream has no byte much more often than the others (mantissas, signs)."""
    if data.size < 4 * _SAMPLE_BYTES:
        return False
    counts = np.bincount(data[:: data.size // _SAMPLE_BYTES], minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) > _RANDOM_BITS


def compress(data: NDArray[np.uint8]) -> bytes:
    """Return one zstd frame (RFC 8878) that states its content size."""
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data.data)


def decompress(frame: bytes | memoryview, size: int) -> bytes:
    """Decode one zstd frame of exactly `size` bytes; raise CorruptPatch for anything else.

    `max_output_size` alone would not protect: the library allocates what the frame states.
    """
    try:
        stated = zstandard.get_frame_parameters(frame)
        if stated.content_size != size or stated.dict_id:
            raise CorruptPatch(f"frame states {stated.content_size} bytes instead of {size}")
        content = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise CorruptPatch("damaged zstd frame") from error
    if len(content) != size:
        raise CorruptPatch(f"frame holds {len(content)} bytes instead of {size}")
    return content
