"""The routing table: bounds, eviction rule, nearest contacts, one subnet's share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_peer.addresses import Address, Contact
from swarm_peer.routing import (
    RoutingParams,
    RoutingTable,
    distance,
    is_dialable,
    network_of,
    pick_diverse,
    shared_bits,
)

OWN = bytes(32)


def contact(peer_id: bytes, host: str = "127.0.0.1") -> Contact:
    return Contact(peer_id, (Address(host, 4000),))


def far(n: int) -> bytes:
    """An id that shares no leading bit with OWN."""
    return bytes([0x80]) + n.to_bytes(31, "big")


def test_shared_bits() -> None:
    assert shared_bits(OWN, OWN) == 256
    assert shared_bits(OWN, far(1)) == 0
    assert shared_bits(OWN, bytes([1]) + bytes(31)) == 7


def test_a_full_bucket_names_its_least_recent_contact_and_keeps_it_until_it_fails() -> None:
    table = RoutingTable(OWN, RoutingParams(k=3))
    for n in range(3):
        assert table.offer(contact(far(n)), now=float(n)) is None
    table.offer(contact(far(0)), now=5.0)
    doubted = table.offer(contact(far(9)), now=6.0)
    assert doubted == contact(far(1))
    assert far(9) not in table
    table.offer(doubted, now=7.0)  # it answered the ping
    assert far(1) in table
    assert far(9) not in table
    assert table.offer(contact(far(9)), now=8.0) == contact(far(2))
    table.failed(far(2))
    assert far(2) not in table
    assert far(9) in table


def test_near_contacts_always_fit_because_the_last_bucket_splits() -> None:
    table = RoutingTable(OWN, RoutingParams(k=4))
    rng = random.Random(1)
    for _ in range(300):
        table.offer(contact(rng.randbytes(32)), now=0.0)
    near = contact(bytes(31) + b"\x01")
    assert table.offer(near, now=1.0) is None
    assert table.closest(OWN)[0] == near


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_memory_is_bounded_and_the_nearest_come_first(seed: int, count: int) -> None:
    rng = random.Random(seed)
    table = RoutingTable(OWN, RoutingParams(k=5, replacements=3))
    for n in range(count):
        # A mix of far ids and ids near to us.
        zeros = rng.randrange(4)
        table.offer(contact(bytes(zeros) + rng.randbytes(32 - zeros)), now=float(n))
        if rng.random() < 0.2:
            table.failed(rng.choice(table.contacts()).peer_id if len(table) else OWN)
    for bucket in table._buckets:
        assert len(bucket.contacts) <= 5
        assert len(bucket.replacements) <= 3
        assert not bucket.contacts.keys() & bucket.replacements.keys()
    target = rng.randbytes(32)
    nearest = table.closest(target, 5)
    assert nearest == sorted(table.contacts(), key=lambda c: distance(c.peer_id, target))[:5]


def test_neither_we_nor_contacts_without_addresses_enter() -> None:
    table = RoutingTable(OWN)
    table.offer(contact(OWN), now=0.0)
    table.offer(Contact(far(1), ()), now=0.0)
    assert len(table) == 0


def test_one_subnet_gets_two_places_and_local_networks_are_exempt() -> None:
    table = RoutingTable(OWN)
    for n in range(10):
        table.offer(contact(far(n), f"198.41.0.{n + 1}"), now=0.0)
    assert len(table) == 2
    for n in range(10, 20):
        table.offer(contact(far(n), "127.0.0.1"), now=0.0)
    assert len(table) == 12
    table.offer(contact(far(20), "198.41.1.1"), now=0.0)
    assert far(20) in table


def test_a_contact_counts_where_it_was_reached_whatever_it_says() -> None:
    table = RoutingTable(OWN)
    for n in range(10):
        table.offer(contact(far(n), f"198.41.{n}.1"), now=0.0, host=f"203.1.2.{n}")
    assert len(table) == 2
    # Those who move into a full network lose their place; the network they left has room again.
    table.offer(contact(far(20), "198.41.0.1"), now=1.0, host="198.41.0.1")
    table.offer(contact(far(20), "198.41.0.1"), now=2.0, host="203.1.2.99")
    assert far(20) not in table
    assert far(0) in table


def test_replacements_that_were_silent_for_long_are_forgotten() -> None:
    table = RoutingTable(OWN, RoutingParams(k=1))
    for n in range(3):
        table.offer(contact(far(n)), now=float(n))
    table.forget_replacements(silent_since=1.5)
    table.failed(far(0))
    assert table.contacts() == [contact(far(2))]
    table.failed(far(2))
    assert len(table) == 0


def test_networks() -> None:
    assert network_of(contact(OWN, "8.8.8.8")) == network_of(contact(OWN, "8.8.8.9"))
    assert network_of(contact(OWN, "8.8.8.8")) != network_of(contact(OWN, "8.8.9.8"))
    assert network_of(contact(OWN, "2a00:1:2:3::1")) == network_of(contact(OWN, "2a00:1:2:4::1"))
    assert network_of(contact(OWN, "192.168.1.1")) is None
    assert network_of(contact(OWN, "Example.org")) == network_of(contact(OWN, "example.org"))


def test_pick_diverse_keeps_order_and_limit() -> None:
    hosts = ["8.8.8.1", "8.8.8.2", "8.8.8.3", "9.9.9.1", "127.0.0.1"]
    contacts = [contact(far(n), host) for n, host in enumerate(hosts)]
    picked = pick_diverse(contacts, 4, 2, network_of)
    assert [c.addresses[0].host for c in picked] == [hosts[0], hosts[1], hosts[3], hosts[4]]


@pytest.mark.parametrize(
    ("host", "port", "public", "local"),
    [
        ("8.8.8.8", 80, True, True),
        ("example.org", 80, True, True),
        ("127.0.0.1", 80, False, True),
        ("localhost", 80, False, True),
        ("192.168.0.1", 80, False, True),
        ("fe80::1%eth0", 80, False, True),
        ("224.0.0.1", 80, False, False),
        ("0.0.0.0", 80, False, False),
        ("8.8.8.8", 0, False, False),
    ],
)
def test_addresses_from_strangers(host: str, port: int, public: bool, local: bool) -> None:
    assert is_dialable(Address(host, port), local_allowed=False) is public
    assert is_dialable(Address(host, port), local_allowed=True) is local


def test_refresh_walks_through_all_buckets() -> None:
    rng = random.Random(3)
    table = RoutingTable(OWN, RoutingParams(k=2))
    for _ in range(64):
        table.offer(contact(rng.randbytes(32)), now=0.0)
    buckets = len(table._buckets)
    assert buckets > 3
    shared = [shared_bits(OWN, table.refresh_target(rng.randbytes(32), now=float(n))) for n in range(buckets)]
    assert shared[:-1] == list(range(buckets - 1))
    assert shared[-1] >= buckets - 1


def test_least_recent() -> None:
    table = RoutingTable(OWN)
    assert table.least_recent() is None
    table.offer(contact(bytes(31) + b"\x01"), now=0.5)
    table.offer(contact(far(1)), now=1.0)
    table.offer(contact(far(2)), now=2.0)
    assert table.least_recent() == (contact(bytes(31) + b"\x01"), 0.5)
