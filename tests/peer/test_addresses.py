from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_peer.addresses import LOOPBACK, Address, Contact, host_group, parse_address, parse_contact
from swarm_peer.errors import (
    AddressInUse,
    AddressUnresolvable,
    ConnectionRefused,
    ConnectTimedOut,
    DialledSelf,
    NotSwarmtrain,
    ProtocolError,
    Refusal,
    Unreachable,
    WrongIdentity,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:4000", "127.0.0.1", 4000),
        ("peer.example.org:1", "peer.example.org", 1),
        (" my_host:65535\n", "my_host", 65535),
        ("[::1]:0", "::1", 0),
        ("[2001:db8::7]:443", "2001:db8::7", 443),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":80", "::1:80", "[::1]", "[host]:80", "host:65536", "host:-1", "host:8x"),
        *("a b:80", "host:٣", "http://host:80", "-bad:80", "x" * 300 + ":80", "[::1:80", "h\x00st:80"),
    ],
)
def test_bad_addresses_say_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT.*\[ADDRESS\]:PORT") as raised:
        parse_address(text)
    assert "\n" not in str(raised.value)


@given(st.text(max_size=80))
def test_any_text_parses_or_is_a_value_error(text: str) -> None:
    try:
        contact = parse_contact(text)
    except ValueError:
        return
    assert parse_address(str(contact[1])) == contact[1]


def test_contacts_carry_an_optional_peer_id() -> None:
    assert parse_contact("host:1") == (None, Address("host", 1))
    assert parse_contact("ab" * 32 + "@[::1]:1") == (b"\xab" * 32, Address("::1", 1))
    with pytest.raises(ValueError, match="64 hex digits"):
        parse_contact("abc@host:1")


def test_decoding_enforces_every_limit() -> None:
    good = Contact(b"i" * 32, (Address("host", 1),) * 8)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Contact) == good
    for bad in [
        Contact(b"i" * 31, ()),
        Contact(b"i" * 32, (Address("host", 1),) * 9),
        Contact(b"i" * 32, (Address("host", 65536),)),
        Contact(b"i" * 32, (Address("", 1),)),
        Contact(b"i" * 32, (Address("x" * 254, 1),)),
        Contact(b"i" * 32, (Address("new\nline", 1),)),
        Contact(b"i" * 32, (Address("newline\n", 1),)),
    ]:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Contact)


def test_a_contact_reads_well() -> None:
    assert str(Contact(b"\x01" * 32, (Address("::1", 80),))) == "01010101@[::1]:80"
    assert str(Contact(b"\x01" * 32, ())) == "01010101@no address"


def test_limits_count_what_one_stranger_owns() -> None:
    assert host_group("127.0.0.9") == host_group("::1") == host_group("::ffff:127.0.0.1") == LOOPBACK
    assert host_group("8.8.8.8") == "8.8.8.8" == host_group("::ffff:8.8.8.8")
    assert host_group("2001:db8::1") == host_group("2001:db8::ffff:1") != host_group("2001:db8:0:1::1")
    assert host_group("fe80::1%eth0") == host_group("fe80::2")
    assert host_group("a name") == "a name"


def test_every_connect_error_is_one_line_with_the_address() -> None:
    address = Address("host", 80)
    for error in [
        AddressUnresolvable(address, "unknown host"),
        Unreachable(address, "no route"),
        ConnectionRefused(address),
        ConnectTimedOut(address, "no answer within 5 s"),
        WrongIdentity(address, b"\x01" * 32, b"\x02" * 32),
        DialledSelf(address),
        NotSwarmtrain(address, "it sent HTTP"),
    ]:
        assert "host:80" in str(error)
        assert "\n" not in str(error)
        assert error.address == address
    assert "peer 02020202, not peer 01010101" in str(WrongIdentity(address, b"\x01" * 32, b"\x02" * 32))
    assert "port 80 is in use" in str(AddressInUse(address, 80))


def test_text_of_strangers_is_made_harmless() -> None:
    refusal = Refusal("no such code!", "line\nfeed \x1b[31m" + "x" * 500)
    assert refusal.code == "malformed"
    assert len(refusal.detail) == 200
    assert refusal.detail.isprintable()
    assert ProtocolError("reason", "a\x00b").detail == "a?b"
