"""The flat vector: every weight in its place, and BF16 exactly as torch rounds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarmtrain.layout import FlatLayout, bf16_to_fp32, chunks, fp32_to_bf16, module_group
from swarmtrain.manifest import ModelSection
from swarmtrain.model_config import parameter_specs


def torch_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    return bits


def assert_same_bf16(ours: NDArray[np.uint16], theirs: NDArray[np.uint16]) -> None:
    """Bit for bit, but any NaN for any NaN: torch forgets payloads, we keep them."""
    nan = (ours & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(nan, (theirs & 0x7FFF) > 0x7F80)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])


def test_all_bf16_patterns_widen_as_in_torch_and_come_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = bf16_to_fp32(bits)
    theirs = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(wide.view(np.uint32), theirs.view(np.uint32))
    back = fp32_to_bf16(wide)
    signalling = ((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0) & ((bits & 0x40) == 0)
    np.testing.assert_array_equal(back[~signalling], bits[~signalling])
    np.testing.assert_array_equal(back[signalling], bits[signalling] | 0x40)


def test_rounding_is_torchs_for_random_bit_patterns() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    values = bits.view(np.float32)
    assert_same_bf16(fp32_to_bf16(values), torch_bf16(values))


def test_ties_go_to_the_even_neighbour() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0x7FFF, 0x8000, 0x8001, 0x0001, 0xFFFF):
        values = (upper | np.uint32(low)).view(np.float32)
        assert_same_bf16(fp32_to_bf16(values), torch_bf16(values))


def test_special_values() -> None:
    values = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, np.finfo(np.float32).max, np.finfo(np.float32).tiny],
        np.float32,
    )
    assert_same_bf16(fp32_to_bf16(values), torch_bf16(values))
    assert fp32_to_bf16(values)[:4].tolist() == [0x0000, 0x8000, 0x7F80, 0xFF80]
    assert fp32_to_bf16(np.array([np.finfo(np.float32).max], np.float32))[0] == 0x7F80


def test_a_nan_whose_payload_lies_below_stays_a_nan() -> None:
    low_nan = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_fp32(fp32_to_bf16(low_nan))).all()


def test_empty_and_strided_vectors() -> None:
    assert fp32_to_bf16(np.empty(0, np.float32)).size == 0
    assert bf16_to_fp32(np.empty(0, np.uint16)).size == 0
    values = np.random.default_rng(2).standard_normal(100).astype(np.float32)
    np.testing.assert_array_equal(fp32_to_bf16(values[::3]), fp32_to_bf16(values[::3].copy()))
    np.testing.assert_array_equal(bf16_to_fp32(fp32_to_bf16(values)[::3]), bf16_to_fp32(fp32_to_bf16(values))[::3])


names = st.lists(
    st.sampled_from(["embed", "norm", "attn.q", "attn.k", "mlp.up", "mlp.down", "lm_head", "strange"]).flatmap(
        lambda mark: st.integers(0, 99).map(lambda n: f"layers.{n}.{mark}.weight")
    ),
    unique=True,
    min_size=1,
    max_size=20,
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(names.flatmap(lambda found: st.tuples(st.just(found), st.lists(shapes, min_size=len(found)))))
def test_spans_and_groups_cover_the_vector_exactly_once(drawn: tuple[list[str], list[tuple[int, ...]]]) -> None:
    layout = FlatLayout.of(list(zip(drawn[0], drawn[1], strict=False)))
    covered = np.zeros(layout.size, int)
    for span in layout.spans:
        covered[span.start : span.stop] += 1
    assert (covered == 1).all()
    owner = {}
    covered[:] = 0
    for group, parts in layout.groups().items():
        for part in parts:
            covered[part] += 1
            owner.update(dict.fromkeys(range(part.start, part.stop), group))
    assert (covered == 1).all()
    for span in layout.spans:
        assert all(owner[at] == span.group for at in range(span.start, span.stop))
    views = layout.views(np.arange(layout.size, dtype=np.uint16))
    assert [view.shape for view in views.values()] == [span.shape for span in layout.spans]
    flat = [value for view in views.values() for value in view.reshape(-1).tolist()]
    assert flat == list(range(layout.size))


def test_views_share_memory() -> None:
    layout = FlatLayout.of([("a", (2, 3)), ("b", ())])
    flat = np.zeros(7, np.uint16)
    layout.views(flat)["b"][...] = 9
    assert flat[6] == 9


def test_neighbours_of_one_group_are_joined() -> None:
    layout = FlatLayout.of([("mlp.up", (2,)), ("mlp.down", (3,)), ("norm", (1,)), ("mlp.gate", (4,))])
    assert layout.groups() == {"mlp": [slice(0, 5), slice(6, 10)], "norm": [slice(5, 6)]}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "head"),
        ("strange", "other"),
    ],
)
def test_groups_of_a_models_parameters(name: str, group: str) -> None:
    assert module_group(name) == group


def test_every_parameter_of_our_model_has_a_group() -> None:
    groups = FlatLayout.of(parameter_specs(ModelSection(tied_embeddings=False).config())).groups()
    assert set(groups) == {"embedding", "norm", "attention", "mlp", "head"}


@given(st.integers(0, 1000), st.integers(1, 50))
def test_chunks_cover_a_vector_in_order(size: int, chunk: int) -> None:
    parts = list(chunks(size, chunk))
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(size))
    assert all(part.stop - part.start <= chunk for part in parts)
