"""A patch made of positions and values has the bytes of one made of two states."""

from __future__ import annotations

import numpy as np
import pytest
import swarm_compression as sc
from numpy.typing import NDArray
from swarm_compression.spans import SLICE_ELEMENTS

State = dict[str, NDArray[np.generic]]


def states() -> tuple[State, State]:
    """Every case: sparse over more than a slice, dense, unchanged, tied, 0-d, empty, integers."""
    rng = np.random.default_rng(3)
    wide = (rng.standard_normal(SLICE_ELEMENTS + 5000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    base: State = {
        "wide": wide,
        "dense": rng.integers(0, 1 << 16, 9000).astype(np.uint16),
        "kept": rng.standard_normal((30, 20)).astype(np.float32),
        "scale": np.array(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "steps": np.arange(10),
        "tied": np.zeros(9000, np.uint16),
    }
    new = {name: array.copy() for name, array in base.items()}
    new["wide"][::9] += np.uint16(1)
    new["dense"] += np.uint16(2)
    new["scale"] = np.array(2.5, np.float32)
    new["steps"][3] = -1
    new["tied"] = new["dense"].copy()
    return new, base


def changes_of(new: State, base: State) -> dict[str, sc.Changes]:
    found = {}
    for name, array in new.items():
        ours, theirs = (a.reshape(-1).view(f"u{a.itemsize}") for a in (array, base[name]))
        at = np.flatnonzero(ours != theirs)
        if at.size:
            found[name] = sc.Changes(at, ours[at])
    return found


@pytest.mark.parametrize("level", ["fast", "default", "best"])
@pytest.mark.parametrize("absolute", [False, True])
def test_the_bytes_are_those_of_the_two_states(level: sc.Level, absolute: bool) -> None:
    new, base = states()
    expected = sc.encode_patch(new, base, level=level, absolute=absolute)
    found = changes_of(new, base)
    assert b"".join(sc.stream_changes(base, found, level=level, absolute=absolute)) == expected
    digest = sc.digest_state(new)
    assert b"".join(sc.stream_changes(base, found, level=level, absolute=absolute, new_digest=digest)) == expected


def test_entries_that_change_nothing_do_not_count() -> None:
    new, base = states()
    found = changes_of(new, base)
    everywhere = np.arange(new["wide"].size)
    found["wide"] = sc.Changes(everywhere, new["wide"].astype(np.uint16))
    found["kept"] = sc.Changes(np.array([7]), base["kept"].reshape(-1).view(np.uint32)[7:8])
    assert b"".join(sc.stream_changes(base, found)) == sc.encode_patch(new, base)


@pytest.mark.parametrize(
    "wrong",
    [
        {"other": sc.Changes(np.array([0]), np.array([1], np.uint16))},
        {"wide": sc.Changes(np.array([5, 3]), np.array([1, 2], np.uint16))},
        {"wide": sc.Changes(np.array([-1]), np.array([1], np.uint16))},
        {"steps": sc.Changes(np.array([10]), np.array([1], np.uint64))},
        {"wide": sc.Changes(np.array([1]), np.array([1], np.uint32))},
        {"wide": sc.Changes(np.array([1, 2]), np.array([1], np.uint16))},
        {"wide": sc.Changes(np.array([1], np.int32), np.array([1], np.uint16))},  # type: ignore[arg-type]
    ],
    ids=["missing tensor", "descending", "negative", "beyond the end", "width", "count", "32-bit positions"],
)
def test_changes_that_do_not_fit_are_refused(wrong: dict[str, sc.Changes]) -> None:
    _, base = states()
    with pytest.raises(sc.LayoutMismatch):
        b"".join(sc.stream_changes(base, wrong))
