"""What a checkpoint holds of a trainer, so that it resumes exactly: tensors, and its place in run and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from swarmtrain.checkpoint import CheckpointError
from swarmtrain.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a trainer stands: in the swarm's schedule (`step`), in its own data, and in its accounts."""

    step: int
    joined_at: int
    batches_done: int
    tokens_total: int
    round: int
    train_s: float
    exchange_s: float

    def to_meta(self, run_id: bytes) -> dict[str, str | int | float]:
        """Returns what the checkpoint's JSON holds."""
        return {"run": run_id.hex(), **asdict(self)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], run_id: bytes, directory: Path) -> Place:
        """Reads `to_meta` back.  Raises CheckpointError for another run's checkpoint or a damaged one."""
        if meta.get("run") != run_id.hex():
            raise CheckpointError(f"{directory}: this checkpoint belongs to run {meta.get('run')}, not {run_id.hex()}")
        try:
            return msgspec.convert({name: value for name, value in meta.items() if name != "run"}, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{directory}: the checkpoint is not one of a trainer: {error}") from None


def collect_state(replica: Replica, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies everything that training changes to the CPU: replica, optimizer moments, random numbers."""
    tensors = {f"replica.{name}": tensor.to("cpu", copy=True) for name, tensor in replica.state().items()}
    for index, state in enumerate(optimizer.state_dict()["state"].values()):
        for name, tensor in state.items():
            tensors[f"optimizer.{index}.{name}"] = tensor.to("cpu", copy=True)
    tensors["rng"] = torch.get_rng_state().clone()
    return tensors


def restore_state(tensors: Mapping[str, Tensor], replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """Puts back what `collect_state` has copied.  Raises CheckpointError when it does not fit."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, field = name.split(".", 2)
            moments.setdefault(int(index), {})[field] = tensor
    try:
        with torch.no_grad():
            replica.load_state(
                {name.removeprefix("replica."): t for name, t in tensors.items() if name.startswith("replica.")}
            )
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        torch.set_rng_state(tensors["rng"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint does not fit this run's model: {error}") from None
