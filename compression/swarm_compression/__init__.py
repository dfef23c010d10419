"""Codecs between model weights and bytes: pure functions, no I/O, no clock, no network.

`encode_patch` and `apply_patch` carry the exact difference between two states, `encode_dense` and
`decode_dense` a whole state. Arrays hold bit patterns (BF16 as `uint16`). FORMAT.md describes the bytes.
"""

from swarm_compression.blocks import decode_blocks, encode_blocks
from swarm_compression.changes import Changes, stream_changes
from swarm_compression.codecs import BlockCodec, DenseCodec, PatchCodec, Promise, TopKCodec, WeightCodec
from swarm_compression.container import Codec, PatchInfo, describe
from swarm_compression.dense import decode_dense, encode_dense, stream_dense
from swarm_compression.digest import Digest, digest_state, hash_tensor, layout_hash, state_hash
from swarm_compression.errors import (
    CodecError,
    CorruptPatch,
    LayoutMismatch,
    LimitExceeded,
    NotFinite,
    UnsupportedFormat,
    WrongBase,
    WrongHistory,
)
from swarm_compression.estimate import count_visible, estimate_patch_size
from swarm_compression.limits import DEFAULT_LIMITS, Limits
from swarm_compression.patch import Level, apply_patch, apply_patch_in_place, encode_patch, stream_patch
from swarm_compression.tensors import Layout, State, TensorSpec
from swarm_compression.top_k import Sparse, decode_top_k, displacement_layout, encode_top_k

__all__ = [
    "DEFAULT_LIMITS",
    "BlockCodec",
    "Changes",
    "Codec",
    "CodecError",
    "CorruptPatch",
    "DenseCodec",
    "Digest",
    "Layout",
    "LayoutMismatch",
    "Level",
    "LimitExceeded",
    "Limits",
    "NotFinite",
    "PatchCodec",
    "PatchInfo",
    "Promise",
    "Sparse",
    "State",
    "TensorSpec",
    "TopKCodec",
    "UnsupportedFormat",
    "WeightCodec",
    "WrongBase",
    "WrongHistory",
    "apply_patch",
    "apply_patch_in_place",
    "count_visible",
    "decode_blocks",
    "decode_dense",
    "decode_top_k",
    "describe",
    "digest_state",
    "displacement_layout",
    "encode_blocks",
    "encode_dense",
    "encode_patch",
    "encode_top_k",
    "estimate_patch_size",
    "hash_tensor",
    "layout_hash",
    "state_hash",
    "stream_changes",
    "stream_dense",
    "stream_patch",
]
