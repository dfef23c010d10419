"""One line of text from a model, so that people see what they train."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmtrain.model import LanguageModel
from swarmtrain.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn. `temperature` 0 takes the likeliest token; `top_k` 0 considers all."""

    max_tokens: int = 80
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.top_k < 0 or not 0.0 <= self.temperature <= 100.0:
            raise ValueError("sampling needs max_tokens >= 1, top_k >= 0 and a temperature from 0 to 100")


def sample(model: LanguageModel, tokenizer: Tokenizer, prompt: bytes, config: SamplingConfig) -> bytes:
    """Returns the prompt's continuation, up to `max_tokens` tokens or the end of the document.

    Deterministic by `config.seed`, on the CPU's own generator, whatever device the model is on. Leaves the
    model in the mode in which it was.
    """
    weight = model.model.embed_tokens.weight
    generator = torch.Generator().manual_seed(config.seed)
    start = [tokenizer.eos_id, *map(int, tokenizer.encode(prompt))]
    tokens_1T = torch.tensor([start[-model.config.context_length :]], device=weight.device)
    drawn: list[int] = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(config.max_tokens):
                logits_V = model(tokens_1T)[0, -1].float().cpu()
                token = _draw(logits_V, config, generator)
                if token == tokenizer.eos_id:
                    break
                drawn.append(token)
                next_11 = torch.tensor([[token]], device=weight.device)
                tokens_1T = torch.cat((tokens_1T, next_11), dim=1)[:, -model.config.context_length :]
    finally:
        model.train(was_training)
    return tokenizer.decode(drawn)


def _draw(logits_V: torch.Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    # A model that has diverged gives no distribution; its sample then shows that instead of raising.
    logits_V = torch.nan_to_num(logits_V)
    if config.temperature == 0.0:
        return int(logits_V.argmax())
    if 0 < config.top_k < len(logits_V):
        threshold = logits_V.topk(config.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    # Subtracting the maximum first keeps a small temperature from overflowing.
    probabilities_V = torch.softmax((logits_V - logits_V.max()) / config.temperature, dim=0)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def printable_line(text: bytes, *, max_characters: int = 200) -> str:
    """Returns `text` as one line that is safe to print: line ends as ⏎, other controls as ·."""
    letters = text.decode("utf-8", "replace").replace("\r\n", "\n")[:max_characters]
    return "".join("⏎" if letter == "\n" else letter if letter.isprintable() else "·" for letter in letters)
