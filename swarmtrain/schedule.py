"""Learning rate and round length as pure functions of the step count. Steps count from 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The end of a run communicates more: rounds of a quarter of the length in the last twentieth of the steps.
CLOSING_SHARE = 0.05
CLOSING_DIVISOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak_lr`, then a cosine to `peak_lr · min_ratio` at `total_steps`.


    All peers share the run's step count; a late joiner also warms up locally for `joiner_warmup_steps`.
    """

    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.1
    joiner_warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak_lr) and self.peak_lr > 0):
            raise ValueError(f"peak_lr must be a positive number, not {self.peak_lr!r}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, not {self.total_steps}")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(f"warmup_steps must lie between 0 and total_steps, not {self.warmup_steps}")
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ValueError(f"min_ratio must lie between 0 and 1, not {self.min_ratio!r}")
        if self.joiner_warmup_steps < 0:
            raise ValueError(f"joiner_warmup_steps must not be negative, not {self.joiner_warmup_steps}")

    def lr(self, step: int, *, joined_at: int = 0) -> float:
        """Returns the learning rate of inner step `step` for a peer that joined at step `joined_at`.

        A peer that was there from the start (`joined_at` 0) has the plain schedule. A joiner's optimizer
        has no moments yet, so its rate climbs linearly from the step at which it joined.
        """
        rate = self.peak_lr * self._shape(step)
        if joined_at > 0 and self.joiner_warmup_steps:
            rate *= min(1.0, max(0, step - joined_at + 1) / self.joiner_warmup_steps)
        return rate

    def _shape(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decay_steps = self.total_steps - self.warmup_steps
        done = 1.0 if decay_steps == 0 else min(1.0, (step - self.warmup_steps) / decay_steps)
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))

    def round_steps(self, step: int, inner_steps: int) -> int:
        """Returns the inner steps of a round that begins at `step`: at least 1, fewer at the end."""
        return max(1, inner_steps // CLOSING_DIVISOR) if self.is_closing(step) else inner_steps

    def is_closing(self, step: int) -> bool:
        """True in the last part of the run, in which replicas meet more often."""
        return step >= self.total_steps * (1.0 - CLOSING_SHARE)
