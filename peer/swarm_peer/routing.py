"""The routing table of the DHT: which peers to ask about which part of the id space.

Kademlia (Maymounkov and Mazières, 2002, §2.4) with its buckets unfolded lazily: bucket `i` holds the contacts
that share exactly `i` leading bits with us, and the last bucket all that share more, until it is full and
splits.

Promises: memory is bounded; a contact that answers is never displaced by a newcomer (§2.2: old contacts are
the most likely to stay); a contact leaves only through `failed`, after a ping went unanswered. At most
`per_network` contacts of one /24 (IPv4) or /48 (IPv6) sit in a bucket or in an answer, so that one subnet
cannot surround a key. What counts is where a contact was reached, not what it says. Loopback and private networks
are exempt: there, many peers on one machine are the normal case.

No I/O: the caller pings whom `offer` names and reports back.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from swarm_peer.addresses import RELAY_PREFIX, Address, Contact
from swarm_peer.relay_entry import relay_of

ID_BITS: Final = 256


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """`k`: contacts per bucket and per answer. `replacements`: waiting contacts per bucket. `per_network`:
    see module.
    """

    k: int = 20
    replacements: int = 10
    per_network: int = 2


class _Seen(NamedTuple):
    """A contact, when it was last heard from, and the network in which it was reached."""

    contact: Contact
    at: float
    network: Hashable | None


@dataclass(slots=True)
class _Bucket:
    # Both in order of last contact, the least recent first.
    contacts: dict[bytes, _Seen] = field(default_factory=dict)
    replacements: dict[bytes, _Seen] = field(default_factory=dict)
    refreshed_at: float = float("-inf")


class RoutingTable:
    """Known servers of the DHT by distance from `own_id`."""

    def __init__(self, own_id: bytes, params: RoutingParams | None = None) -> None:
        self._own_id = own_id
        self._params = params or RoutingParams()
        self._buckets = [_Bucket()]

    def __len__(self) -> int:
        return sum(len(bucket.contacts) for bucket in self._buckets)

    def __contains__(self, peer_id: bytes) -> bool:
        return peer_id in self._bucket_of(peer_id).contacts

    def offer(self, contact: Contact, now: float, host: str | None = None) -> Contact | None:
        """Takes a contact that has just been reached at `host`, or refreshes it. None: at its first address.

        If its bucket is full it becomes a replacement, and the bucket's least recently seen contact is
        returned: ping that one, then call `offer` with it if it answers or `failed` if not.
        """
        if contact.peer_id == self._own_id or not contact.addresses:
            return None
        seen = _Seen(contact, now, network_of(contact, host))
        while True:
            bucket = self._bucket_of(contact.peer_id)
            if contact.peer_id in bucket.contacts:
                before = bucket.contacts.pop(contact.peer_id)
                if seen.network == before.network or _has_room(seen, bucket, self._params.per_network):
                    bucket.contacts[contact.peer_id] = seen
                else:
                    self._move_up(bucket)
                return None
            if not _has_room(seen, bucket, self._params.per_network):
                return None
            if len(bucket.contacts) < self._params.k:
                bucket.replacements.pop(contact.peer_id, None)
                bucket.contacts[contact.peer_id] = seen
                return None
            if bucket is not self._buckets[-1] or len(self._buckets) >= ID_BITS:
                break
            self._split_last()
        bucket.replacements.pop(contact.peer_id, None)
        bucket.replacements[contact.peer_id] = seen
        while len(bucket.replacements) > self._params.replacements:
            del bucket.replacements[next(iter(bucket.replacements))]
        return next(iter(bucket.contacts.values())).contact

    def failed(self, peer_id: bytes) -> None:
        """Removes a contact that left a ping unanswered; its bucket's most recent fitting replacement moves
        up.
        """
        bucket = self._bucket_of(peer_id)
        bucket.replacements.pop(peer_id, None)
        if bucket.contacts.pop(peer_id, None) is not None:
            self._move_up(bucket)

    def _move_up(self, bucket: _Bucket) -> None:
        for replacement_id, seen in reversed(list(bucket.replacements.items())):
            if _has_room(seen, bucket, self._params.per_network):
                del bucket.replacements[replacement_id]
                bucket.contacts[replacement_id] = seen
                return

    def forget_replacements(self, silent_since: float) -> None:
        """Drops the replacements not heard from after `silent_since`: nobody pings them, so they may be long gone."""
        for bucket in self._buckets:
            bucket.replacements = {p: seen for p, seen in bucket.replacements.items() if seen.at > silent_since}

    def closest(self, target: bytes, count: int | None = None) -> list[Contact]:
        """The `count` (default k) contacts nearest to `target`, nearest first, within the limit per network."""
        aim = int.from_bytes(target, "big")
        everyone = [seen for bucket in self._buckets for seen in bucket.contacts.values()]
        everyone.sort(key=lambda seen: int.from_bytes(seen.contact.peer_id, "big") ^ aim)
        nearest = pick_diverse(everyone, count or self._params.k, self._params.per_network, lambda seen: seen.network)
        return [seen.contact for seen in nearest]

    def contacts(self) -> list[Contact]:
        return [seen.contact for bucket in self._buckets for seen in bucket.contacts.values()]

    def get(self, peer_id: bytes) -> Contact | None:
        seen = self._bucket_of(peer_id).contacts.get(peer_id)
        return seen.contact if seen else None

    def least_recent(self) -> tuple[Contact, float] | None:
        """The contact not heard from for longest, and when it last was: the next one to ping."""
        heads = [next(iter(bucket.contacts.values())) for bucket in self._buckets if bucket.contacts]
        oldest = min(heads, key=lambda head: head.at, default=None)
        return (oldest.contact, oldest.at) if oldest else None

    def refresh_target(self, random_id: bytes, now: float) -> bytes:
        """An id in the bucket that has gone longest without a lookup; marks it refreshed. Look this id up
        next.

        `random_id` is 32 random bytes; the id returned takes its low bits from there.
        """
        index = min(range(len(self._buckets)), key=lambda i: self._buckets[i].refreshed_at)
        self._buckets[index].refreshed_at = now
        own, noise = int.from_bytes(self._own_id, "big"), int.from_bytes(random_id, "big")
        free_bits = ID_BITS - index
        prefix = own >> free_bits << free_bits
        target = prefix | (noise & ((1 << free_bits) - 1))
        if index < len(self._buckets) - 1:
            # An inner bucket differs from us in the bit right after the prefix that we share.
            flip = 1 << (free_bits - 1)
            target = (target & ~flip) | (~own & flip)
        return target.to_bytes(32, "big")

    def _bucket_of(self, peer_id: bytes) -> _Bucket:
        return self._buckets[min(shared_bits(self._own_id, peer_id), len(self._buckets) - 1)]

    def _split_last(self) -> None:
        """Moves those who share one bit more with us than the last bucket asks for into a new last bucket."""
        last, new, depth = self._buckets[-1], _Bucket(), len(self._buckets)
        new.refreshed_at = last.refreshed_at
        for old_side, new_side in ((last.contacts, new.contacts), (last.replacements, new.replacements)):
            for peer_id in [p for p in old_side if shared_bits(self._own_id, p) >= depth]:
                new_side[peer_id] = old_side.pop(peer_id)
        self._buckets.append(new)


def _has_room(seen: _Seen, bucket: _Bucket, per_network: int) -> bool:
    if seen.network is None:
        return True
    return sum(other.network == seen.network for other in bucket.contacts.values()) < per_network


def distance(a: bytes, b: bytes) -> int:
    """The XOR metric of Kademlia, as an integer."""
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


def shared_bits(a: bytes, b: bytes) -> int:
    """How many leading bits two 32-byte ids have in common (0..256)."""
    return ID_BITS - distance(a, b).bit_length()


def network_of(contact: Contact, host: str | None = None) -> Hashable | None:
    """The /24 or /48 of `host`, where the contact was reached, or else of its first address.

    None if it is exempt (loopback or private).
    """
    if host is None:
        if not contact.addresses:
            return None
        host = contact.addresses[0].host
    return _network(host, 24, 48)


def wide_network_of(addresses: tuple[Address, ...], host: str | None = None) -> Hashable | None:
    """The /16 or /32 of `host` or else of the first address, for limits per key; None if exempt."""
    if host is None:
        if not addresses:
            return None
        host = addresses[0].host
    return _network(host, 16, 32)


@lru_cache(maxsize=4096)
def _network(host: str, v4_bits: int, v6_bits: int) -> Hashable | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # Names get one group each: resolving them here would be I/O.
        return ("name", host.lower())
    if is_local(host):
        return None
    bits = v4_bits if ip.version == 4 else v6_bits
    return (ip.version, int(ip) >> (ip.max_prefixlen - bits))


@lru_cache(maxsize=4096)
def is_local(host: str) -> bool:
    """True for literal loopback, private and link-local addresses, for "localhost", and for such a relay's entry."""
    if host.startswith(RELAY_PREFIX):
        relay = relay_of(Address(host, 1))
        return relay is not None and is_local(relay.addresses[0].host)
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return ip.is_loopback or ip.is_private or ip.is_link_local


