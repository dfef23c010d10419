"""How sparse a patch is, by learning rate and steps.

    .venv/bin/python benchmarks/patch_density.py

Trains a small model, then prints the share of weights whose BF16 value further steps change, and the bytes of
the lossless patch per weight, after 1, 4, 16 and 32 steps from that state. FP32 master weights, AdamW with its
moments, the text that ships with Python. Takes about a minute.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_compression import encode_patch

from swarmtrain.data import Slice, SliceConfig, prepare_tokens
from swarmtrain.documents import python_documents
from swarmtrain.layout import fp32_to_bf16
from swarmtrain.model import LanguageModel, initialise
from swarmtrain.model_config import ModelConfig
from swarmtrain.tokenizer import ByteTokenizer

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    context_length=128,
)
RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3)
STEPS = (1, 4, 16, 32)
TRAINING_RATE = 3e-3


def train(model: LanguageModel, optimizer: torch.optim.Optimizer, data: Slice, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        tokens, targets = data.batch(step)
        optimizer.zero_grad()
        model.loss(torch.from_numpy(tokens.copy()), torch.from_numpy(targets.copy())).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def snapshot(model: LanguageModel) -> dict[str, NDArray[np.uint16]]:
    return {name: fp32_to_bf16(tensor.detach().numpy()) for name, tensor in model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--warm-steps", type=int, default=300, help="steps of training before measuring")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        text = prepare_tokens(lambda: python_documents(2_000_000), ByteTokenizer(), Path(folder))
        data = Slice(text.tokens, SliceConfig(context_length=128, batch_size=8, seed=0, peer_id=b"density"))
        model = LanguageModel(CONFIG)
        initialise(model, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=TRAINING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        train(model, optimizer, data, 0, arguments.warm_steps)
        rows = [measure(model, optimizer, data, rate, arguments.warm_steps) for rate in RATES]
    print(f"{sum(p.numel() for p in model.parameters()):,} weights; changed in BF16 · patch bytes per weight")
    print("learning rate" + "".join(f"{f'{steps} steps':>18}" for steps in STEPS))
    for rate, row in zip(RATES, rows, strict=True):
        print(f"{rate:13.0e}" + "".join(f"{changed:11.2%} · {size:4.2f}" for changed, size in row))
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(zip(map(str, RATES), rows, strict=True)), indent=2))


def measure(
    model: LanguageModel, optimizer: torch.optim.Optimizer, data: Slice, rate: float, first: int
) -> list[tuple[float, float]]:
    """Returns (share of weights changed, patch bytes per weight) after each of STEPS further steps at ``rate``."""
    model = copy.deepcopy(model)
    again = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in again.param_groups:
        group["lr"] = rate
    base = snapshot(model)
    weights = sum(p.numel() for p in model.parameters())
    row, done = [], 0
    for steps in STEPS:
        train(model, again, data, first + done, steps - done)
        done = steps
        new = snapshot(model)
        changed = sum(int((new[name] != base[name]).sum()) for name in base)
        row.append((changed / weights, len(encode_patch(new, base)) / weights))
    return row


if __name__ == "__main__":
    main()
