"""The shape of the model: what the run's manifest says about it, and the parameter list that follows.

Free of torch, because the node process lays out snapshots and patches without it. The model is a
decoder-only transformer of the Llama family: RMSNorm, rotary positions, SwiGLU, grouped-query attention.
Parameter names and shapes are those of Hugging Face's `LlamaForCausalLM`, so that weights are exported and
imported without renaming.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A manifest comes from a stranger: every size is capped before anything is allocated or enumerated.
_LARGEST = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_layers": 512,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "context_length": 1 << 20,
}

ParameterSpec = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of one decoder-only transformer. Raises `ValueError`, one line, where they do not fit together.

    `tied_embeddings` uses the embedding matrix as output head too; the parameter list then has it once.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    context_length: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise ValueError(f"model {name} must be a whole number from 1 to {largest}, not {value!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"model hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.head_size % 2:
            raise ValueError(f"model hidden_size / num_heads is {self.head_size}; rotary positions need an even number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if not (math.isfinite(self.rope_theta) and self.rope_theta >= 1.0):
            raise ValueError(f"model rope_theta must be a number of at least 1, not {self.rope_theta!r}")
        if not 0.0 < self.norm_eps < 1.0:
            raise ValueError(f"model norm_eps must lie between 0 and 1, not {self.norm_eps!r}")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def parameter_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Returns (name, shape) of every parameter in the model's fixed order, the order of all flat buffers."""
    width, inner = config.hidden_size, config.intermediate_size
    kv_width = config.num_kv_heads * config.head_size
    specs: list[ParameterSpec] = [("model.embed_tokens.weight", (config.vocab_size, width))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        specs += [
            (prefix + "self_attn.q_proj.weight", (width, width)),
            (prefix + "self_attn.k_proj.weight", (kv_width, width)),
            (prefix + "self_attn.v_proj.weight", (kv_width, width)),
            (prefix + "self_attn.o_proj.weight", (width, width)),
            (prefix + "mlp.gate_proj.weight", (inner, width)),
            (prefix + "mlp.up_proj.weight", (inner, width)),
            (prefix + "mlp.down_proj.weight", (width, inner)),
            (prefix + "input_layernorm.weight", (width,)),
            (prefix + "post_attention_layernorm.weight", (width,)),
        ]
    specs.append(("model.norm.weight", (width,)))
    if not config.tied_embeddings:
        specs.append(("lm_head.weight", (config.vocab_size, width)))
    return specs


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of weights, a tied embedding counted once."""
    return sum(math.prod(shape) for _, shape in parameter_specs(config))
