"""What an exchange is made of: its settings, what it needs from others, one session's state, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import trio
from swarm_peer.addresses import Contact
from swarm_peer.errors import ProtocolError, Refusal

from swarmtrain.exchange_messages import Offer
from swarmtrain.snapshots import EncodedSnapshot, Payload, PayloadInvalid, Snapshot
from swarmtrain.trainer_link import ClosedRound, MixOrder


class Partners(Protocol):
    """Who could be met: live training peers of the run."""

    def candidates(self) -> list[Contact]: ...

    def contact(self, peer_id: bytes) -> Contact:
        """Returns how to reach a peer that has just contacted us."""

    def swarm_step(self) -> int | None:
        """Returns the median schedule step of the live training peers: what no single peer can claim away."""


class Blobs(Protocol):
    """Moves payloads by content."""

    def put(self, data: bytes) -> bytes: ...

    def discard(self, blob_id: bytes) -> None: ...

    async def fetch(self, blob_id: bytes, holder: Contact, *, max_size_bytes: int, deadline_s: float) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """What the run and the link say about exchanges."""

    run_id: bytes
    staleness_cutoff: int  # rounds
    outer_gain: float  # beta / (1 - alpha), or gamma / (1 - alpha)
    boundary_deadline_s: float = 60.0  # a partner's trainer reaches its next step boundary within this
    transfer_deadline_s: float = 600.0
    attempts_per_round: int = 8
    busy_pause_s: float = 0.3
    backoff_s: float = 15.0  # at most a round
    staleness_floor_s: float = 2.0  # what is trained within this counts as one round at most
    ration: float = 0.25  # others may close our rounds no more often than once in this share of a round's time


@dataclass(frozen=True, slots=True)
class Report:
    """One exchange as it went, for the event log and the status."""

    partner: bytes
    initiated: bool
    outcome: str  # "mixed", or the reason why not
    staleness: int = 0
    weight: float = 0.0
    clipped: bool = False
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    patch: bool = False
    seconds: float = 0.0


class ExchangeFailed(Exception):
    """A session ends without a mix; `reason` is a short token."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Stage(Enum):
    """How far a responder's session has come; it never goes back."""

    OPEN = 0
    COMMITTING = 1
    READY = 2
    APPLYING = 3


@dataclass(slots=True)
class Session:
    """One meeting, on either side."""

    id: bytes
    partner: Contact
    theirs: Offer
    started_s: float
    closed: ClosedRound
    own: Snapshot
    encoded: EncodedSnapshot
    blob: bytes
    partner_snapshot: Snapshot | None = None
    order: MixOrder | None = None
    staleness: int = 0
    received_bytes: int = 0
    clipped: bool = False
    patch: bool = False
    stage: Stage = Stage.OPEN
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def own_payload(self) -> Payload:
        """What the partner is told of our snapshot, to fetch and verify it."""
        return Payload(self.own.hash, self.encoded.base, self.blob, len(self.encoded.data))

    def report_mixed(self, *, initiated: bool, now_s: float) -> Report:
        """Returns the report of a session that has ended with a mix."""
        assert self.order is not None
        return Report(
            partner=self.partner.peer_id,
            initiated=initiated,
            outcome="mixed",
            staleness=self.staleness,
            weight=self.order.weight,
            clipped=self.clipped,
            payload_bytes_sent=len(self.encoded.data),
            payload_bytes_received=self.received_bytes,
            patch=self.patch,
            seconds=now_s - self.started_s,
        )


def reason_of(error: BaseException) -> str:
    """Returns the short token by which an error is reported, counted and told to the partner."""
    if isinstance(error, Refusal):
        return error.code
    reason = getattr(error, "reason", "")
    return (
        reason if isinstance(error, ExchangeFailed | PayloadInvalid | ProtocolError) else type(error).__name__.lower()
    )