@lru_cache(maxsize=4096)
def is_dialable(address: Address, *, local_allowed: bool) -> bool:
    """True if an address told by a stranger may be dialled or passed on.

    Never multicast, unspecified or port 0; local ones only where we are in a local network ourselves, so that
    a stranger on the internet cannot aim our connections at machines behind our router.
    """
    if address.port == 0:
        return False
    if address.host.startswith(RELAY_PREFIX):
        relay = relay_of(address)
        return relay is not None and is_dialable(relay.addresses[0], local_allowed=local_allowed)
    try:
        ip = ipaddress.ip_address(address.host.partition("%")[0])
    except ValueError:
        return local_allowed or address.host != "localhost"
    if ip.is_multicast or ip.is_unspecified:
        return False
    return local_allowed or not is_local(address.host)


T = TypeVar("T")


def pick_diverse(items: Iterable[T], count: int, per_network: int, network: Callable[[T], Hashable | None]) -> list[T]:
    """The first `count` items of which at most `per_network` are in one network."""
    picked: list[T] = []
    taken: dict[Hashable, int] = {}
    for item in items:
        if len(picked) == count:
            break
        group = network(item)
        if group is not None:
            if taken.get(group, 0) >= per_network:
                continue
            taken[group] = taken.get(group, 0) + 1
        picked.append(item)
    return picked
