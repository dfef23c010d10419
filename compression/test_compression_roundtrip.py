"""Round trips of patches and dense snapshots over dtypes, shapes and densities."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import swarm_compression as sc
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

# +0, -0, infinities, NaNs with payloads, subnormals, largest and smallest.
SPECIAL = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8001, 0x7F7F, 0x3F80], np.uint16)


def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def nudge(rng: np.random.Generator, bits: NDArray[Any], density: float) -> NDArray[Any]:
    choices = np.array([1, 0xFFFF, 1, 0xFFFF, 2, 0xFFFE, 0x8000, 300], np.uint16)
    offsets = np.where(rng.random(bits.shape) < density, rng.choice(choices, bits.shape), 0)
    return np.asarray(bits + offsets.astype(np.uint16))


def assert_same(left: sc.State, right: sc.State) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert left[name].shape == right[name].shape
        assert left[name].tobytes() == right[name].tobytes()


SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(SHAPES, max_size=5),
    density=st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 0.5, 0.9, 1.0]),
    absolute=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_patches_restore_every_bit(shapes: list[tuple[int, ...]], density: float, absolute: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = {f"layer.{k}": weights(rng, shape) for k, shape in enumerate(shapes)}
    new = {name: nudge(rng, bits, density) for name, bits in base.items()}
    patch = sc.encode_patch(new, base, absolute=absolute)
    assert_same(sc.apply_patch(patch, base), new)
    info = sc.describe(patch)
    assert info.result_hash == sc.state_hash(new)
    assert info.base_hash == sc.state_hash(base)
    assert info.visible <= sc.count_visible(new, base)  # tied tensors count once
    assert_same(sc.decode_dense(sc.encode_dense(new), sc.Layout.of(new)), new)


@settings(max_examples=60, deadline=None)
@given(
    base=hnp.arrays(np.uint16, SHAPES, elements=st.sampled_from(SPECIAL.tolist())),
    data=st.data(),
)
def test_special_values_survive(base: NDArray[np.uint16], data: st.DataObject) -> None:
    new = data.draw(hnp.arrays(np.uint16, base.shape, elements=st.sampled_from(SPECIAL.tolist())))
    patch = sc.encode_patch({"w": new}, {"w": base})
    assert_same(sc.apply_patch(patch, {"w": base}), {"w": new})


@settings(max_examples=60, deadline=None)
@given(
    tag=st.sampled_from(sorted(sc.tensors.DTYPES)),
    count=st.integers(0, 300),
    density=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_all_dtypes(tag: str, count: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = sc.tensors.DTYPES[tag]
    layout = sc.Layout([sc.TensorSpec("x", tag, (count,)), sc.TensorSpec("y", tag, ())])

    def draw() -> NDArray[Any]:
        if tag == "bool":
            return rng.random(count) < 0.5
        return np.frombuffer(rng.bytes(count * kind.width), kind.carrier)

    base = {"x": draw(), "y": np.zeros((), kind.carrier)}
    new = {"x": np.where(rng.random(count) < density, draw(), base["x"]), "y": np.ones((), kind.carrier)}
    patch = sc.encode_patch(new, base, layout=layout)
    assert_same(sc.apply_patch(patch, base, layout=layout), new)
    assert_same(sc.decode_dense(sc.encode_dense(new, layout=layout), layout), new)


def test_large_tensors_cross_slices_and_sections() -> None:
    rng = np.random.default_rng(1)
    base = {"a": weights(rng, (700_001,)), "b": weights(rng, (3, 100_000)), "c": weights(rng, (900, 1000))}
    new = {
        "a": nudge(rng, base["a"], 0.0001),
        "b": nudge(rng, base["b"], 0.9),
        "c": nudge(rng, base["c"], 0.03),
    }
    patch = sc.encode_patch(new, base)
    assert_same(sc.apply_patch(patch, base), new)
    assert sc.estimate_patch_size(new, base) == pytest.approx(len(patch), rel=0.35)


def test_tied_and_unchanged_tensors_cost_almost_nothing() -> None:
    rng = np.random.default_rng(2)
    base = {f"t{k:03}": weights(rng, (64,)) for k in range(300)}
    new = dict(base)
    empty = sc.encode_patch(new, base)
    assert len(empty) < 93 + 2 * 300
    embedding = weights(rng, (5000,))
    once = sc.encode_dense({"a": embedding})
    twice = sc.encode_dense({"a": embedding, "b": embedding.reshape(50, 100)})
    assert len(twice) < len(once) + 8
    assert_same(
        sc.decode_dense(twice, sc.Layout.of({"a": embedding, "b": embedding.reshape(50, 100)})),
        {"a": embedding, "b": embedding.reshape(50, 100)},
    )


def test_wrong_base_is_told_apart_from_damage() -> None:
    rng = np.random.default_rng(3)
    base = {"w": weights(rng, (1000,))}
    new = {"w": nudge(rng, base["w"], 0.05)}
    other = {"w": nudge(rng, base["w"], 0.05)}
    patch = sc.encode_patch(new, base)
    with pytest.raises(sc.WrongBase) as caught:
        sc.apply_patch(patch, other)
    assert caught.value.expected == sc.state_hash(base)
    assert caught.value.found == sc.state_hash(other)
    with pytest.raises(sc.LayoutMismatch):
        sc.apply_patch(patch, {"w": base["w"].reshape(10, 100)})
    assert_same(sc.apply_patch(patch, new), new)


def test_absolute_patches_repair_a_half_applied_state() -> None:
    rng = np.random.default_rng(4)
    base = {"w": weights(rng, (1000,))}
    new = {"w": nudge(rng, base["w"], 0.1)}
    half = {"w": np.concatenate((new["w"][:500], base["w"][500:]))}
    patch = sc.encode_patch(new, base, absolute=True)
    assert_same(sc.apply_patch(patch, half), new)
    with pytest.raises(sc.WrongBase):
        sc.apply_patch(patch, {"w": weights(rng, (1000,))})


def test_inputs_are_left_alone_and_need_not_be_contiguous() -> None:
    rng = np.random.default_rng(5)
    base = {"w": weights(rng, (40, 30)).T}
    new = {"w": nudge(rng, base["w"], 0.2)}
    before = base["w"].tobytes()
    assert_same(sc.apply_patch(sc.encode_patch(new, base), base), new)
    assert base["w"].tobytes() == before
