"""Validation loss over fixed windows of the run's validation text: the same figure for everyone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmtrain.documents import DataError
from swarmtrain.model import LanguageModel


def validation_windows(tokens: NDArray[np.integer], context_length: int, *, max_windows: int = 64) -> NDArray[np.int64]:
    """Returns at most `max_windows` windows [N, context_length + 1], spread evenly over `tokens`.

    A text shorter than one window gives one shorter window. Raises `DataError` for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise DataError(f"the validation text holds {len(tokens)} tokens; at least 2 are needed")
    length = min(context_length, len(tokens) - 1)
    count = (len(tokens) - 1) // length
    chosen = np.arange(min(count, max_windows)) * count // min(count, max_windows)
    return np.stack([tokens[k * length : (k + 1) * length + 1] for k in chosen]).astype(np.int64)


def validation_loss(model: LanguageModel, windows: NDArray[np.int64], *, batch_size: int = 16) -> float:
    """Returns the mean loss in nats per token over `windows` [N, T + 1], every token weighted equally.

    Leaves the model in the mode in which it was. Sums in float64 in a fixed order, so the figure is
    reproducible; bfloat16 is used only where the device computes in it (see `autocast`).
    """
    device = model.model.embed_tokens.weight.device
    was_training = model.training
    model.eval()
    total = 0.0
    try:
        with torch.no_grad(), autocast(device):
            for start in range(0, len(windows), batch_size):
                batch: Tensor = torch.from_numpy(windows[start : start + batch_size]).to(device)
                count = batch.shape[0] * (batch.shape[1] - 1)
                total += float(model.loss(batch[:, :-1], batch[:, 1:])) * count
    finally:
        model.train(was_training)
    return float(total / (windows.shape[0] * (windows.shape[1] - 1)))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns bfloat16 autocast where the device has bfloat16 units, else a context that does nothing.

    A CPU computes in FP32: on most of them bfloat16 is emulated and slower.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
