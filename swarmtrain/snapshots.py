"""Snapshots in the node: which ones this peer holds as bases, and how one travels.

A snapshot is named by its state hash.  `encode_payload` picks the base, among those that both sides hold, which
gives the smallest patch, and falls back to the dense form; `decode_payload` checks everything before it returns bits.
Both are pure CPU work on arrays: call them from a worker thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from swarm_compression import (
    CodecError,
    Layout,
    LayoutMismatch,
    LimitExceeded,
    Limits,
    WrongBase,
    apply_patch,
    decode_dense,
    encode_dense,
    encode_patch,
    estimate_patch_size,
    state_hash,
)

from swarmtrain.layout import FlatLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

HASH_BYTES = 32
MAX_HAVES = 8
# Byte-split and entropy-coded BF16 takes at most about this much.
DENSE_BYTES_PER_WEIGHT = 1.4
# A patch on an unrelated base takes as much as the dense form, but is estimated at 1.1: beyond this a patch saves next
# to nothing and needs its base.
PATCH_BYTES_PER_WEIGHT_MAX = 1.05
_CONTAINER_SLACK_BYTES = 1 << 16
_CODEC_REASONS = {WrongBase: "wrong-base", LayoutMismatch: "wrong-layout", LimitExceeded: "oversized-payload"}


class PayloadInvalid(Exception):
    """A partner's payload that must not be used; `reason` is a short token for the counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable BF16 image of a replica: flat bit patterns, shape (weights,), dtype uint16."""

    hash: bytes
    bits: NDArray[np.uint16]


class Payload(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """How a snapshot travels: the blob to fetch, the base it is relative to (empty: dense), and what it must give."""

    snapshot: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    base: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)]
    blob: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**60)]


@dataclass(frozen=True, slots=True)
class EncodedSnapshot:
    """A snapshot as bytes; `base` is empty for the dense form."""

    data: bytes
    base: bytes


class SnapshotLibrary:
    """The snapshots that can serve as bases: the genesis, and the pair of each recent exchange."""

    def __init__(self, layout: FlatLayout, *, capacity: int = 4) -> None:
        """Keeps at most `capacity` snapshots beside the permanent ones, the newest; each is 2 bytes per weight."""
        self.layout = layout
        self._capacity = capacity
        self._held: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._permanent: set[bytes] = set()

    def add(self, snapshot: Snapshot, *, permanent: bool = False) -> None:
        """Holds a snapshot; a permanent one stays: the genesis is the base of peers that have never met."""
        self._held[snapshot.hash] = snapshot
        self._held.move_to_end(snapshot.hash)
        if permanent:
            self._permanent.add(snapshot.hash)
        passing = [name for name in self._held if name not in self._permanent]
        for name in passing[: max(0, len(passing) - self._capacity)]:
            del self._held[name]

    def names(self) -> tuple[bytes, ...]:
        """Returns the hashes of all snapshots held, newest first: the `have` list of an offer."""
        return tuple(reversed(self._held))[:MAX_HAVES]

    def common(self, names: Iterable[bytes]) -> list[Snapshot]:
        """Returns the snapshots held here that the other side holds too."""
        return [self._held[name] for name in names if name in self._held]

    def get(self, name: bytes) -> Snapshot | None:
        return self._held.get(name)


def take_snapshot(layout: FlatLayout, bits: NDArray[np.uint16]) -> Snapshot:
    """Copies and names a snapshot."""
    copy = bits.copy()
    copy.flags.writeable = False
    return Snapshot(hash_bits(layout, copy), copy)


def hash_bits(layout: FlatLayout, bits: NDArray[np.uint16]) -> bytes:
    """Returns the state hash, 32 bytes, of a flat snapshot."""
    return state_hash(layout.views(bits))


def encode_payload(layout: FlatLayout, snapshot: Snapshot, bases: Sequence[Snapshot]) -> EncodedSnapshot:
    """Encodes a snapshot in its smallest form: a patch on one of `bases`, or dense."""
    state = layout.views(snapshot.bits)
    best: tuple[float, Snapshot | None] = (PATCH_BYTES_PER_WEIGHT_MAX * layout.size, None)
    for base in bases:
        estimate = estimate_patch_size(state, layout.views(base.bits))
        if estimate < best[0]:
            best = (estimate, base)
    if best[1] is None:
        return EncodedSnapshot(encode_dense(state), b"")
    return EncodedSnapshot(encode_patch(state, layout.views(best[1].bits)), best[1].hash)


def max_payload_bytes(layout: FlatLayout) -> int:
    """Returns the largest size that a payload of this model may state."""
    return layout.size * 3 + _CONTAINER_SLACK_BYTES + 512 * len(layout.spans)


def decode_payload(layout: FlatLayout, payload: Payload, data: bytes, base: Snapshot | None) -> Snapshot:
    """Returns the snapshot that `data` holds.  Raises PayloadInvalid and nothing else, whatever the bytes are.

    Checked: size, container, shapes and dtypes against the run's model, base hash, result hash, finite values.
    """
    if len(data) > max_payload_bytes(layout):
        raise PayloadInvalid("oversized-payload", f"{len(data)} bytes")
    limits = Limits(max_input_bytes=max_payload_bytes(layout), max_state_bytes=2 * layout.size + 2)
    zeros = np.zeros(layout.size, dtype=np.uint16)
    try:
        if payload.base:
            if base is None or base.hash != payload.base:
                raise PayloadInvalid("unknown-base")
            state = apply_patch(data, layout.views(base.bits), limits=limits)
        else:
            state = decode_dense(data, Layout.of(layout.views(zeros)), limits=limits)
    except CodecError as error:
        raise PayloadInvalid(_codec_reason(error), str(error)) from error
    for span in layout.spans:
        zeros[span.start : span.stop] = state[span.name].reshape(-1)
    if not all_finite(zeros):
        raise PayloadInvalid("not-finite")
    found = hash_bits(layout, zeros)
    if found != payload.snapshot:
        raise PayloadInvalid("wrong-snapshot-hash")
    zeros.flags.writeable = False
    return Snapshot(found, zeros)


def _codec_reason(error: CodecError) -> str:
    for kind, reason in _CODEC_REASONS.items():
        if isinstance(error, kind):
            return reason
    return "malformed-payload"


def all_finite(bits: NDArray[np.uint16]) -> bool:
    """True when no BF16 value is infinite or NaN: those have all eight exponent bits set."""
    return not bool(((bits & 0x7F80) == 0x7F80).any())
