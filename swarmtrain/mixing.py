"""The exchange algorithm: own outer step first, then a matched, visible, pairwise mix.

This file is the mathematics of swarmtrain and nothing else; every function is one equation.  The arrays are flat
FP32 vectors holding all weights of a replica, as NumPy arrays or torch tensors; in-place operators make both work.

    theta   fast weights: what the inner optimizer trains
    phi     slow weights: theta at the last outer step
    Delta   drift, theta - phi; points downhill
    m       outer momentum
    S       snapshot: BF16 image of a replica
    D       visible difference S_j - S_i of one pair of snapshots

Round of peer i:    `outer_step`  then, when the exchange with partner j completes,  `mix(…, D, w)`.
Peer j does the mirror image with -D.  At equal weights the pair's mean does not move; where both replicas look
the same in BF16, D is zero and each keeps its own sub-BF16 progress, so no error-feedback buffer is needed.

The selectable mixer `noloco` is the form of NoLoCo (arXiv 2506.10911, equations 1 to 3), in which the mix happens
inside the momentum: `noloco_target`, `noloco_outer_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Vector = TypeVar("Vector", torch.Tensor, NDArray[np.float32])
else:
    Vector = TypeVar("Vector")

RELATIVE_WEIGHT_MIN = 0.25
RELATIVE_WEIGHT_MAX = 1.5


# ---------------------------------------------------------------------------------------------- matched (default)


def outer_step(theta: Vector, phi: Vector, m: Vector, *, alpha: float, beta: float) -> None:
    """Takes the peer's own outer step, in place; no partner is needed.

        Delta = theta - phi ;  m <- alpha m + beta Delta ;  phi <- phi + m ;  theta <- phi

    Heavy-ball momentum, not Nesterov, as in NoLoCo eq. 2-3 without the partner's terms.
    """
    m *= alpha
    m += beta * (theta - phi)
    phi += m
    theta[...] = phi


def mix(theta: Vector, phi: Vector, D: Vector, weight: float) -> None:
    """Moves both weight vectors towards the partner, in place; local progress made meanwhile is kept.

    phi <- phi + w D ;  theta <- theta + w D        (D already clipped)
    """
    step = weight * D
    phi += step
    theta += step


# ---------------------------------------------------------------------------------------------------- the weight w


@dataclass(frozen=True, slots=True)
class Effort:
    """What a peer has put into its replica since its last exchange."""

    tokens: int
    steps: int

    @property
    def weight(self) -> float:
        """Token weight tokens²/steps: tokens times the batch size, so that both quantity and quality count."""
        return self.tokens * self.tokens / max(1, self.steps)


def relative_weight(own: Effort, partner: Effort) -> float:
    """Returns rel_ij = 2 w_j / (w_i + w_j), capped to [0.25, 1.5].

    Uncapped, rel_ij + rel_ji = 2, so that both peers land on their token-weighted mean.
    """
    total = own.weight + partner.weight
    rel = 1.0 if total == 0 else 2.0 * partner.weight / total
    return min(RELATIVE_WEIGHT_MAX, max(RELATIVE_WEIGHT_MIN, rel))


def staleness_in_rounds(own_step: int, partner_step: int, round_steps: int) -> int:
    """Returns the whole rounds by which the partner's snapshot is behind one's own schedule step (0 if ahead)."""
    return max(0, own_step - partner_step) // max(1, round_steps)


def staleness_scale(staleness: int) -> float:
    """Returns the inverse staleness scaling 1 / (1 + staleness)."""
    return 1.0 / (1 + staleness)


def mix_weight(relative: float, staleness: int) -> float:
    """Returns w = 0.5 rel_ij / (1 + staleness)."""
    return 0.5 * relative * staleness_scale(staleness)


# -------------------------------------------------------------------------------------------------- noloco (paper)


def largest_stable_gamma(alpha: float) -> float:
    """Returns the bound 2 (1 - alpha²): for pairs, a gamma at or above it makes the replicas fly apart.

    Second-moment analysis of NoLoCo eq. 2-3 for random pairs; the interval printed in the paper (eq. 74) contains
    unstable values for alpha > 0.5.
    """
    return 2.0 * (1.0 - alpha * alpha)


def noloco_target(theta: Vector, phi: Vector, *, beta: float, gamma: float) -> Vector:
    """Returns T = (beta/gamma) theta + (1 - beta/gamma) phi, the one tensor that NoLoCo needs from a partner.

    Algebra: beta mean(Delta) - gamma (phi_i - mean(phi)) = gamma (mean(T) - phi_i).  At gamma = beta, T is theta.
    """
    return (beta / gamma) * theta + (1.0 - beta / gamma) * phi


def noloco_outer_step(phi: Vector, m: Vector, target: Vector, D: Vector, *, alpha: float, gamma: float) -> None:
    """Takes NoLoCo's outer step with a partner, in place.

        m <- alpha m + gamma (T_i + D/2 - phi) ;  phi <- phi + m          (eq. 2-3, gamma term and sum folded)

    `D` is T_j - T_i as both see it; a zero `D` is the self-pair, for a peer whose partner was lost.
    """
    m *= alpha
    m += gamma * (target + 0.5 * D - phi)
    phi += m
