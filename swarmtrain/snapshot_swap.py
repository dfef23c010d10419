"""How two snapshots change places: each side offers its own, encodes it, and receives and judges the other's.

Initiator and responder do this alike; in which order and with what outcome for the session is `exchange`'s.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from swarm_peer.blobs import Offload
from swarm_peer.errors import ProtocolError

from swarmtrain.exchange_messages import Offer
from swarmtrain.exchange_session import Blobs, ExchangeConfig, ExchangeFailed, Session
from swarmtrain.guard import Guard
from swarmtrain.layout import FlatLayout, bf16_to_fp32, chunks
from swarmtrain.mixing import mix_weight, relative_weight
from swarmtrain.snapshots import (
    EncodedSnapshot,
    Payload,
    PayloadInvalid,
    Snapshot,
    SnapshotLibrary,
    decode_payload,
    encode_payload,
    max_payload_bytes,
    take_snapshot,
)
from swarmtrain.staleness import Staleness
from swarmtrain.trainer_link import ClosedRound, MixOrder


class SnapshotSwap:
    """Moves snapshots between this peer and its partners; heavy work is done through `offload`."""

    def __init__(
        self, config: ExchangeConfig, *, blobs: Blobs, library: SnapshotLibrary, staleness: Staleness, offload: Offload
    ) -> None:
        self._config = config
        self._blobs = blobs
        self._library = library
        self._layout: FlatLayout = library.layout
        self._staleness = staleness
        self._offload = offload
        self._guard = Guard(config.outer_gain)

    async def take(self, closed: ClosedRound) -> Snapshot:
        """Returns the snapshot of a closed round."""
        return await self._offload(take_snapshot, self._layout, closed.bits)

    def offer(self, closed: ClosedRound, own: Snapshot) -> Offer:
        """Returns what a partner must know of our side before it can encode for us."""
        return Offer(
            run_id=self._config.run_id,
            snapshot=own.hash,
            step=closed.step,
            round_steps=closed.round_steps,
            tokens=closed.effort.tokens,
            steps=closed.effort.steps,
            haves=self._library.names(),
        )

    async def encode(self, own: Snapshot, theirs: Offer) -> tuple[EncodedSnapshot, bytes]:
        """Encodes our snapshot against a base that both hold; returns it and the id of its blob, to be discarded."""
        bases = self._library.common(theirs.haves)
        encoded = await self._offload(encode_payload, self._layout, own, bases)
        return encoded, await self._offload(self._blobs.put, encoded.data)

    def discard(self, blob: bytes) -> None:
        """Lets go of an encoded snapshot that nobody fetches any more."""
        self._blobs.discard(blob)

    async def receive(self, session: Session, payload: Payload) -> None:
        """Fetches, verifies and judges the partner's snapshot; afterwards the session is ready to mix.

        Raises ProtocolError, PayloadInvalid, ExchangeFailed and what fetching raises.
        """
        cap = max_payload_bytes(self._layout)
        if not 0 < payload.size_bytes <= cap:
            raise ProtocolError("oversized-payload")
        base = self._library.get(payload.base) if payload.base else None
        if payload.base and base is None:
            raise PayloadInvalid("unknown-base")
        data = await self._blobs.fetch(
            payload.blob,
            session.partner,
            max_size_bytes=payload.size_bytes,
            deadline_s=self._config.transfer_deadline_s,
        )
        snapshot = await self._offload(decode_payload, self._layout, payload, data, base)
        norms = await self._offload(difference_norms, self._layout, session.own.bits, snapshot.bits)
        session.staleness = self._staleness.of(session.closed, session.theirs)
        verdict = self._guard.judge(session.partner.peer_id, norms, session.closed.drift_norms)
        if not verdict.accepted:
            raise ExchangeFailed(verdict.reason)
        relative = relative_weight(session.closed.effort, session.theirs.effort)
        weight = mix_weight(relative, session.staleness)
        credible_step = self._staleness.credible_step(session.closed, session.theirs)
        session.order = MixOrder(weight, verdict.factors, credible_step)
        session.partner_snapshot = snapshot
        session.received_bytes = len(data)
        session.clipped = verdict.clipped
        session.patch = bool(payload.base)

    def keep(self, *pair: Snapshot) -> None:
        """Keeps two snapshots that both sides hold from now on: the bases of their next meeting."""
        for snapshot in pair:
            self._library.add(snapshot)


def difference_norms(layout: FlatLayout, own: NDArray[np.uint16], partner: NDArray[np.uint16]) -> dict[str, float]:
    """Returns the L2 norm of D = S_j - S_i per module group."""
    norms = {}
    for group, parts in layout.groups().items():
        total = 0.0
        for part in parts:
            for piece in chunks(part.stop - part.start):
                at = slice(part.start + piece.start, part.start + piece.stop)
                D = bf16_to_fp32(partner[at]) - bf16_to_fp32(own[at])
                total += float(np.dot(D, D))
        norms[group] = total**0.5
    return norms
