"""What a peer tells the swarm about itself: the opaque 512 bytes in its signed peer record.

Everybody can read it, nobody has to believe it: it feeds the monitor, the choice of donor and the median step, and
no single claim moves a replica.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

MAX_STATUS_BYTES = 512
# A stranger's figures end up on terminals: what no measurement can be is shown as not known.
_MEASURES = ("loss", "validation_loss", "tokens_per_s", "exchange_share")
_LARGEST_MEASURE = 1e12

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class FinalReplica(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a finished peer's last snapshot can be fetched, and the tokens that weigh it in the merge."""

    snapshot: _Hash
    blob: _Hash
    size_bytes: _Count
    tokens: _Count


class Status(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A peer's own account.  Losses are nats per token; NaN where not yet known."""

    step: _Count = 0
    total_steps: _Count = 0
    loss: float = math.nan
    validation_loss: float = math.nan
    tokens_per_s: float = 0.0
    tokens_total: _Count = 0
    last_partner: Annotated[bytes, msgspec.Meta(max_length=4)] = b""
    last_relayed: bool = False  # whether the last exchange went through a relay
    staleness: _Count = 0
    exchanges: _Count = 0
    rejected: _Count = 0
    bytes_sent: _Count = 0
    bytes_received: _Count = 0
    exchange_share: float = 0.0  # share of training time lost to the swarm
    final: FinalReplica | None = None
    merged: bool = False
    hivemind: Literal["", "starting", "up", "down"] = ""  # the optional bridge

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_status(data: bytes) -> Status:
    """Reads a stranger's status; what cannot be read counts as an empty one."""
    if len(data) > MAX_STATUS_BYTES:
        return Status()
    try:
        status = msgspec.msgpack.decode(data, type=Status)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return Status()
    measured = {name: getattr(status, name) for name in _MEASURES}
    absurd = {name: math.nan for name, value in measured.items() if not abs(value) <= _LARGEST_MEASURE}
    return msgspec.structs.replace(status, **absurd) if absurd else status


def estimate_step(status: Status, age_s: float, tokens_per_step: int) -> int:
    """Returns where a peer stands by now, from a status that is `age_s` seconds old: news takes its time."""
    speed = status.tokens_per_s if math.isfinite(status.tokens_per_s) else 0.0
    steps_since = max(0.0, age_s) * max(0.0, speed) / max(1, tokens_per_step)
    return min(status.step + int(steps_since), max(status.step, status.total_steps))
