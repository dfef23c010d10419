"""Damage control for one incoming replica: how far may a partner move us?

`Guard` sees norms only.  It keeps the history of accepted exchanges per module group and answers with a clipping
factor for each group, or with a refusal.  Finite values, shapes and hashes are checked before this point.

Clipping is self-centred (ClippedGossip, arXiv 2202.01545): D is scaled so that its norm is at most tau.  The theory's
tau is not computable by a peer; ours is the running median of the last 64 accepted, already clipped norms.  Clipped
values in the history mean that an attacker who always sits at the threshold cannot raise it.  A floor taken from the
peer's own drift, which no partner controls, lets tau grow again when training itself moves faster: two honest
replicas that drifted apart independently are about sqrt(2) outer steps from each other.  The largest of the last
rounds counts, because a round that a partner has cut short says little about how far a whole one goes.

A far outlier is refused once; when the same partner is far again, it is mixed with, clipped.  Refusing it for good
would part honest replicas for ever in a small swarm: the further apart, the more of an outlier.  An attacker gains
nothing by it, since being clipped at every second meeting moves us less than sitting at the threshold at each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

HISTORY = 64
Z_LIMIT = 3.0
EMA_RATE = 0.02
MIN_SAMPLES_FOR_Z = 16
# A swarm in lockstep has almost constant norms; without a floor on the deviation ordinary noise would be refused.
MIN_RELATIVE_DEVIATION = 0.5
DRIFT_HISTORY = 16
MAX_FAR_PARTNERS = 256  # strangers must not make us remember without end


@dataclass(frozen=True, slots=True)
class Verdict:
    """Either `accepted` with a factor in (0, 1] per module group, or not, with a short reason for the counters."""

    accepted: bool
    factors: Mapping[str, float]
    reason: str = ""

    @property
    def clipped(self) -> bool:
        return any(factor < 1.0 for factor in self.factors.values())


@dataclass(slots=True)
class _GroupHistory:
    accepted: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    drifts: deque[float] = field(default_factory=lambda: deque(maxlen=DRIFT_HISTORY))
    mean: float = 0.0
    variance: float = 0.0
    samples: int = 0

    def z_score(self, norm: float) -> float:
        deviation = max(math.sqrt(self.variance), MIN_RELATIVE_DEVIATION * self.mean)
        return (norm - self.mean) / deviation if deviation > 0 else 0.0

    def record(self, clipped_norm: float) -> None:
        """Takes in what was applied; a raw norm would let one far partner make itself ordinary."""
        self.accepted.append(clipped_norm)
        self.samples += 1
        rate = max(EMA_RATE, 1.0 / self.samples)
        difference = clipped_norm - self.mean
        self.mean += rate * difference
        self.variance = (1.0 - rate) * (self.variance + rate * difference * difference)


class Guard:
    """Judges the visible difference of each exchange by its norm, per module group."""

    def __init__(self, outer_gain: float) -> None:
        """`outer_gain` is beta / (1 - alpha), the long-run length of an outer step in units of the drift."""
        self._outer_gain = outer_gain
        self._groups: dict[str, _GroupHistory] = {}
        self._far_partners: dict[bytes, None] = {}  # refused once; oldest first

    def threshold(self, group: str) -> float:
        """Returns tau for a group: median of its accepted norms, but at least the own-drift floor."""
        history = self._groups.get(group, _GroupHistory())
        floor = math.sqrt(2.0) * self._outer_gain * max(history.drifts, default=0.0)
        return max(median(history.accepted), floor) if history.accepted else floor

    def judge(self, partner: bytes, norms: Mapping[str, float], drift_norms: Mapping[str, float]) -> Verdict:
        """Judges L2 norms of D per group; `drift_norms` are the norms of the peer's own last drift per group.

        An accepted verdict is recorded at once, so judge an exchange only when it is about to be applied.
        """
        if not all(math.isfinite(norm) for norm in norms.values()):
            return Verdict(False, {}, "not-finite")
        for group, drift in drift_norms.items():
            self._groups.setdefault(group, _GroupHistory()).drifts.append(drift)
        if not self._is_far(norms):
            self._far_partners.pop(partner, None)
        elif partner in self._far_partners:
            del self._far_partners[partner]
        else:
            self._far_partners[partner] = None
            if len(self._far_partners) > MAX_FAR_PARTNERS:
                del self._far_partners[next(iter(self._far_partners))]
            return Verdict(False, {}, "norm-outlier")
        factors = {}
        for group, norm in norms.items():
            tau = self.threshold(group)
            # No history and no drift yet: nothing to compare with, and nothing trained that could be damaged.
            factors[group] = min(1.0, tau / norm) if norm > 0 and tau > 0 else 1.0
            self._groups.setdefault(group, _GroupHistory()).record(norm * factors[group])
        return Verdict(True, factors)

    def _is_far(self, norms: Mapping[str, float]) -> bool:
        for group, norm in norms.items():
            history = self._groups.get(group)
            if history and history.samples >= MIN_SAMPLES_FOR_Z and history.z_score(norm) > Z_LIMIT:
                return True
        return False
