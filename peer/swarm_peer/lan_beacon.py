"""The beacon by which peers of one local network find each other without any address: the packet, free of I/O.

A beacon is a hint and no more: who really listens at the port proves its identity over TLS. It names the runs only by
tags, from which nobody learns a run id that is not known to him already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from swarm_peer.addresses import Address, PeerIdBytes
from swarm_peer.identity import PeerId
from swarm_peer.routing import is_local
from swarm_peer.storage import RateLimiter

MAX_BEACON_BYTES: Final = 256
MAX_TAGS: Final = 8
TAG_BYTES: Final = 16
_MAGIC: Final = b"SWL1"  # the last character is the version
_TAG_CONTEXT: Final = "swarmtrain 2026 lan beacon run tag v1"

Tag = Annotated[bytes, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]


class Beacon(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who listens on which port of the sender's address, and the tags of its runs (none: a peer of any run)."""

    peer_id: PeerIdBytes
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tags: Annotated[tuple[Tag, ...], msgspec.Meta(max_length=MAX_TAGS)]


def run_tag(run_id: bytes) -> bytes:
    """Returns the 16 bytes that stand for a run: BLAKE3 of its id in a context of its own."""
    return blake3(run_id, derive_key_context=_TAG_CONTEXT).digest(length=TAG_BYTES)


def encode_beacon(beacon: Beacon) -> bytes:
    """Returns the packet, at most `MAX_BEACON_BYTES`."""
    return _MAGIC + msgspec.msgpack.encode(beacon)


def decode_beacon(packet: bytes) -> Beacon | None:
    """Reads a packet from anybody in the local network; None if it is no beacon of this version."""
    if len(packet) > MAX_BEACON_BYTES or not packet.startswith(_MAGIC):
        return None
    try:
        return msgspec.msgpack.decode(packet[len(_MAGIC) :], type=Beacon)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Heard:
    """A peer that is worth dialling; `is_new` if it was not heard before."""

    peer_id: PeerId
    address: Address
    is_new: bool


class Listening:
    """What is made of the packets that come in: whom to dial, at most once per `repeat_s` each.

    `wanted` are the tags of our own runs; without any, every peer is of interest. `now` is monotonic seconds.
    """

    def __init__(self, own_id: PeerId, *, repeat_s: float = 60.0, memory: int = 256) -> None:
        self.wanted: set[bytes] = set()
        self._own_id = own_id
        self._repeat_s = repeat_s
        self._memory = memory
        self._told: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self._per_host = RateLimiter(rate_per_s=1.0, burst=10.0)
        self._in_all = RateLimiter(rate_per_s=20.0, burst=100.0)

    def take(self, packet: bytes, source: str, now: float) -> Heard | None:
        """Returns an entry point if the packet is a beacon of a peer that is worth dialling now."""
        # A beacon from beyond the local network is forged: its packets do not leave it.
        if not is_local(source):
            return None
        if not self._per_host.allow(source.encode(), now) or not self._in_all.allow(b"", now):
            return None
        beacon = decode_beacon(packet)
        if beacon is None or beacon.peer_id == self._own_id:
            return None
        if self.wanted and beacon.tags and not self.wanted.intersection(beacon.tags):
            return None
        key = (beacon.peer_id, source)
        told_at = self._told.get(key)
        if told_at is not None and now - told_at < self._repeat_s:
            return None
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > self._memory:
            self._told.popitem(last=False)
        return Heard(PeerId(beacon.peer_id), Address(source, beacon.port), told_at is None)


def beacon_of(peer_id: PeerId, port: int, run_ids: Iterable[bytes]) -> Beacon:
    """Returns our own beacon; of more runs than fit, the first are named."""
    return Beacon(peer_id, port, tuple(map(run_tag, list(run_ids)[:MAX_TAGS])))
