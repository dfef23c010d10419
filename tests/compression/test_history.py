"""Patches that use the state before their base: smaller, exact, and never applied with another history."""

from __future__ import annotations

import tracemalloc
from collections import deque
from typing import Any

import numpy as np
import pytest
import swarm_compression as sc
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from swarm_compression import acceleration, kernels
from swarm_compression.container import Flag
from swarm_compression.spans import SLICE_ELEMENTS

State = dict[str, NDArray[Any]]


def drawn(rng: np.random.Generator, elements: int, kind: sc.tensors.DType) -> NDArray[Any]:
    """Weights of many sizes, as bit patterns of that dtype."""
    values = rng.standard_normal(elements) * 0.02 * np.exp2(-rng.integers(0, 9, elements))
    if kind.tag == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind.tag in ("f16", "f32", "f64"):
        return values.astype(kind.carrier)
    if kind.tag == "bool":
        return rng.random(elements) < 0.5
    return np.frombuffer(rng.bytes(elements * kind.width), kind.carrier)


def moved(rng: np.random.Generator, bits: NDArray[Any], direction: NDArray[np.int64], share: float) -> NDArray[Any]:
    """A later state: some elements go on, most of them in their direction, by one unit or more."""
    carrier = np.dtype(f"<u{bits.itemsize}")
    steps = np.where(rng.random(bits.size) < 0.9, direction, -direction) * rng.geometric(0.7, bits.size)
    steps = np.where(rng.random(bits.size) < share * (1 + abs(direction)), steps, 0)
    if bits.dtype == np.bool_:
        return bits ^ (steps != 0)
    return (bits.view(carrier) + steps.astype(f"<i{bits.itemsize}").view(carrier)).view(bits.dtype)


def three_states(tag: str, elements: int, share: float, seed: int) -> tuple[State, State, State, sc.Layout]:
    """The new state, its base and its history; two tensors of which the border lies within a slice, a tied one, a 0-d
    one and an empty one."""
    rng = np.random.default_rng(seed)
    kind = sc.tensors.DTYPES[tag]
    direction = rng.choice([-2, -1, 0, 0, 0, 1, 2], elements)
    flat = [drawn(rng, elements, kind)]
    for _ in range(2):
        flat.append(moved(rng, flat[-1], direction, share))
    cut = elements // 3 + elements % 7
    states = [
        {"a": bits[:cut], "b": bits[cut:], "empty": bits[:0].reshape(0, 3), "one": np.array(n).astype(kind.carrier)}
        for n, bits in enumerate(flat)
    ]
    for state in states[1:]:
        state["tied"] = state["b"].copy()
    states[0]["tied"] = np.zeros_like(states[0]["b"])
    layout = sc.Layout(sc.TensorSpec(name, tag, array.shape) for name, array in states[0].items())
    return states[2], states[1], states[0], layout


def assert_same(left: sc.State, right: sc.State) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert left[name].tobytes() == right[name].tobytes()


@settings(max_examples=80, deadline=None)
@given(
    tag=st.sampled_from(sorted(sc.tensors.DTYPES)),
    elements=st.sampled_from([0, 1, 63, 3000, 9000]),
    share=st.sampled_from([0.0, 0.01, 0.2, 0.33]),
    seed=st.integers(0, 2**32),
)
def test_every_bit_comes_back(tag: str, elements: int, share: float, seed: int) -> None:
    new, base, history, layout = three_states(tag, elements, share, seed)
    patch = sc.encode_patch(new, base, level="best", layout=layout, history=history)
    assert_same(sc.apply_patch(patch, base, layout=layout, history=history), new)
    info = sc.describe(patch)
    assert info.history_hash == sc.state_hash(history, layout)
    assert info.visible <= sc.count_visible(new, base, layout=layout)
    plain = sc.encode_patch(new, base, level="best", layout=layout)
    assert sc.describe(plain).history_hash is None
    assert len(patch) <= len(plain) + 32


