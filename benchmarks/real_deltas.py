"""Real differences between weights: a small language model, trained here, and its BF16 snapshots.

What the other benchmarks of patches take for their input.
"""

from __future__ import annotations

import collections
import pathlib
import re
import sysconfig

import numpy as np
import torch
from swarm_compression.tensors import DTYPES
from torch import nn
from torch.nn import functional as F

BF16 = DTYPES["bf16"]
State = dict[str, np.ndarray]
WIDTH, DEPTH, HEADS, CONTEXT, BATCH, VOCABULARY = 320, 6, 5, 64, 8, 8192
LEARNING_RATES = (1e-6, 3e-6, 1e-5, 2e-5, 1e-4, 1e-3)
STEPS = (1, 8, 50)
# Steps per patch where the patch after it is measured too; twice as many are still within a run.
STEPS_TWICE = (1, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_b(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def read_tokens() -> torch.Tensor:
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(path.read_text(errors="ignore") for path in sorted(folder.glob("*.py"))[:120])
    words = re.findall(r"[A-Za-z_]+|\d+|\s+|[^\w\s]", text)
    common = collections.Counter(words).most_common(VOCABULARY - 1)
    number = {word: n + 1 for n, (word, _) in enumerate(common)}
    return torch.tensor([number.get(word, 0) for word in words])


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    generator: torch.Generator,
    lr: float,
) -> float:
    """Take one step on a random batch and return its loss."""
    optimizer.param_groups[0]["lr"] = lr
    at = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    x = torch.stack([tokens[start : start + CONTEXT] for start in at])
    y = torch.stack([tokens[start + 1 : start + CONTEXT + 1] for start in at])
    loss = F.cross_entropy(model(x).view(-1, VOCABULARY), y.view(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


Deltas = dict[tuple[float, int], tuple[State, State]]


def make_deltas(warm_up: int, rates: tuple[float, ...]) -> tuple[Deltas, dict[tuple[float, int], State]]:
    """Train, and return per learning rate and number of steps (base, new), and the state as many steps later."""
    torch.manual_seed(0)
    tokens, model = read_tokens(), LanguageModel()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def step(lr: float) -> float:
        return train_step(model, optimizer, tokens, generator, lr)

    def snapshot() -> State:
        return {
            name: tensor.detach().to(torch.bfloat16).view(torch.uint16).numpy().copy()
            for name, tensor in model.state_dict().items()
        }

    for n in range(warm_up):
        loss = step(1e-3 * min(1, (n + 1) / 20))
    print(f"warm-up: {warm_up} steps, loss {loss:.3f}", flush=True)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = {
        key: {name: value.clone() for name, value in entry.items()}
        for key, entry in optimizer.state_dict()["state"].items()
    }
    deltas, later = {}, {}
    for rate in rates:
        model.load_state_dict(weights)
        for parameter, entry in zip(model.parameters(), moments.values(), strict=True):
            optimizer.state[parameter] = {name: value.clone() for name, value in entry.items()}
        for _ in range(2):
            step(rate)
        base = snapshot()
        for n in range(1, max(STEPS) + 1):
            step(rate)
            if n in STEPS:
                deltas[rate, n] = (base, snapshot())
            if n % 2 == 0 and n // 2 in STEPS_TWICE:
                later[rate, n // 2] = snapshot()
    return deltas, later
