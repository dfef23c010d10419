"""The routing table of the DHT: which peers to ask about which part of the id space.

Kademlia (Maymounkov and Mazières, 2002, §2.4) with its buckets unfolded lazily: bucket `i` holds the contacts
that share exactly `i` leading bits with us, and the last bucket all that share more, until it is full and
splits.

Promises: memory is bounded; a contact that answers is never displaced by a newcomer (§2.2: old contacts are
the most likely to stay); a contact leaves only through `failed`, after a ping went unanswered. At most
`per_network` contacts of one /24 (IPv4) or /48 (IPv6) sit in a bucket or in an answer, so that one subnet
cannot surround a key. Loopback and private networks are exempt: there, many peers on one machine are the
normal case.

No I/O: the caller pings whom `offer` names and reports back.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from swarm_peer.addresses import Address, Contact

ID_BITS: Final = 256


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """`k`: contacts per bucket and per answer. `replacements`: waiting contacts per bucket. `per_network`:
    see module.
    """

    k: int = 20
    replacements: int = 10
    per_network: int = 2


@dataclass(slots=True)
class _Bucket:
    # Both in order of last contact, the least recent first; values are (contact, time of last contact).
    contacts: dict[bytes, tuple[Contact, float]] = field(default_factory=dict)
    replacements: dict[bytes, tuple[Contact, float]] = field(default_factory=dict)
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

    def offer(self, contact: Contact, now: float) -> Contact | None:
        """Takes a contact that has just been reached, or refreshes it.

        If its bucket is full it becomes a replacement, and the bucket's least recently seen contact is
        returned: ping that one, then call `offer` with it if it answers or `failed` if not.
        """
        if contact.peer_id == self._own_id or not contact.addresses:
            return None
        while True:
            bucket = self._bucket_of(contact.peer_id)
            if contact.peer_id in bucket.contacts:
                del bucket.contacts[contact.peer_id]
                bucket.contacts[contact.peer_id] = (contact, now)
                return None
            if not self._network_has_room(contact, bucket):
                return None
            if len(bucket.contacts) < self._params.k:
                bucket.replacements.pop(contact.peer_id, None)
                bucket.contacts[contact.peer_id] = (contact, now)
                return None
            if bucket is not self._buckets[-1] or len(self._buckets) >= ID_BITS:
                break
            self._split_last()
        bucket.replacements.pop(contact.peer_id, None)
        bucket.replacements[contact.peer_id] = (contact, now)
        while len(bucket.replacements) > self._params.replacements:
            del bucket.replacements[next(iter(bucket.replacements))]
        return next(iter(bucket.contacts.values()))[0]

    def failed(self, peer_id: bytes) -> None:
        """Removes a contact that left a ping unanswered; its bucket's most recent fitting replacement moves
        up.
        """
        bucket = self._bucket_of(peer_id)
        bucket.replacements.pop(peer_id, None)
        if bucket.contacts.pop(peer_id, None) is None:
            return
        for replacement_id, (contact, seen_at) in reversed(list(bucket.replacements.items())):
            if self._network_has_room(contact, bucket):
                del bucket.replacements[replacement_id]
                bucket.contacts[replacement_id] = (contact, seen_at)
                return

    def closest(self, target: bytes, count: int | None = None) -> list[Contact]:
        """The `count` (default k) contacts nearest to `target`, nearest first, within the limit per network."""
        everyone = [contact for bucket in self._buckets for contact, _ in bucket.contacts.values()]
        everyone.sort(key=lambda contact: distance(contact.peer_id, target))
        return pick_diverse(everyone, count or self._params.k, self._params.per_network)

    def contacts(self) -> list[Contact]:
        return [contact for bucket in self._buckets for contact, _ in bucket.contacts.values()]

    def get(self, peer_id: bytes) -> Contact | None:
        found = self._bucket_of(peer_id).contacts.get(peer_id)
        return found[0] if found else None

    def least_recent(self) -> tuple[Contact, float] | None:
        """The contact not heard from for longest, and when it last was: the next one to ping."""
        heads = [next(iter(bucket.contacts.values())) for bucket in self._buckets if bucket.contacts]
        return min(heads, key=lambda head: head[1], default=None)

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

    def _network_has_room(self, contact: Contact, bucket: _Bucket) -> bool:
        network = network_of(contact)
        if network is None:
            return True
        inside = sum(network_of(other) == network for other, _ in bucket.contacts.values())
        return inside < self._params.per_network


def distance(a: bytes, b: bytes) -> int:
    """The XOR metric of Kademlia, as an integer."""
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


def shared_bits(a: bytes, b: bytes) -> int:
    """How many leading bits two 32-byte ids have in common (0..256)."""
    return ID_BITS - distance(a, b).bit_length()


def network_of(contact: Contact) -> Hashable | None:
    """The /24 or /48 of a contact's first address; None if it is exempt (loopback or private)."""
    return _network(contact.addresses[0].host, 24, 48) if contact.addresses else None


def wide_network_of(addresses: tuple[Address, ...]) -> Hashable | None:
    """The /16 or /32 of the first address, for limits per key; None if exempt."""
    return _network(addresses[0].host, 16, 32) if addresses else None


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
    """True for literal loopback, private and link-local addresses, and for "localhost"."""
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
    try:
        ip = ipaddress.ip_address(address.host.partition("%")[0])
    except ValueError:
        return local_allowed or address.host != "localhost"
    if ip.is_multicast or ip.is_unspecified:
        return False
    return local_allowed or not is_local(address.host)


def pick_diverse(
    contacts: Iterable[Contact],
    count: int,
    per_network: int,
    network: Callable[[Contact], Hashable | None] = network_of,
) -> list[Contact]:
    """The first `count` contacts of which at most `per_network` are in one network."""
    picked: list[Contact] = []
    taken: dict[Hashable, int] = {}
    for contact in contacts:
        if len(picked) == count:
            break
        group = network(contact)
        if group is not None:
            if taken.get(group, 0) >= per_network:
                continue
            taken[group] = taken.get(group, 0) + 1
        picked.append(contact)
    return picked
