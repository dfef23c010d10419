"""The compiled loops make and read the same bytes as NumPy does.

Where numba is not installed the very same loops run as plain Python, so their logic is tested everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import swarm_compression as sc
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_compression import acceleration, kernels, positions
from swarm_compression.errors import CorruptPatch

State = dict[str, np.ndarray]


@pytest.fixture
def with_loops(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda on: monkeypatch.setattr(acceleration, "_kernels", kernels if on else None)


def trained(dtype: str, elements: int, share: float, seed: int) -> tuple[State, State]:
    """Weights as they are: the smaller one is, the likelier a change of it is visible, by one unit or by several."""
    rng = np.random.default_rng(seed)
    bits = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f64": np.float64}[dtype]
    values = rng.standard_normal(elements) * 0.02 * np.exp2(-rng.integers(0, 9, elements))
    if dtype == "bf16":
        old = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        old = values.astype(bits)
    width = old.dtype.itemsize
    chance = share * np.minimum(0.02 / np.abs(values), 40)
    steps = np.where(rng.random(elements) < chance, rng.choice([1, -1], elements) * rng.geometric(0.8, elements), 0)
    new = (old.view(f"<i{width}") + steps.astype(f"<i{width}")).view(old.dtype)
    # A second tensor, so that a section runs over a border that is no multiple of a block.
    cut = elements // 3 + 7
    return {"a": new[:cut], "b": new[cut:]}, {"a": old[:cut], "b": old[cut:]}


@pytest.mark.parametrize("level", ["fast", "default", "best"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_patches_are_the_same_bytes(with_loops: Callable[[bool], None], dtype: str, level: sc.Level) -> None:
    new, base = trained(dtype, 12_345, 0.06, seed=len(dtype + level))
    with_loops(False)
    expected = sc.encode_patch(new, base, level=level)
    with_loops(True)
    patch = sc.encode_patch(new, base, level=level)
    assert patch == expected
    result = sc.apply_patch(patch, base)
    assert all(result[name].tobytes() == new[name].tobytes() for name in new)
    with_loops(False)
    assert sc.state_hash(sc.apply_patch(patch, base)) == sc.state_hash(new)


@pytest.mark.parametrize("share", [0.0005, 0.02, 0.4])
def test_classes_of_every_mode_are_the_same_bytes(with_loops: Callable[[bool], None], share: float) -> None:
    new, base = trained("bf16", 40_000, share, seed=5)
    with_loops(False)
    expected = sc.encode_patch(new, base)
    with_loops(True)
    assert sc.encode_patch(new, base) == expected
    assert sc.state_hash(sc.apply_patch(expected, base)) == sc.state_hash(new)


def test_damaged_patches_are_refused_as_without_loops(with_loops: Callable[[bool], None]) -> None:
    new, base = trained("bf16", 6_000, 0.3, seed=9)
    patch = sc.encode_patch(new, base)
    rng = np.random.default_rng(3)
    for at in rng.integers(92, len(patch), 40):
        damaged = bytearray(patch)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        outcomes = []
        for on in (False, True):
            with_loops(on)
            with pytest.raises(sc.CodecError) as caught:
                sc.apply_patch(bytes(damaged), base)
            outcomes.append(type(caught.value))
        assert outcomes[0] is outcomes[1]


@given(st.lists(st.integers(0, 3000), unique=True, min_size=1).map(sorted), st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_gap_symbols_are_the_same(places: list[int], width: int) -> None:
    at = np.array(places)
    before = acceleration._kernels
    try:
        acceleration._kernels = None
        expected = positions.encode_gaps(at, width)
        acceleration._kernels = kernels
        symbols = positions.encode_gaps(at, width)
        assert symbols.tolist() == expected.tolist()
        assert positions.decode_gaps(symbols, at.size, 3001).tolist() == places
        for count, population in ((at.size + 1, 3001), (at.size - 1, 3001), (at.size, places[-1])):
            with pytest.raises(CorruptPatch):
                positions.decode_gaps(symbols, count, population)
    finally:
        acceleration._kernels = before


def test_loops_are_asked_for_only_by_large_states(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(acceleration, "_tried", False)
    monkeypatch.setattr(acceleration, "use_compiled", lambda: asked.append(True))
    acceleration.prepare(acceleration.WORTHWHILE_ELEMENTS - 1)
    assert not asked
    acceleration.prepare(acceleration.WORTHWHILE_ELEMENTS)
    assert asked
