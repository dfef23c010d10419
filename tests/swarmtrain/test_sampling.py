"""Samples are reproducible, bounded, and safe to print."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.model import LanguageModel, initialise
from swarmtrain.model_config import ModelConfig
from swarmtrain.sampling import SamplingConfig, printable_line, sample
from swarmtrain.tokenizer import ByteTokenizer

CONFIG = ModelConfig(
    vocab_size=260,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    context_length=8,
)
DRAW = SamplingConfig(max_tokens=30, seed=4)


@pytest.fixture
def model() -> LanguageModel:
    model = LanguageModel(CONFIG)
    initialise(model, 1)
    return model


def test_a_seed_fixes_the_sample(model: LanguageModel) -> None:
    model.train()
    first = sample(model, ByteTokenizer(), b"a prompt longer than the context", DRAW)
    assert model.training
    assert first == sample(model, ByteTokenizer(), b"a prompt longer than the context", DRAW)
    assert first != sample(model, ByteTokenizer(), b"", replace(DRAW, seed=5))
    assert 0 < len(first) <= 30


def test_temperature_zero_and_top_one_agree(model: LanguageModel) -> None:
    greedy = sample(model, ByteTokenizer(), b"x", replace(DRAW, temperature=0.0))
    assert greedy == sample(model, ByteTokenizer(), b"x", replace(DRAW, top_k=1, temperature=3.0))
    assert greedy == sample(model, ByteTokenizer(), b"x", replace(DRAW, top_k=0, temperature=1e-6))


def test_a_sample_stops_at_the_end_of_the_document(model: LanguageModel) -> None:
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits equal: the first id, which is the end mark, wins
    assert sample(model, ByteTokenizer(), b"x", replace(DRAW, temperature=0.0)) == b""


def test_a_diverged_model_still_gives_a_sample(model: LanguageModel) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    assert len(sample(model, ByteTokenizer(), b"x", DRAW)) <= 30


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"top_k": -1}, {"temperature": float("nan")}])
def test_impossible_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="sampling needs"):
        replace(DRAW, **fields)  # type: ignore[arg-type]


@given(st.binary(max_size=400))
def test_whatever_a_model_says_is_one_printable_line(text: bytes) -> None:
    line = printable_line(text)
    assert line.isprintable()
    assert len(line) <= 200


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    assert printable_line(b"a\x1b[31m\r\nb\tc\x9b\xc2\x9b") == "a·[31m⏎b·c\N{REPLACEMENT CHARACTER}·"
