"""Content hashes of tensors, layouts and whole states (BLAKE3, 32 bytes)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from swarm_compression.tensors import Bits, Layout, State, TensorSpec, flat_bits

STATE_DOMAIN = b"swarm-state-1"


def tensor_hash(bits: Bits) -> bytes:
    """Hash the raw little-endian bytes of one tensor."""
    return blake3(bits.view(np.uint8).data).digest() if bits.size else blake3().digest()


def describe_spec(spec: TensorSpec) -> bytes:
    """Encode name, dtype and shape unambiguously, for hashing."""
    name = spec.name.encode()
    head = struct.pack("<IBB", len(name), spec.kind.code, len(spec.shape))
    return head + name + struct.pack(f"<{len(spec.shape)}Q", *spec.shape)


def layout_hash(layout: Layout) -> bytes:
    """Hash names, dtypes and shapes."""
    return blake3(b"swarm-layout-1" + b"".join(map(describe_spec, layout))).digest()


@dataclass(frozen=True, slots=True)
class Digest:
    """The hashes of one state: per tensor in the layout's order, and of the whole.

    Whoever keeps a state can keep its digest and save the next encoder or decoder one pass over it.
    """

    tensor_hashes: tuple[bytes, ...]
    state_hash: bytes

    @classmethod
    def combine(cls, layout: Layout, tensor_hashes: Iterable[bytes]) -> Digest:
        """Make the state hash of the tensor hashes."""
        hashes = tuple(tensor_hashes)
        whole = blake3(STATE_DOMAIN)
        for spec, digest in zip(layout, hashes, strict=True):
            whole.update(describe_spec(spec))
            whole.update(digest)
        return cls(hashes, whole.digest())


def hash_tensor(state: State, spec: TensorSpec) -> bytes:
    """Return the 32-byte hash of the raw bytes of one tensor. Raises LayoutMismatch."""
    return tensor_hash(flat_bits(state, spec))


def digest_state(state: State, layout: Layout | None = None) -> Digest:
    """Hash every tensor of `state`. Raises LayoutMismatch if `layout` is given and does not fit."""
    layout = layout or Layout.of(state)
    return Digest.combine(layout, (hash_tensor(state, spec) for spec in layout))


def state_hash(state: State, layout: Layout | None = None) -> bytes:
    """Return the 32-byte content hash of a state: names, dtypes, shapes and raw bytes, in the layout's order.

    Raises LayoutMismatch if `layout` is given and does not fit.
    """
    return digest_state(state, layout).state_hash
