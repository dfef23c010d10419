"""The model in torch: a decoder-only transformer of the Llama family, short enough to read in one go.

Differences from the textbook transformer: RMSNorm without bias before each block, rotary positions
(half-split pairs, as Hugging Face's Llama), SwiGLU, grouped-query attention, no biases, no dropout. Modules
are nested only so that parameter names equal those of `LlamaForCausalLM`.

Shape suffixes: B batch, T positions, C hidden size, H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmtrain.genesis import genesis_state
from swarmtrain.model_config import ModelConfig, parameter_count, parameter_specs


class RmsNorm(nn.Module):
    """Root-mean-square norm with a learned scale (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.norm_eps

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.rms_norm(x_BTC, (x_BTC.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves `num_heads / num_kv_heads` query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.group_size = config.num_heads // config.num_kv_heads
        kv_width = config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        batch, positions, width = x_BTC.shape
        split = (batch, positions, -1, self.head_size)
        q_BHTD = rotate(self.q_proj(x_BTC).view(split).transpose(1, 2), cos_TD, sin_TD)
        k_BKTD = rotate(self.k_proj(x_BTC).view(split).transpose(1, 2), cos_TD, sin_TD)
        v_BKTD = self.v_proj(x_BTC).view(split).transpose(1, 2)
        if self.group_size > 1:
            k_BKTD = k_BKTD.repeat_interleave(self.group_size, dim=1)
            v_BKTD = v_BKTD.repeat_interleave(self.group_size, dim=1)
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True)
        out: Tensor = self.o_proj(mixed_BHTD.transpose(1, 2).reshape(batch, positions, width))
        return out


class SwiGlu(nn.Module):
    """Gated feed-forward block (Shazeer 2020, equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out


class Layer(nn.Module):
    """One pre-norm residual layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGlu(config)
        self.input_layernorm = RmsNorm(config)
        self.post_attention_layernorm = RmsNorm(config)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_TD, sin_TD)
        out: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything below the output head."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config)
        cos_TD, sin_TD = rotary_table(config)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions = tokens_BT.shape[1]
        cos_TD, sin_TD = self.cos_TD[:positions], self.sin_TD[:positions]
        x_BTC: Tensor = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC, cos_TD, sin_TD)
        out: Tensor = self.norm(x_BTC)
        return out


class LanguageModel(nn.Module):
    """Next-token model. Its weights are torch's own until `initialise` or `load_weights` sets them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tied_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns logits [B, T, V]; `ValueError` where T exceeds the context length."""
        if tokens_BT.shape[1] > self.config.context_length:
            raise ValueError(f"{tokens_BT.shape[1]} tokens exceed the model's context of {self.config.context_length}")
        x_BTC = self.model(tokens_BT)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(x_BTC, head.weight)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token (a scalar); targets of -100 are left out."""
        logits_BTV: Tensor = self(tokens_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [T, D] of the rotary angles (Su et al. 2021, equation 34), twice each."""
    size = config.head_size
    frequencies_D = config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles_TD = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies_D)
    angles_TD = torch.cat((angles_TD, angles_TD), dim=-1)
    return angles_TD.cos(), angles_TD.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turns each pair (d, d + D/2) by its position's angle."""
    first, second = x_BHTD.chunk(2, dim=-1)
    turned_BHTD = torch.cat((-second, first), dim=-1)
    return x_BHTD * cos_TD.to(x_BHTD.dtype) + turned_BHTD * sin_TD.to(x_BHTD.dtype)


def initialise(model: LanguageModel, seed: int) -> None:
    """Sets every weight to the run's genesis: the same bits on every machine."""
    state = genesis_state(model.config, seed)
    load_weights(model, {name: torch.from_numpy(array) for name, array in state.items()})


def load_weights(model: LanguageModel, state: dict[str, Tensor]) -> None:
    """Copies weights into the model's own tensors, so views into a flat buffer stay views.

    Raises `ValueError` where a name or a shape differs from the model's.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())
        raise ValueError(f"weights do not fit the model: {odd[0]} is missing on one side")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != state[name].shape:
                found, wanted = tuple(state[name].shape), tuple(parameter.shape)
                raise ValueError(f"weights do not fit the model: {name} has shape {found}, not {wanted}")
            parameter.copy_(state[name])


def flatten_parameters(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """Makes every parameter a view of one flat FP32 tensor, and every gradient a view of a second one.

    Returns (values, grads), both contiguous [parameter_count] on the model's device, in `parameter_specs`
    order. An outer step, a mix, a gradient norm is then one flat operation. Clear gradients with
    `grads.zero_()` or `zero_grad(set_to_none=False)`: setting them to None would detach them from the flat
    tensor.
    """
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    values = torch.empty(parameter_count(model.config), dtype=torch.float32, device=device)
    grads = torch.zeros_like(values)
    start = 0
    for name, shape in parameter_specs(model.config):
        parameter = parameters[name]
        end = start + parameter.numel()
        values[start:end].copy_(parameter.detach().flatten())
        parameter.data = values[start:end].view(shape)
        parameter.grad = grads[start:end].view(shape)
        start = end
    return values, grads
