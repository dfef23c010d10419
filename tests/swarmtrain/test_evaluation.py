"""Validation loss is one figure: independent of batching, mode, and what the model did before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarmtrain.documents import DataError
from swarmtrain.evaluation import autocast, validation_loss, validation_windows
from swarmtrain.model import LanguageModel, initialise
from swarmtrain.model_config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    context_length=8,
)
TOKENS = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)


@pytest.fixture
def model() -> LanguageModel:
    model = LanguageModel(CONFIG)
    initialise(model, 1)
    return model


def test_windows_are_spread_over_the_whole_text() -> None:
    windows = validation_windows(TOKENS, 8, max_windows=5)
    assert windows.shape == (5, 9)
    assert windows.dtype == np.int64
    starts = [TOKENS.tobytes().index(row.astype(np.uint8).tobytes()) for row in windows]
    assert starts == [0, 192, 392, 592, 792]  # 124 windows of 8 tokens: numbers 0, 24, 49, 74, 99
    assert len(validation_windows(TOKENS, 8, max_windows=1000)) == 124


def test_a_short_text_gives_one_short_window() -> None:
    assert validation_windows(TOKENS[:5], 8).tolist() == [TOKENS[:5].tolist()]
    with pytest.raises(DataError, match="holds 1 tokens"):
        validation_windows(TOKENS[:1], 8)


def test_loss_weights_every_token_equally(model: LanguageModel) -> None:
    windows = validation_windows(TOKENS, 8, max_windows=7)
    expected = model.loss(torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])).item()
    for batch_size in (1, 3, 7, 16):
        assert validation_loss(model, windows, batch_size=batch_size) == pytest.approx(expected, abs=1e-6)


def test_loss_is_reproducible_and_restores_the_mode(model: LanguageModel) -> None:
    windows = validation_windows(TOKENS, 8)
    model.train()
    first = validation_loss(model, windows)
    assert model.training
    model.eval()
    assert validation_loss(model, windows) == first
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_mode_is_restored_after_an_error(model: LanguageModel) -> None:
    model.train()
    with pytest.raises(ValueError, match="exceed"):
        validation_loss(model, np.zeros((1, 20), dtype=np.int64))
    assert model.training


def test_a_cpu_computes_in_fp32() -> None:
    with autocast(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
