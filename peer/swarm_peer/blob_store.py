"""Content-addressed blobs: their descriptors, and a bounded store in memory or in a directory.

A blob is cut into chunks. Its descriptor is `[size, chunk size, [BLAKE3 of each chunk]]`, and its id is the
BLAKE3 of the descriptor: whoever has the id can check the descriptor, and with it every chunk by itself, whoever
sent it.

The store never exceeds its quota: unpinned blobs leave in the order of last use. In a directory, a blob is two
files, data then descriptor, each written under a temporary name, synced and renamed; after a crash at any point a
blob is there entirely or not at all. Names are hex digests only. All methods are plain blocking work: call them in
a worker thread. They may be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NewType

import msgspec
from blake3 import blake3

from swarm_peer.errors import BlobInvalid

BlobId = NewType("BlobId", bytes)

HASH_BYTES: Final = 32
MIN_CHUNK_BYTES: Final = 64 * 1024
MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024
MAX_BLOB_BYTES: Final = 64 * 1024**3
# A chunk is what a stalled holder costs; more than some thousands of them make the descriptor itself large.
_SMALL_CHUNK_BYTES: Final = 256 * 1024
_LARGE_CHUNK_BYTES: Final = 1024 * 1024
_LARGE_BLOB_BYTES: Final = 64 * 1024 * 1024

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class Descriptor(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Size in bytes, size of every chunk but the last, and the BLAKE3 of each chunk."""

    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES)]
    chunk_size: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_BLOB_BYTES // MIN_CHUNK_BYTES)]

    def span(self, index: int) -> tuple[int, int]:
        """Start and end of a chunk within the blob."""
        start = index * self.chunk_size
        return start, min(start + self.chunk_size, self.size)

    def check_chunk(self, index: int, chunk: bytes | memoryview) -> bool:
        """True if `chunk` is the one that the descriptor names. Hashes up to 16 MiB: work for a thread."""
        start, end = self.span(index)
        return len(chunk) == end - start and blake3(chunk).digest() == self.hashes[index]


def describe(data: bytes | memoryview, chunk_size: int | None = None) -> Descriptor:
    """The descriptor of `data`. Hashes all of it: work for a thread."""
    view = memoryview(data).cast("B")
    if chunk_size is None:
        chunk_size = _SMALL_CHUNK_BYTES if len(view) < _LARGE_BLOB_BYTES else _LARGE_CHUNK_BYTES
    starts = range(0, len(view), chunk_size)
    hashes = tuple(blake3(view[start : start + chunk_size]).digest() for start in starts)
    return Descriptor(len(view), chunk_size, hashes)


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """The wire form of a descriptor, whose BLAKE3 is the blob id."""
    return msgspec.msgpack.encode(descriptor)


def blob_id_of(descriptor_bytes: bytes) -> BlobId:
    """The id that belongs to an encoded descriptor."""
    return BlobId(blake3(descriptor_bytes).digest())


