"""Lossy codecs: bounds, determinism, residuals."""

from __future__ import annotations

import numpy as np
import pytest
import swarm_compression as sc
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from swarm_compression.floats import from_float32, to_float32
from swarm_compression.tensors import DTYPES

BF16 = DTYPES["bf16"]


def bf16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    return np.asarray(from_float32(np.asarray(values, np.float32), BF16), np.uint16)


def states(seed: int = 0, shape: tuple[int, ...] = (97, 130)) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(shape) * 0.02
    base = {"w": bf16(weights), "n": np.arange(5), "z": bf16(np.zeros(3))}
    moved = weights + rng.standard_normal(shape) * 1e-3
    return {"w": bf16(moved), "n": np.arange(5) * 2, "z": bf16(np.ones(3))}, base


@pytest.mark.parametrize("tag", ["bf16", "f16", "f32"])
def test_floats_round_to_nearest_even(tag: str) -> None:
    import torch

    kind = DTYPES[tag]
    rng = np.random.default_rng(1)
    values = rng.standard_normal(20_000).astype(np.float32) * np.float32(10.0) ** rng.integers(-30, 30, 20_000)
    values = np.concatenate((values.astype(np.float32), np.array([0, -0.0, np.inf, np.nan, 3.4e38], np.float32)))
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[tag]
    expected = torch.from_numpy(values).to(dtype)
    back = torch.from_numpy(to_float32(from_float32(values, kind), kind).copy())
    assert torch.equal(torch.nan_to_num(back), torch.nan_to_num(expected.float()))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_base", [True, False])
def test_blocks_keep_their_bound_and_both_sides_agree(bits: int, has_base: bool) -> None:
    new, base = states()
    data = sc.encode_blocks(new, base if has_base else None, bits=bits)
    got = sc.decode_blocks(data, base if has_base else None, layout=sc.Layout.of(new))
    assert sc.describe(data).result_hash == sc.state_hash(got)
    assert np.array_equal(got["n"], new["n"])
    old = to_float32(base["w"], BF16) if has_base else np.float32(0)
    want = to_float32(new["w"], BF16) - old
    error = np.abs(to_float32(got["w"], BF16) - old - want).reshape(-1)
    padded = np.zeros(-(-want.size // 64) * 64, np.float32)
    padded[: want.size] = np.abs(want).reshape(-1)
    half_step = padded.reshape(-1, 64).max(axis=1) / (127 if bits == 8 else 7) / 2
    rounding = np.abs(to_float32(got["w"], BF16)).reshape(-1) / 256
    assert (error <= 1.02 * np.repeat(half_step, 64)[: error.size] + rounding).all()
    assert len(data) < new["w"].size * (1.1 if bits == 8 else 0.6) + 400


def test_blocks_want_their_base_and_finite_weights() -> None:
    new, base = states()
    data = sc.encode_blocks(new, base)
    with pytest.raises(sc.WrongBase):
        sc.decode_blocks(data, new)
    new["w"] = new["w"].copy()
    new["w"][0, 0] = 0x7F80
    with pytest.raises(sc.NotFinite):
        sc.encode_blocks(new, base)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 63, 4095, 4096, 4097, 9000]), max_size=4),
    bits=st.sampled_from([2, 4, 8]),
    k=st.sampled_from([1, 64, 4096]),
    seed=st.integers(0, 2**32),
)
def test_top_k_sends_the_largest_and_leaves_a_residual(sizes: list[int], bits: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    moved = {f"t{n}": rng.standard_normal(size).astype(np.float32) for n, size in enumerate(sizes)}
    data = sc.encode_top_k(moved, k=k, bits=bits)
    got = sc.decode_top_k(data, sc.displacement_layout(moved))
    for name, array in moved.items():
        sparse = got[name]
        assert (np.diff(sparse.positions) > 0).all()
        for start in range(0, array.size // 4096 * 4096, 4096):
            inside = (sparse.positions >= start) & (sparse.positions < start + 4096)
            chunk = np.abs(array[start : start + 4096])
            assert np.count_nonzero(inside) == k
            assert chunk[sparse.positions[inside] - start].min() >= np.sort(chunk)[-k]
        sent = array[sparse.positions]
        assert (np.sign(sparse.values) == np.sign(sent)).all()
        if sent.size:
            residual = sent - sparse.values
            assert np.square(residual).sum() <= {2: 0.35, 4: 0.05, 8: 0.001}[bits] * np.square(sent).sum() + 1e-9


def test_top_k_meets_its_budget() -> None:
    moved = {"w": np.random.default_rng(2).standard_normal((512, 1024)).astype(np.float32)}
    assert len(sc.encode_top_k(moved, k=64, bits=2)) / moved["w"].size < 0.021
    assert len(sc.encode_top_k(moved, k=64, bits=8)) / moved["w"].size < 0.032


@pytest.mark.parametrize(
    "codec", [sc.PatchCodec(), sc.DenseCodec(), sc.BlockCodec(8), sc.BlockCodec(4), sc.TopKCodec(bits=4)], ids=str
)
def test_all_codecs_share_one_interface(codec: sc.WeightCodec) -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((300, 1000)) * 0.02
    base = {"w": bf16(weights)}
    new = {"w": bf16(weights + rng.standard_normal(weights.shape) * 1e-3)}
    data = codec.encode(new, base)
    got = codec.decode(data, base)
    assert codec.estimate_size(new, base) == pytest.approx(len(data), rel=0.15)
    if codec.promise is sc.Promise.LOSSLESS:
        assert np.array_equal(got["w"], new["w"])
    before = np.linalg.norm(to_float32(new["w"], BF16) - to_float32(base["w"], BF16))
    after = np.linalg.norm(to_float32(new["w"], BF16) - to_float32(got["w"], BF16))
    assert after < before
