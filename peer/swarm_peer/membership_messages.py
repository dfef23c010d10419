"""The messages and methods of membership. `DISCOVERY.md` has the tables."""

from __future__ import annotations

import functools
from typing import Annotated, Final

import msgspec

from swarm_peer.members import MessageDigests, MessageIds, MessageRecords
from swarm_peer.records import AgedRecord
from swarm_peer.rpc import Method, Priority

PAGE: Final = 40


class Exchange(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """First half of a meeting: our versions (all of them, if `is_complete`), and news."""

    digests: MessageDigests
    is_complete: bool
    records: MessageRecords


class ExchangeReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What we lack, what the other wants of us, and its own versions."""

    records: MessageRecords
    wants: MessageIds
    digests: MessageDigests


class Trade(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Second half, or news by itself: records, and whose records we want in return."""

    records: MessageRecords
    wants: MessageIds


class TradeReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The records that were wanted, and the sender's own if we have a newer one than it told."""

    records: MessageRecords


class ListRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A monitor's question: the members whose ids follow `after` (32 bytes, or empty to begin)."""

    after: Annotated[bytes, msgspec.Meta(max_length=32)]


class ListReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One page in the order of ids, and how many members there are in all."""

    total: int
    records: Annotated[tuple[AgedRecord, ...], msgspec.Meta(max_length=PAGE)]


@functools.lru_cache(maxsize=64)
def methods_of(
    run_id: bytes,
) -> tuple[Method[Exchange, ExchangeReply], Method[Trade, TradeReply], Method[ListRequest, ListReply]]:
    """The methods of one run. The run is part of their names, so one peer can be a member of several runs."""
    run = run_id.hex()[:32]
    return (
        Method(f"members.exchange.{run}", Exchange, ExchangeReply, priority=Priority.CONTROL),
        Method(f"members.trade.{run}", Trade, TradeReply, priority=Priority.CONTROL),
        Method(f"members.list.{run}", ListRequest, ListReply, 64, priority=Priority.CONTROL),
    )