def descriptor_cap_bytes(max_size_bytes: int) -> int:
    """How long the descriptor of a blob of at most `max_size_bytes` can be."""
    return 32 + (HASH_BYTES + 2) * (max_size_bytes // MIN_CHUNK_BYTES + 1)


def decode_descriptor(blob_id: bytes, body: bytes, max_size_bytes: int) -> Descriptor:
    """Decodes a stranger's descriptor, every cap checked. Raises `BlobInvalid`."""
    if len(body) > descriptor_cap_bytes(max_size_bytes):
        raise BlobInvalid("oversized descriptor")
    if blob_id_of(body) != blob_id:
        raise BlobInvalid("the descriptor does not match the blob id")
    try:
        descriptor = msgspec.msgpack.decode(body, type=Descriptor)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BlobInvalid("malformed descriptor") from error
    if descriptor.size > max_size_bytes:
        raise BlobInvalid(f"blob of {descriptor.size} bytes, {max_size_bytes} allowed")
    if len(descriptor.hashes) != -(-descriptor.size // descriptor.chunk_size):
        raise BlobInvalid("the descriptor's number of chunks does not fit its size")
    return descriptor


@dataclass(slots=True)
class _Held:
    descriptor: Descriptor
    descriptor_bytes: bytes
    data: bytes | None  # None: in the directory
    pins: int = 0

    @property
    def size(self) -> int:
        return self.descriptor.size + len(self.descriptor_bytes)


class BlobStore:
    """Holds blobs up to `quota_bytes` in all, descriptors included; in memory, or in `directory` if one is given."""

    def __init__(self, quota_bytes: int, directory: Path | None = None) -> None:
        self._quota_bytes = quota_bytes
        self._directory = directory
        self._blobs: OrderedDict[bytes, _Held] = OrderedDict()  # the least recently used first
        self._size_bytes = 0
        self._lock = threading.RLock()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._load(directory)

    @property
    def quota_bytes(self) -> int:
        return self._quota_bytes

    @property
    def size_bytes(self) -> int:
        """What all blobs take together, descriptors included."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._blobs)

    def put(self, data: bytes | memoryview, *, chunk_size: int | None = None) -> BlobId:
        """Hashes and stores a blob. Raises `BlobInvalid` if it does not fit beside the pinned ones."""
        return self.insert(describe(data, chunk_size), data)

    def insert(self, descriptor: Descriptor, data: bytes | memoryview) -> BlobId:
        """Stores a blob whose chunks have been checked against the descriptor. Raises as `put`."""
        body = encode_descriptor(descriptor)
        blob_id = blob_id_of(body)
        with self._lock:
            if blob_id in self._blobs:
                self._blobs.move_to_end(blob_id)
                return blob_id
            held = _Held(descriptor, body, bytes(data) if self._directory is None else None)
            self._make_room(held.size)
            self._size_bytes += held.size
        try:
            # Outside the lock: a slow disk must not hold up those who only look.
            if self._directory is not None:
                self._write(self._path(blob_id, "data"), data)
                self._write(self._path(blob_id, "blob"), body)
        except BlobInvalid:
            with self._lock:
                self._size_bytes -= held.size
            raise
        with self._lock:
            if blob_id in self._blobs:
                self._size_bytes -= held.size  # another thread stored the same meanwhile
            else:
                self._blobs[blob_id] = held
        return blob_id

    def has(self, blob_id: bytes) -> bool:
        return blob_id in self._blobs

    def get(self, blob_id: bytes) -> bytes | None:
        """The whole blob, or None. From a directory it is read and checked; a damaged blob is dropped: None."""
        with self._lock:
            held = self._touch(blob_id)
            if held is None or held.data is not None:
                return held.data if held else None
            path = self._path(blob_id, "data")
        data = _read(path, 0, held.descriptor.size)
        if len(data) == held.descriptor.size and describe(data, held.descriptor.chunk_size) == held.descriptor:
            return data
        self._drop_damaged(blob_id)
        return None

    def descriptor_bytes(self, blob_id: bytes) -> bytes | None:
        """The encoded descriptor of a blob that is here."""
        with self._lock:
            held = self._touch(blob_id)
            return held.descriptor_bytes if held else None

    def read_chunk(self, blob_id: bytes, index: int) -> bytes | None:
        """One chunk, or None. From a directory it is checked first, so that we never pass on damage."""
        with self._lock:
            held = self._touch(blob_id)
            if held is None or not 0 <= index < len(held.descriptor.hashes):
                return None
            start, end = held.descriptor.span(index)
            if held.data is not None:
                return bytes(memoryview(held.data)[start:end])
            path = self._path(blob_id, "data")
        chunk = _read(path, start, end - start)
        if held.descriptor.check_chunk(index, chunk):
            return chunk
        self._drop_damaged(blob_id)
        return None

    def pin(self, blob_id: bytes) -> None:
        """Keeps a blob from eviction until as many `unpin`s. Raises `KeyError` if it is not here."""
        with self._lock:
            self._blobs[blob_id].pins += 1

    def unpin(self, blob_id: bytes) -> None:
        """Takes one pin back; without effect if there is none."""
        with self._lock:
            held = self._blobs.get(blob_id)
            if held is not None and held.pins:
                held.pins -= 1

    def discard(self, blob_id: bytes) -> None:
        """Forgets a blob, unless it is pinned or not here."""
        with self._lock:
            held = self._blobs.get(blob_id)
            if held is not None and not held.pins:
                self._remove(blob_id)

    def _touch(self, blob_id: bytes) -> _Held | None:
        held = self._blobs.get(blob_id)
        if held is not None:
            self._blobs.move_to_end(blob_id)
        return held

    def _make_room(self, size: int) -> None:
        pinned = sum(held.size for held in self._blobs.values() if held.pins)
        if pinned + size > self._quota_bytes:
            raise BlobInvalid(
                f"a blob of {size} bytes does not fit: quota {self._quota_bytes}, of which {pinned} are pinned"
            )
        for blob_id in [blob_id for blob_id, held in self._blobs.items() if not held.pins]:
            if self._size_bytes + size <= self._quota_bytes:
                break
            self._remove(blob_id)
        if self._size_bytes + size > self._quota_bytes:
            raise BlobInvalid(f"a blob of {size} bytes does not fit beside those that are being written")

    def _remove(self, blob_id: bytes) -> None:
        held = self._blobs.pop(blob_id)
        self._size_bytes -= held.size
        if self._directory is not None:
            # The descriptor goes first: data without one does not count as a blob.
            for kind in ("blob", "data"):
                with contextlib.suppress(OSError):
                    self._path(blob_id, kind).unlink(missing_ok=True)

    def _drop_damaged(self, blob_id: bytes) -> None:
        with self._lock:
            if blob_id in self._blobs:
                self._remove(blob_id)

    # Files.

    def _path(self, blob_id: bytes, kind: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{blob_id.hex()}.{kind}"

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        """Atomic and durable: temporary name, sync, rename, sync of the directory."""
        temporary = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise BlobInvalid(
                f"cannot store a blob in {path.parent}: {error.strerror}; check free space and permissions"
            ) from error
        with contextlib.suppress(OSError):
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _load(self, directory: Path) -> None:
        """Takes in what a former process left: whole blobs by age; remains of interrupted writes are removed."""
        found: list[tuple[float, bytes, _Held]] = []
        for path in directory.glob("*.blob"):
            with contextlib.suppress(OSError, ValueError, BlobInvalid):
                blob_id = bytes.fromhex(path.stem)
                if path.stat().st_size > descriptor_cap_bytes(MAX_BLOB_BYTES):
                    continue
                body = path.read_bytes()
                descriptor = decode_descriptor(blob_id, body, MAX_BLOB_BYTES)
                data_stat = self._path(blob_id, "data").stat()
                if data_stat.st_size == descriptor.size:
                    found.append((data_stat.st_mtime, blob_id, _Held(descriptor, body, None)))
        for _, blob_id, held in sorted(found, key=lambda item: item[0]):
            self._blobs[blob_id] = held
            self._size_bytes += held.size
        whole = {blob_id.hex() for blob_id in self._blobs}
        for path in directory.iterdir():
            stem, _, kinds = path.name.partition(".")
            is_ours = len(stem) == 2 * HASH_BYTES and kinds.split(".")[0] in ("blob", "data")
            if is_ours and (stem not in whole or path.suffix == ".tmp"):
                with contextlib.suppress(OSError):
                    path.unlink()
        while self._size_bytes > self._quota_bytes:
            self._remove(next(iter(self._blobs)))


def _read(path: Path, start: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError:
        return b""
