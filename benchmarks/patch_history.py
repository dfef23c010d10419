"""How far does the last patch help to code the next one? Entropies on real AdamW deltas.

    python benchmarks/patch_history.py

Who keeps the state before the base knows which elements the previous patch changed, and by how much. If those are
likelier to change again, and one way rather than the other, that is a context beside the old exponent. Trains the model
of `real_deltas.py`, takes snapshots at even distances, and prints the bytes of an ideal coder per change, for each
patch but the first: with the old exponent, with the elements of the last patch, with their steps (up to two units).
What the codec makes of it `compression.py` measures. About three minutes.
"""

from __future__ import annotations

import numpy as np
import torch
from lossless_rivals import entropy_bits, flatten
from real_deltas import BF16, LanguageModel, read_tokens, train_step
from swarm_compression.contexts import context_of
from swarm_compression.steps import steps_between


def ideal_bytes(changed: np.ndarray, steps: np.ndarray, contexts: np.ndarray) -> float:
    """Return what positions and steps cost an ideal coder that knows the context of every element."""
    bits = 0.0
    of_changes = contexts[changed]
    for context in np.unique(contexts):
        members = int(np.count_nonzero(contexts == context))
        mine = steps[of_changes == context]
        bits += entropy_bits(np.array([mine.size, members - mine.size]))
        bits += entropy_bits(np.unique(mine, return_counts=True)[1])
    return bits / 8


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokens = LanguageModel(), read_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)

    def train(steps: int, rate: float) -> None:
        for _ in range(steps):
            train_step(model, optimizer, tokens, generator, rate)

    def snapshot() -> np.ndarray:
        return flatten(
            {n: t.detach().to(torch.bfloat16).view(torch.uint16).numpy() for n, t in model.state_dict().items()}
        )

    train(40, 1e-3)
    print("| lr | steps per patch | density | again | exponent | and last patch | and last step | saved |")
    print("|---|---|---|---|---|---|---|---|")
    for rate in (3e-6, 1e-4):
        for distance in (1, 8):
            train(2, rate)
            states = [snapshot()]
            for _ in range(4):
                train(distance, rate)
                states.append(snapshot())
            plain = given = by_step = again = visible = total = 0.0
            for before, old, new in zip(states, states[1:], states[2:], strict=False):
                last, changed = before != old, old != new
                steps = steps_between(new[changed], old[changed], BF16).view(np.int16)
                exponents = context_of(old, BF16).astype(np.int64)
                plain += ideal_bytes(changed, steps, exponents)
                given += ideal_bytes(changed, steps, 2 * exponents + last)
                last_steps = np.clip(steps_between(old, before, BF16).view(np.int16), -2, 2)
                by_step += ideal_bytes(changed, steps, 5 * exponents + last_steps + 2)
                again += float(np.count_nonzero(changed & last)) / np.count_nonzero(last)
                visible += np.count_nonzero(changed)
                total += changed.size
            print(
                f"| {rate:g} | {distance} | {visible / total:.2%} | {again / 3:.1%} | {plain / visible:.3f} | "
                f"{given / visible:.3f} | {by_step / visible:.3f} | {1 - by_step / plain:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
