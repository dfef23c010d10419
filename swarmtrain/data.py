"""From documents to batches: a token file, and each peer's own slice of it.

Documents are tokenised once into a memory-mapped file in a cache folder, named by content. A `Slice` deals
windows of context_length + 1 tokens to one peer, as a pure function of a step count: resuming is
remembering one whole number, and no two peers need to agree on anything. Orders are made of integer
arithmetic that no library version changes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarmtrain.documents import DataError, Document
from swarmtrain.tokenizer import Tokenizer

Tokens = NDArray[np.integer]

# Text counts as held out where this many tokens in a row, at a multiple of it, occur in the validation
# text: every overlap of 2 · 64 - 1 tokens is then found. Shorter ones are licence headers and common
# phrases.
OVERLAP_TOKENS = 64
_BLOCKS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A tokenised data set: its file, tokens [N] mapped from it, and the BLAKE3 digest (32 bytes) of its documents.

    The digest is over the text, not the ids: peers whose digests agree train on equal data.
    """

    path: Path
    tokens: Tokens
    digest: bytes


def prepare_tokens(documents: Callable[[], Iterable[Document]], tokenizer: Tokenizer, cache: Path) -> TokenFile:
    """Returns the token file of `documents`, made in the folder `cache` if it is not there yet.

    `documents` is called once to hash the text and, the first time, once more to tokenise it. Each document
    ends with the tokenizer's eos id. The file appears under its name only when it is complete. Raises
    `DataError`.
    """
    digest = content_digest(documents())
    dtype = token_dtype(tokenizer.vocab_size)
    path = cache / f"{digest.hex()[:32]}-{tokenizer.name}.{dtype.name}"
    try:
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _write_tokens(path, documents(), tokenizer, dtype)
        return TokenFile(path, np.memmap(path, dtype=dtype, mode="r"), digest)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the token file cannot be used: {error}") from error


