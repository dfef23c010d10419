"""Reading and writing the small parts: bounded cursor, variable-length integers, compressed streams.

Every read is checked against the bytes at hand and every stream against the size that the decoder already
expects, so nothing a sender states is ever allocated on its word.
"""

from __future__ import annotations

import functools

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm_compression.errors import CorruptPatch

_MAX_VARINT_BYTES = 9  # 63 bits
# Below this a frame costs more than it saves.
_MIN_FRAME_BYTES = 24


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


def stream(data: NDArray[np.uint8], level: int) -> bytes:
    """Encode one stream: a varint of twice the size, plus one if the bytes are a zstd frame."""
    raw = np.ascontiguousarray(data)
    if raw.size >= _MIN_FRAME_BYTES:
        packed = compress(raw, level)
        if len(packed) < raw.size:
            return varint(2 * len(packed) + 1) + packed
    return varint(2 * raw.size) + raw.tobytes()


@functools.lru_cache(maxsize=8)
def _parameters(level: int) -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters.from_level(
        level, write_content_size=True, write_checksum=False, write_dict_id=False
    )


def compress(data: NDArray[np.uint8], level: int) -> bytes:
    """Return one zstd frame (RFC 8878) that states its content size."""
    return zstandard.ZstdCompressor(compression_params=_parameters(level)).compress(data.data)


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
