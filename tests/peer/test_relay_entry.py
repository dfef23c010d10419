from __future__ import annotations

import msgspec
import pytest
from swarm_peer.addresses import Address, Contact
from swarm_peer.identity import PeerId
from swarm_peer.relay_entry import direct_addresses, relay_entry, relay_of, relays_of
from swarm_peer.routing import is_dialable, is_local

RELAY = PeerId(bytes(range(32)))


@pytest.mark.parametrize("host", ["8.8.4.4", "relay.example.org", "2001:4860:4860::8888", "fe80::1%eth0"])
def test_an_entry_names_the_relay_and_survives_the_wire(host: str) -> None:
    address = Address(host, 7766)
    entry = relay_entry(RELAY, address)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Address)
    assert relay_of(decoded) == Contact(RELAY, (address,))
    assert str(entry) == f"relay:{RELAY.hex()[:8]}@{address}"


@pytest.mark.parametrize("host", ["relay:", "relay:abc:8.8.4.4", f"relay:{'0' * 64}", f"relay:{'0' * 64}:relay:x:y"])
def test_malformed_entries_name_nobody_and_are_never_dialled(host: str) -> None:
    entry = Address(host, 7766)
    assert relay_of(entry) is None
    assert not is_dialable(entry, local_allowed=True)
    assert direct_addresses((entry,)) == ()
    assert str(entry)


def test_an_entry_is_as_local_and_as_dialable_as_its_relay() -> None:
    local, public, multicast = (
        relay_entry(RELAY, Address(host, 1)) for host in ("192.168.1.2", "8.8.4.4", "224.0.0.1")
    )
    assert is_local(local.host)
    assert not is_local(public.host)
    assert is_dialable(public, local_allowed=False)
    assert is_dialable(local, local_allowed=True)
    assert not is_dialable(local, local_allowed=False)
    assert not is_dialable(multicast, local_allowed=True)
    contact = Contact(bytes(32), (Address("8.8.8.8", 1), public))
    assert direct_addresses(contact.addresses) == (Address("8.8.8.8", 1),)
    assert [relay.peer_id for relay in relays_of(contact)] == [RELAY]
