"""The safetensors format, read and written without copies, without torch, and with every size checked first.

A file is an 8-byte little-endian length, that many bytes of JSON (name to dtype, shape and data_offsets),
and the tensors' bytes without gaps. The format is the safetensors library's, to which the tests compare
this; reading here also serves BF16 without torch, and copies a tensor straight from disk to where it
belongs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}
_MAX_HEADER_BYTES = 64 << 20  # a header needs about 100 bytes a tensor; the library's own cap is 100 MB
_MAX_DIMENSIONS = 8
_WRITE_BYTES = 16 << 20


class TensorFileError(Exception):
    """A file that is not well-formed safetensors; the message is one line without the file's name."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as bytes: dtype as the format spells it, shape, and its little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in a file: dtype, shape, and [start, stop) in bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def encode_tensors(
    tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yields a safetensors file piece by piece. `ValueError` where bytes and shape disagree."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if tensor.data.nbytes != size:
            raise ValueError(f"tensor {name}: {tensor.data.nbytes} bytes instead of {size}")
        offsets = [position, position + size]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        flat = tensor.data.cast("B") if tensor.data.nbytes else memoryview(b"")
        for start in range(0, len(flat), _WRITE_BYTES):
            yield flat[start : start + _WRITE_BYTES]


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Reads a file's header: name to entry, in file order. Allocates nothing for the tensors.

    Raises `TensorFileError` for anything malformed: truncated, trailing bytes, overlapping or missing
    ranges, unknown dtypes, impossible shapes, a header above its cap. `OSError` passes through.
    """
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or length > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise TensorFileError("not a safetensors file, or cut off in its header")
        text = file.read(length)
    return parse_header(text, file_bytes)


def parse_header(text: bytes, file_bytes: int) -> dict[str, TensorEntry]:
    """Reads the JSON of a header, as `read_entries` does, of a file of `file_bytes` bytes in all.

    Raises `TensorFileError`, whatever the bytes are.
    """
    length = len(text)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise TensorFileError("the header is not valid JSON") from error
    if not isinstance(header, dict):
        raise TensorFileError("the header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            raise TensorFileError(f"tensor {name[:100]!r} overlaps another, or bytes before it belong to none")
        position = entry.stop
    if position != file_bytes:
        raise TensorFileError(f"the file has {file_bytes} bytes, its header describes {position}")
    return entries


def read_into(path: Path, destinations: Mapping[str, tuple[TensorEntry, memoryview]]) -> None:
    """Fills each writable buffer with its tensor's bytes; `TensorFileError` if the file has been cut."""
    with path.open("rb", buffering=0) as file:
        for name, (entry, buffer) in destinations.items():
            file.seek(entry.start)
            left = buffer.cast("B") if buffer.nbytes else memoryview(b"")
            if len(left) != entry.stop - entry.start:
                raise ValueError(f"tensor {name}: buffer of {len(left)} bytes")
            while left:
                count = file.readinto(left)
                if not count:
                    raise TensorFileError(f"cut off in tensor {name[:100]!r}")
                left = left[count:]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is repeated")
    return result


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    if not _is_unicode(name):
        raise TensorFileError(f"tensor {name[:100]!a}: the name is not valid Unicode")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"tensor {name[:100]!r}: the header entry is malformed")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise TensorFileError(f"tensor {name[:100]!r}: dtype {str(dtype)[:20]!r} is not supported")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise TensorFileError(f"tensor {name[:100]!r}: impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise TensorFileError(f"tensor {name[:100]!r}: impossible offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise TensorFileError(f"tensor {name[:100]!r}: its bytes do not match its shape")
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 53 for size in value)


def _is_unicode(name: str) -> bool:
    """False for lone surrogates, which JSON can spell and nothing can encode."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
