"""A peer's own copy of the weights, with what the two mixers need beside it.

`Replica` applies the equations of `mixing` to flat torch vectors.  It knows nothing of processes or the network: the
trainer calls `close_round` at the end of a round, `mix` when an exchange has completed, `abandon` when it has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from swarmtrain import mixing
from swarmtrain.layout import FlatLayout


class Replica(Protocol):
    """What a mixer does with the replica.  Snapshots are BF16 vectors on the CPU, shape (weights,)."""

    theta: Tensor
    phi: Tensor

    def close_round(self, snapshot: Tensor) -> dict[str, float]:
        """Ends the round, writes the snapshot to exchange, and returns the drift norm per module group."""

    def mix(self, own: Tensor, partner: Tensor, weight: float, factors: Mapping[str, float]) -> None:
        """Mixes with the partner's snapshot, matched against the own one of the same exchange."""

    def abandon(self) -> None:
        """Settles a closed round whose exchange did not happen."""

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint must hold, by name."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state`, in place."""

    def adopt(self, snapshot: Tensor) -> None:
        """Starts over from another replica's snapshot."""


class _FlatReplica:
    """The vectors both mixers share: theta (views of it are the model's parameters), phi, m."""

    def __init__(self, theta: Tensor, layout: FlatLayout) -> None:
        self.theta = theta
        self.phi = theta.clone()
        self.m = torch.zeros_like(theta)
        self._groups = layout.groups()

    def state(self) -> dict[str, Tensor]:
        return {"theta": self.theta, "phi": self.phi, "m": self.m}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, vector in self.state().items():
            vector.copy_(state[name])

    def adopt(self, snapshot: Tensor) -> None:
        self.theta.copy_(snapshot)
        self.phi.copy_(self.theta)
        self.m.zero_()

    def _drift_norms(self) -> dict[str, float]:
        return {
            group: sum(float((self.theta[part] - self.phi[part]).square().sum()) for part in parts) ** 0.5
            for group, parts in self._groups.items()
        }

    def _difference(self, own: Tensor, partner: Tensor, part: slice, factor: float) -> Tensor:
        """Returns the clipped visible difference D of one slice, in FP32 on the replica's device."""
        device = self.theta.device
        D = partner[part].to(device, torch.float32) - own[part].to(device, torch.float32)
        return D if factor >= 1.0 else D * factor


class MatchedReplica(_FlatReplica):
    """Own outer step first, then the matched, visible mix (the default)."""

    def __init__(self, theta: Tensor, layout: FlatLayout, *, alpha: float, beta: float) -> None:
        super().__init__(theta, layout)
        self._alpha, self._beta = alpha, beta

    @torch.no_grad()
    def close_round(self, snapshot: Tensor) -> dict[str, float]:
        norms = self._drift_norms()
        mixing.outer_step(self.theta, self.phi, self.m, alpha=self._alpha, beta=self._beta)
        snapshot.copy_(self.phi)
        return norms

    @torch.no_grad()
    def mix(self, own: Tensor, partner: Tensor, weight: float, factors: Mapping[str, float]) -> None:
        for group, parts in self._groups.items():
            for part in parts:
                D = self._difference(own, partner, part, factors.get(group, 1.0))
                mixing.mix(self.theta[part], self.phi[part], D, weight)

    def abandon(self) -> None:
        """Nothing to settle: the outer step never needed a partner."""


class NolocoReplica(_FlatReplica):
    """The paper's form: the outer step happens with the partner, or alone when there is none.

    Between `close_round` and `mix` training goes on; the progress made meanwhile is kept by moving theta by as much
    as the outer step moves the replica away from where the round was closed.
    """

    def __init__(self, theta: Tensor, layout: FlatLayout, *, alpha: float, beta: float, gamma: float) -> None:
        """Raises ValueError where the replicas would fly apart."""
        if gamma >= mixing.largest_stable_gamma(alpha):
            raise ValueError(
                f"mixer noloco diverges: gamma {gamma} must be below 2(1 - alpha²) = "
                f"{mixing.largest_stable_gamma(alpha):g} at alpha {alpha}"
            )
        super().__init__(theta, layout)
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._target: Tensor | None = None
        self._closed_at: Tensor | None = None

    @torch.no_grad()
    def close_round(self, snapshot: Tensor) -> dict[str, float]:
        if self._target is not None:
            self.abandon()
        norms = self._drift_norms()
        self._target = mixing.noloco_target(self.theta, self.phi, beta=self._beta, gamma=self._gamma)
        self._closed_at = self.theta.clone()
        snapshot.copy_(self._target)
        return norms

    @torch.no_grad()
    def mix(self, own: Tensor, partner: Tensor, weight: float, factors: Mapping[str, float]) -> None:
        """Takes the outer step with the partner.  The paper weighs both peers alike, so `weight` scales D by 2w.

        When a later round has been settled meanwhile, its outer step is done: then the pair only moves together.
        """
        D = torch.empty_like(self.theta)
        for group, parts in self._groups.items():
            for part in parts:
                D[part] = self._difference(own, partner, part, factors.get(group, 1.0)) * (2.0 * weight)
        if self._target is None:
            mixing.mix(self.theta, self.phi, D, 0.5)
        else:
            self._outer_step(D)

    @torch.no_grad()
    def abandon(self) -> None:
        if self._target is not None:
            self._outer_step(torch.zeros_like(self.theta))

    def adopt(self, snapshot: Tensor) -> None:
        super().adopt(snapshot)
        self._target = self._closed_at = None

    def _outer_step(self, D: Tensor) -> None:
        if self._target is None or self._closed_at is None:
            raise RuntimeError("no closed round to mix")
        mixing.noloco_outer_step(self.phi, self.m, self._target, D, alpha=self._alpha, gamma=self._gamma)
        self.theta += self.phi - self._closed_at
        self._target = self._closed_at = None
