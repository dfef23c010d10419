"""What two peers say to each other in an exchange: typed messages and their methods.

The order in which they come is in `exchange`; `peer/PROTOCOL.md` describes the frames that carry them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from swarm_peer.rpc import Method

from swarmtrain.mixing import Effort
from swarmtrain.snapshots import HASH_BYTES, MAX_HAVES, Payload

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]


class Offer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What one side brings.  `tokens` and `steps` count since its last exchange; `haves` are bases it holds."""

    run_id: Hash
    snapshot: Hash
    step: Count
    round_steps: Count
    tokens: Count
    steps: Count
    haves: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_HAVES)]

    @property
    def effort(self) -> Effort:
        return Effort(self.tokens, self.steps)


SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class OpenRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    session: SessionId
    offer: Offer


class OpenReply(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    offer: Offer
    payload: Payload


class CommitRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    session: SessionId
    payload: Payload


class ApplyRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    session: SessionId


class CancelRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    session: SessionId
    reason: Annotated[str, msgspec.Meta(max_length=40)]


class Done(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An empty reply."""


OPEN = Method("exchange.open", OpenRequest, OpenReply, max_request_bytes=2048, max_reply_bytes=2048)
COMMIT = Method("exchange.commit", CommitRequest, Done, max_request_bytes=1024, max_reply_bytes=64)
APPLY = Method("exchange.apply", ApplyRequest, Done, max_request_bytes=128, max_reply_bytes=64)
CANCEL = Method("exchange.cancel", CancelRequest, Done, max_request_bytes=128, max_reply_bytes=64)