def content_digest(documents: Iterable[Document]) -> bytes:
    """Returns the BLAKE3 digest of the documents' own digests, in order; `DataError` if all are empty."""
    whole = blake3()
    size_bytes = 0
    for document in documents:
        one = blake3()
        for piece in document:
            one.update(piece)
            size_bytes += len(piece)
        whole.update(one.digest())
    if size_bytes == 0:
        raise DataError("the data holds no text")
    return whole.digest()


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Returns the smallest little-endian unsigned type that holds every id."""
    for text in ("<u1", "<u2"):
        dtype: np.dtype[np.unsignedinteger] = np.dtype(text)
        if vocab_size <= np.iinfo(dtype).max + 1:
            return dtype
    return np.dtype("<u4")


def _write_tokens(
    path: Path, documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger]
) -> None:
    eos = np.array([tokenizer.eos_id], dtype=dtype).tobytes()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name + ".", delete=False) as file:
        try:
            for document in documents:
                for piece in document:
                    file.write(tokenizer.encode(piece).astype(dtype, copy=False).tobytes())
                file.write(eos)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceConfig:
    """What decides a peer's slice: sizes in tokens and windows, the run's seed, and who the peer is.

    With `shard` = (index, count) the slice is that share of the windows, exactly disjoint from the run's
    other shards. Without, it is all windows in an order of the peer's own, which overlaps with others' only
    by chance.
    """

    context_length: int
    batch_size: int
    seed: int
    peer_id: bytes
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.context_length < 1 or self.batch_size < 1:
            raise ValueError("context_length and batch_size must be at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, not {self.seed}")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            index, count = self.shard
            raise ValueError(f"shard {index} of {count}: the index must lie between 0 and {count - 1}")


class Slice:
    """One peer's endless sequence of batches; `batch(step)` depends on nothing but its arguments.

    Every pass over the windows (an epoch) has a new order. Windows that overlap `held_out` (validation
    tokens) are left out. Raises `DataError` where no window remains.
    """

    def __init__(self, tokens: Tokens, config: SliceConfig, held_out: Tokens | None = None) -> None:
        self._tokens = tokens
        self._config = config
        windows = usable_windows(tokens, config.context_length, held_out)
        if config.shard is not None:
            index, count = config.shard
            windows = windows[_order(len(windows), _key(config.seed, b"shards", 0))[index::count]]
        if len(windows) == 0:
            raise DataError(
                f"the data ({len(tokens)} tokens, without what is held out) leaves this peer no window of"
                f" {config.context_length + 1} tokens"
            )
        self._windows = windows
        self._epoch = -1
        self._epoch_order = np.empty(0, dtype=np.int64)

    @property
    def window_count(self) -> int:
        """Windows in one epoch."""
        return len(self._windows)

    def batch(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (tokens_BT, targets_BT), int64 [batch_size, context_length], of inner step `step` >= 0."""
        length, rows = self._config.context_length, self._config.batch_size
        batch = np.empty((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            epoch, place = divmod(step * rows + row, len(self._windows))
            start = int(self._ordered(epoch)[place]) * length
            batch[row] = self._tokens[start : start + length + 1]
        return batch[:, :-1], batch[:, 1:]

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            key = _key(self._config.seed, self._config.peer_id, epoch)
            self._epoch_order = self._windows[_order(len(self._windows), key)]
            self._epoch = epoch
        return self._epoch_order


def usable_windows(tokens: Tokens, context_length: int, held_out: Tokens | None) -> NDArray[np.int64]:
    """Returns the numbers k of windows tokens[k · T : k · T + T + 1] that share no passage with `held_out`."""
    count = max(0, (len(tokens) - 1) // context_length)
    if held_out is None or len(held_out) < OVERLAP_TOKENS:
        return np.arange(count)
    held_out = held_out.astype(tokens.dtype, copy=False)
    blocks = _overlapping_blocks(np.ascontiguousarray(tokens), np.ascontiguousarray(held_out))
    # A passage may reach beyond its last whole block by up to a block less one token, on both sides.
    first_token = blocks * OVERLAP_TOKENS - (OVERLAP_TOKENS - 1)
    last_token = blocks * OVERLAP_TOKENS + 2 * (OVERLAP_TOKENS - 1)
    first_window = np.clip(-(-first_token // context_length) - 1, 0, count)
    last_window = np.clip(last_token // context_length, -1, count - 1)
    opened = np.zeros(count + 1, dtype=np.int64)
    np.add.at(opened, first_window, 1)
    np.subtract.at(opened, last_window + 1, 1)
    return np.flatnonzero(np.cumsum(opened)[:count] == 0)


def _overlapping_blocks(tokens: Tokens, held_out: Tokens) -> NDArray[np.int64]:
    """Returns the numbers of the aligned blocks of `tokens` that occur anywhere in `held_out`."""
    block_bytes = OVERLAP_TOKENS * tokens.dtype.itemsize
    places = np.lib.stride_tricks.sliding_window_view(held_out, OVERLAP_TOKENS)
    wanted = np.concatenate(
        [
            _hash_rows(np.ascontiguousarray(places[start : start + _BLOCKS_AT_ONCE]).view("<u8"))
            for start in range(0, len(places), _BLOCKS_AT_ONCE)
        ]
    )
    block_count = len(tokens) // OVERLAP_TOKENS
    words = tokens[: block_count * OVERLAP_TOKENS].view(np.uint8).view("<u8").reshape(-1, block_bytes // 8)
    found = [
        start + np.flatnonzero(np.isin(_hash_rows(words[start : start + _BLOCKS_AT_ONCE]), wanted))
        for start in range(0, block_count, _BLOCKS_AT_ONCE)
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _hash_rows(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns one 64-bit hash a row; a collision costs one window of training text."""
    factors = _mix(np.arange(words.shape[1], dtype=np.uint64)) | np.uint64(1)
    hashes: NDArray[np.uint64] = ((words ^ (words >> np.uint64(29))) * factors).sum(axis=1, dtype=np.uint64)
    return hashes


def _key(seed: int, owner: bytes, epoch: int) -> int:
    text = b"swarmtrain slice v1" + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little") + owner
    return int.from_bytes(blake3(text).digest(length=8), "little")


def _order(count: int, key: int) -> NDArray[np.int64]:
    """Returns a permutation of range(count): numbers sorted by a keyed bijection, so without ties."""
    return np.argsort(_mix(np.arange(count, dtype=np.uint64) + np.uint64(key)), kind="stable")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea & Flood 2014, figure 17)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
