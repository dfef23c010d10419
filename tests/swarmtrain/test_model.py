"""The model agrees with its torch-free layout, genesis is the same bits everywhere, buffers are flat."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3

from swarmtrain.genesis import genesis_state
from swarmtrain.model import (
    LanguageModel,
    flatten_parameters,
    initialise,
    load_weights,
    rotary_table,
    rotate,
)
from swarmtrain.model_config import ModelConfig, parameter_count, parameter_specs

SMALL = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    context_length=24,
)


def initialised(config: ModelConfig, seed: int = 0) -> LanguageModel:
    model = LanguageModel(config)
    initialise(model, seed)
    return model


def random_tokens(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_torch_model_agrees_with_the_torch_free_layout(tied: bool, num_kv_heads: int) -> None:
    config = replace(SMALL, tied_embeddings=tied, num_kv_heads=num_kv_heads)
    model = LanguageModel(config)
    specs = parameter_specs(config)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == specs
    assert [name for name, _ in specs] == list(model.state_dict())
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number from 1"),
        ({"num_layers": 10**9}, "num_layers must be a whole number from 1 to 512"),
        ({"hidden_size": 32.0}, "hidden_size must be a whole number"),
        ({"num_layers": True}, "num_layers must be a whole number"),
        ({"num_heads": 5}, "must be a multiple of num_heads 5"),
        ({"hidden_size": 36, "num_heads": 4}, "rotary positions need an even number"),
        ({"num_kv_heads": 3}, "must be a multiple of num_kv_heads 3"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        replace(SMALL, **change)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_layout_and_genesis_import_no_torch() -> None:
    modules = "model_config, genesis, tokenizer, documents, data, schedule, export, pretrained, tensor_file"
    check = f"import sys; from swarmtrain import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def test_genesis_is_bit_identical_everywhere() -> None:
    """Written down once: a change here makes peers of one run start from different weights."""
    state = genesis_state(SMALL, 7)
    whole = blake3()
    for name, shape in parameter_specs(SMALL):
        assert state[name].shape == shape
        assert state[name].dtype == np.float32
        whole.update(state[name].astype("<f4").tobytes())
    assert whole.hexdigest() == "1b8cb31bf31823f2e4a1072bf6c214e3d97afe601d331079ee46c820553e2a63"


def test_genesis_depends_on_seed_and_name_but_not_on_the_rest_of_the_model() -> None:
    state, other = genesis_state(SMALL, 1), genesis_state(SMALL, 2)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(state[name], other[name])
    assert not np.array_equal(state[name], state[name.replace("layers.0", "layers.1")])
    shorter = genesis_state(replace(SMALL, vocab_size=100), 1)["model.embed_tokens.weight"]
    assert np.array_equal(state["model.embed_tokens.weight"][:100], shorter)
    with pytest.raises(ValueError, match="seed"):
        genesis_state(SMALL, -1)


def test_genesis_has_the_promised_deviations() -> None:
    state = genesis_state(replace(SMALL, hidden_size=256, num_layers=8), 3)
    plain = state["model.layers.0.self_attn.q_proj.weight"]
    residual = state["model.layers.0.self_attn.o_proj.weight"]
    assert plain.std() == pytest.approx(0.02, rel=0.01)
    assert abs(plain.mean()) < 0.02 / 256 * 4
    assert residual.std() == pytest.approx(0.02 / 4, rel=0.01)
    assert np.abs(plain).max() < 0.02 * 5
    # A normal distribution has 68.3 % within one deviation and 4.6 % beyond two.
    assert (np.abs(plain) < 0.02).mean() == pytest.approx(0.683, abs=0.01)
    assert (np.abs(plain) > 0.04).mean() == pytest.approx(0.0455, abs=0.005)
    assert (state["model.norm.weight"] == 1).all()


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = initialised(SMALL)
    loss = model.loss(random_tokens(4, 24), random_tokens(4, 24, seed=6))
    assert loss.item() == pytest.approx(np.log(256), abs=0.05)


def test_no_position_sees_a_later_one() -> None:
    model = initialised(SMALL)
    tokens = random_tokens(1, 24)
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 256
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :12], other[:, :12], rtol=0, atol=0)
    assert not torch.allclose(one[:, 12:], other[:, 12:])


def test_rotation_depends_on_distance_alone() -> None:
    cos, sin = rotary_table(SMALL)
    assert cos.shape == (SMALL.context_length, SMALL.head_size)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 1, 1, SMALL.head_size, generator=generator)

    def score(at: int, other: int) -> float:
        q = rotate(query, cos[at : at + 1], sin[at : at + 1])
        k = rotate(key, cos[other : other + 1], sin[other : other + 1])
        return float((q * k).sum())

    assert score(7, 3) == pytest.approx(score(20, 16), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-5)
    # Pair (0, D/2) turns by one radian a position: the half-split convention.
    one = torch.zeros(1, 1, 1, SMALL.head_size)
    one[..., 0] = 1.0
    turned = rotate(one, cos[1:2], sin[1:2])[0, 0, 0]
    assert turned[0].item() == pytest.approx(np.cos(1.0), abs=1e-6)
    assert turned[SMALL.head_size // 2].item() == pytest.approx(np.sin(1.0), abs=1e-6)


def test_grouped_heads_equal_full_attention_with_repeated_keys_and_values() -> None:
    grouped = initialised(SMALL)
    full = LanguageModel(replace(SMALL, num_kv_heads=SMALL.num_heads))
    state = {name: value.clone() for name, value in grouped.state_dict().items()}
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].view(SMALL.num_kv_heads, SMALL.head_size, SMALL.hidden_size)
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    load_weights(full, state)
    tokens = random_tokens(2, 24)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens exceed the model's context of 24"):
        initialised(SMALL)(random_tokens(1, 25))


def test_masked_targets_do_not_count() -> None:
    model = initialised(SMALL)
    tokens, targets = random_tokens(1, 24), random_tokens(1, 24)
    masked = targets.clone()
    masked[0, :20] = -100
    losses = torch.nn.functional.cross_entropy(model(tokens)[0], targets[0], reduction="none")
    assert model.loss(tokens, masked).item() == pytest.approx(losses[20:].mean().item(), abs=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_gradients_are_views_of_flat_tensors(tied: bool) -> None:
    config = replace(SMALL, tied_embeddings=tied)
    model, twin = initialised(config), initialised(config)
    values, grads = flatten_parameters(model)
    assert values.shape == grads.shape == (parameter_count(config),)
    assert torch.equal(values, torch.cat([p.detach().flatten() for p in twin.parameters()]))

    tokens, targets = random_tokens(2, 24), random_tokens(2, 24)
    for _ in range(2):  # gradients accumulate in place
        model.loss(tokens, targets).backward()
        twin.loss(tokens, targets).backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(grads, expected)
    assert all(p.grad is not None and p.grad.data_ptr() != 0 for p in model.parameters())

    with torch.no_grad():
        values.mul_(0.5)
    assert torch.equal(next(model.parameters()), next(twin.parameters()) * 0.5)
    load_weights(model, dict(twin.named_parameters()))
    assert torch.equal(values, torch.cat([p.detach().flatten() for p in twin.parameters()]))


def test_an_optimizer_step_moves_the_flat_tensor() -> None:
    model = initialised(SMALL)
    values, grads = flatten_parameters(model)
    before = values.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.loss(random_tokens(2, 24), random_tokens(2, 24)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not torch.equal(values, before)
    assert not grads.any()


def test_weights_that_do_not_fit_are_refused() -> None:
    model = initialised(SMALL)
    state = dict(model.state_dict())
    state["model.norm.weight"] = torch.ones(31)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(31,\), not \(32,\)"):
        load_weights(model, state)
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        load_weights(model, state)


def test_the_model_learns() -> None:
    model = initialised(SMALL)
    tokens = random_tokens(1, 24).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0
