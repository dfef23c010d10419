"""Hostile bytes, made by hand; `tests/test_fuzz.py` makes them at random."""

from __future__ import annotations

import numpy as np
import pytest
import swarm_compression as sc
import zstandard
from swarm_compression import wire


def small_states() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(11)
    base = {
        "embed": (rng.standard_normal((60, 32)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "norm": np.full(32, 0x3F80, np.uint16),
        "scale": np.array(0x3F80, np.uint16),
        "steps": np.array([7], np.int64),
        "tied": np.zeros((60, 32), np.uint16),
    }
    new = {name: array.copy() for name, array in base.items()}
    at = rng.random((60, 32)) < 0.1
    new["embed"][at] += rng.choice(np.array([1, 0xFFFF, 5], np.uint16), int(at.sum()))
    new["norm"] += 3
    new["steps"] += 1
    new["tied"] = new["embed"].copy()
    return new, base


def test_frames_that_state_a_large_size_are_refused_unread() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    with pytest.raises(sc.CorruptPatch, match="states"):
        wire.decompress(bomb, 1 << 10)
    no_size = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 10))
    with pytest.raises(sc.CorruptPatch, match="states"):
        wire.decompress(no_size, 1 << 10)
    two = zstandard.ZstdCompressor().compress(bytes(100)) * 2
    with pytest.raises(sc.CorruptPatch):
        wire.decompress(two, 100)


def test_trailing_bytes_and_every_truncation_are_refused() -> None:
    new, base = small_states()
    patch = sc.encode_patch(new, base)
    with pytest.raises(sc.CorruptPatch, match="after the end"):
        sc.apply_patch(patch + b"\0", base)
    for size in range(len(patch)):
        with pytest.raises(sc.CorruptPatch):
            sc.apply_patch(patch[:size], base)


def test_limits_are_checked_before_work() -> None:
    new, base = small_states()
    patch = sc.encode_patch(new, base)
    for limits in (
        sc.Limits(max_input_bytes=100),
        sc.Limits(max_state_bytes=100),
        sc.Limits(max_tensors=3),
        sc.Limits(max_section_symbols=10),
    ):
        with pytest.raises(sc.LimitExceeded):
            sc.apply_patch(patch, base, limits=limits)


def test_later_versions_and_codecs_are_named() -> None:
    new, base = small_states()
    patch = bytearray(sc.encode_patch(new, base))
    patch[3] = 9
    with pytest.raises(sc.UnsupportedFormat, match="version 9"):
        sc.apply_patch(bytes(patch), base)
    patch[3], patch[4] = 1, 200
    with pytest.raises(sc.UnsupportedFormat, match="codec 200"):
        sc.describe(bytes(patch))