@pytest.mark.parametrize("tag", ["bf16", "f16", "f32", "f64", "f8_e4m3"])
def test_long_tensors_are_smaller_and_the_same_with_compiled_loops(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new, base, history, layout = three_states(tag, 60_000, 0.33, seed=len(tag))
    options: dict[str, Any] = {"level": "best", "layout": layout}
    patch = sc.encode_patch(new, base, history=history, **options)
    assert len(patch) < 0.8 * len(sc.encode_patch(new, base, **options))
    monkeypatch.setattr(acceleration, "_kernels", kernels)
    assert sc.encode_patch(new, base, history=history, **options) == patch
    assert_same(sc.apply_patch(patch, base, layout=layout, history=history), new)


def test_slices_sections_and_given_changes() -> None:
    """More than one slice, dense and sparse; positions found elsewhere give the same bytes; states are left alone."""
    new, base, history, _ = three_states("bf16", 3 * SLICE_ELEMENTS, 0.02, seed=3)
    dense = three_states("bf16", 2 * SLICE_ELEMENTS + 999, 0.33, seed=4)
    for state, more in zip((new, base, history), dense[:3], strict=True):
        state["dense"] = np.concatenate((more["a"], more["b"]))
    before = sc.state_hash(base)
    patch = sc.encode_patch(new, base, level="best", history=history)
    assert_same(sc.apply_patch(patch, base, history=history), new)
    assert sc.state_hash(base) == before
    found = {}
    for name in new:
        at = np.flatnonzero(new[name] != base[name])
        found[name] = sc.Changes(at, new[name].reshape(-1)[at])
    digest = sc.digest_state(history)
    pieces = sc.stream_changes(base, found, level="best", history=history, history_digest=digest)
    assert b"".join(pieces) == patch


def test_another_history_or_none_is_told_apart_and_changes_nothing() -> None:
    new, base, history, _ = three_states("bf16", 9000, 0.1, seed=5)
    patch = sc.encode_patch(new, base, level="best", history=history)
    state = {name: array.copy() for name, array in base.items()}
    with pytest.raises(sc.WrongHistory, match="none was given") as missing:
        sc.apply_patch_in_place(patch, state)
    assert (missing.value.expected, missing.value.found) == (sc.state_hash(history), None)
    with pytest.raises(sc.WrongHistory) as wrong:
        sc.apply_patch_in_place(patch, state, history=base)
    assert (wrong.value.expected, wrong.value.found) == (sc.state_hash(history), sc.state_hash(base))
    with pytest.raises(sc.LayoutMismatch):
        sc.apply_patch_in_place(patch, state, history={"a": base["a"]})
    with pytest.raises(sc.WrongBase):
        sc.apply_patch(patch, history, history=history)
    assert_same(state, base)
    sc.apply_patch_in_place(patch, state, history=history)
    assert_same(state, new)
    # What is the result already needs nothing; a patch without history ignores one.
    assert_same(sc.apply_patch(patch, new), new)
    assert_same(sc.apply_patch(sc.encode_patch(new, base), base, history=base), new)


def test_a_history_is_for_the_best_level_alone() -> None:
    new, base, history, _ = three_states("bf16", 100, 0.1, seed=6)
    for options in ({"level": "fast"}, {}, {"level": "best", "absolute": True}):
        with pytest.raises(ValueError, match="history"):
            sc.encode_patch(new, base, history=history, **options)  # type: ignore[arg-type]


def test_headers_that_contradict_themselves_are_refused() -> None:
    new, base, history, _ = three_states("bf16", 9000, 0.33, seed=7)
    patch = sc.encode_patch(new, base, level="best", history=history)
    without = bytearray(patch[:92] + patch[124:])
    without[5] = Flag.NONE
    with pytest.raises(sc.CorruptPatch, match="section kind 5"):
        sc.apply_patch(bytes(without), base, history=history)
    both = bytearray(patch)
    both[5] = Flag.HISTORY | Flag.IDEMPOTENT
    dense = bytearray(sc.encode_dense(new))
    dense[5] = Flag.HISTORY
    for data in (both, dense):
        with pytest.raises(sc.CorruptPatch, match="history"):
            sc.describe(bytes(data))
    with pytest.raises(sc.CorruptPatch):
        sc.apply_patch(patch[:110], base, history=history)


def test_memory_does_not_grow_with_the_state() -> None:
    """Twice the state, no more memory: slices of all three states are looked at one after the other."""
    peaks = []
    for elements in (1 << 21, 1 << 22):
        rng = np.random.default_rng(8)
        history = {"w": drawn(rng, elements, sc.tensors.DTYPES["bf16"])}
        base, new = ({"w": history["w"] + np.uint16(0)} for _ in range(2))
        for state, every in ((base, 2), (new, 4)):
            state["w"][::every] += np.uint16(1)
        known = {name: sc.digest_state(state) for name, state in (("new", new), ("base", base), ("history", history))}
        digests: dict[str, Any] = {f"{name}_digest": digest for name, digest in known.items()}
        patch = sc.encode_patch(new, base, level="best", history=history, **digests)
        tracemalloc.start()
        deque(sc.stream_patch(new, base, level="best", history=history, **digests), maxlen=0)
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        del digests["new_digest"]
        sc.apply_patch_in_place(patch, base, history=history, verify=False, **digests)
        peaks.append((encoding, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
        assert base["w"].tobytes() == new["w"].tobytes()
    # A section of at most 2^19 changes, whole slices: its positions, bits and steps, and what is made of them.
    for small, large in zip(*peaks, strict=True):
        assert large < 1.05 * small
        assert large < 48 << 19
