"""What of a machine's addresses is told to others, on machines as they are found at home, in clouds and in WSL."""

from __future__ import annotations

import socket

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from swarm_peer.address_policy import WILDCARDS, Reach, announced, judge, reach_of
from swarm_peer.addresses import MAX_ADDRESSES, Address, parse_announced
from swarm_peer.errors import AddressInUse
from swarm_peer.identity import Identity
from swarm_peer.interfaces import InterfaceAddress, list_interfaces, runs_in_wsl
from swarm_peer.tcp import TlsTransport
from swarm_peer.transport import Channel

LOOPBACK = (
    InterfaceAddress("lo", "127.0.0.1", is_loopback=True),
    InterfaceAddress("lo", "::1", is_loopback=True),
)
BOTH_FAMILIES = [Address("0.0.0.0", 4000), Address("::", 4000)]


def told(*interfaces: InterfaceAddress, **options: object) -> list[str]:
    judged = judge([*LOOPBACK, *interfaces], **options)  # type: ignore[arg-type]
    return [address.host for address in announced(BOTH_FAMILIES, judged)]


def tunnel(name: str, host: str) -> InterfaceAddress:
    return InterfaceAddress(name, host, is_point_to_point=True)


def test_a_laptop_with_docker_and_a_vpn_tells_its_own_network_first() -> None:
    hosts = told(
        InterfaceAddress("docker0", "172.17.0.1"),
        InterfaceAddress("br-0123456789ab", "172.18.0.1"),
        tunnel("tun0", "10.8.0.2"),
        InterfaceAddress("eth0", "192.168.1.7"),
        InterfaceAddress("eth0", "fe80::1"),
        InterfaceAddress("eth0", "2001:470:1::7"),
    )
    assert hosts == ["2001:470:1::7", "192.168.1.7", "10.8.0.2"]


def test_the_order_does_not_depend_on_the_order_in_which_the_kernel_lists_interfaces() -> None:
    interfaces = [
        tunnel("tailscale0", "100.101.102.103"),
        InterfaceAddress("wlan0", "192.168.1.8"),
        InterfaceAddress("eth0", "8.8.4.4"),
        InterfaceAddress("eth0", "fd12::3"),
    ]
    assert told(*interfaces) == ["8.8.4.4", "192.168.1.8", "fd12::3", "100.101.102.103"]
    assert set(told(*interfaces)) == set(told(*reversed(interfaces)))
    assert told(*reversed(interfaces))[0] == "8.8.4.4"
    assert told(*reversed(interfaces))[-1] == "100.101.102.103"


def test_only_a_ula_is_told_and_only_link_local_is_not() -> None:
    assert told(InterfaceAddress("eth0", "fd00::2")) == ["fd00::2"]
    assert told(InterfaceAddress("eth0", "fe80::2"), InterfaceAddress("eth0", "169.254.3.4")) == []


def test_loopback_is_told_only_where_there_is_nothing_else_and_all_peers_are_here() -> None:
    assert told() == []
    assert told(loopback_allowed=True) == ["127.0.0.1", "::1"]
    assert told(InterfaceAddress("eth0", "192.168.1.7"), loopback_allowed=True) == ["192.168.1.7"]


def test_a_dial_up_link_with_a_public_address_is_no_vpn() -> None:
    assert reach_of(tunnel("ppp0", "8.8.4.4")) is Reach.PUBLIC_V4
    assert reach_of(tunnel("ppp0", "10.64.0.9")) is Reach.VPN
    assert reach_of(tunnel("wg0", "2001:470:1::9")) is Reach.VPN
    assert reach_of(InterfaceAddress("eth0", "100.64.3.4")) is Reach.VPN


def test_inside_wsl_the_own_address_comes_last() -> None:
    assert runs_in_wsl("5.15.153.1-microsoft-standard-WSL2")
    assert not runs_in_wsl("6.1.0-18-amd64")
    hosts = told(InterfaceAddress("eth0", "172.29.16.5"), tunnel("tailscale0", "100.90.1.2"), in_wsl=True)
    assert hosts == ["100.90.1.2", "172.29.16.5"]


def test_one_interface_can_be_pinned_by_name_or_address() -> None:
    interfaces = [
        InterfaceAddress("docker0", "172.17.0.1"),
        InterfaceAddress("eth0", "192.168.1.7"),
        InterfaceAddress("eth0", "fd00::2"),
        tunnel("tun0", "10.8.0.2"),
    ]
    assert told(*interfaces, only="eth0") == ["192.168.1.7", "fd00::2"]
    assert told(*interfaces, only="10.8.0.2") == ["10.8.0.2"]
    assert told(*interfaces, only="[fd00::2]") == ["fd00::2"]
    assert told(*interfaces, only="docker0") == ["172.17.0.1"]
    with pytest.raises(ValueError, match=r"'eth7' is no interface.*eth0 \(192.168.1.7\)"):
        told(*interfaces, only="eth7")


def test_a_machine_with_many_addresses_tells_as_many_as_a_record_holds() -> None:
    many = [InterfaceAddress(f"eth{n // 4}", f"2a00::{n + 1:x}") for n in range(64)]
    hosts = told(*many)
    assert len(hosts) == MAX_ADDRESSES
    assert hosts[:4] == ["2a00::1", "2a00::2", "2a00::5", "2a00::6"]


@given(
    st.lists(
        st.builds(
            InterfaceAddress,
            st.sampled_from(["eth0", "docker0", "tun0", "lo", "wlan0", "x" * 15]),
            st.ip_addresses().map(str),
            is_up=st.booleans(),
            is_loopback=st.booleans(),
            is_point_to_point=st.booleans(),
        ),
        max_size=40,
    )
)
def test_nothing_that_leads_nowhere_is_ever_told(interfaces: list[InterfaceAddress]) -> None:
    judged = judge(interfaces)
    assert len(judged) == len(interfaces)
    addresses = announced(BOTH_FAMILIES, judged)
    assert len(addresses) <= MAX_ADDRESSES
    for address in addresses:
        assert address.host not in WILDCARDS
        assert not address.host.startswith(("127.", "fe8", "169.254."))
        assert address.port == 4000


def test_a_listener_on_one_address_is_told_as_it_is() -> None:
    judged = judge([InterfaceAddress("eth0", "192.168.1.7")])
    assert announced([Address("127.0.0.1", 5)], judged) == (Address("127.0.0.1", 5),)
    assert announced([Address("0.0.0.0", 5)], judged) == (Address("192.168.1.7", 5),)
    assert announced([Address("::", 5)], judged) == ()


@pytest.mark.parametrize("text", ["198.51.100.7:0", "host", "[::1]:99999", "0.0.0.0:7766", "[::]:7766"])
def test_what_nobody_can_dial_cannot_be_announced(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT or \[IPv6\]:PORT.*1 to 65535"):
        parse_announced(text)
    assert parse_announced("[2001:db8::1]:7766").port == 7766


def test_this_machine_has_a_loopback_interface_that_is_up() -> None:
    (loopback, *_) = [found for found in list_interfaces() if found.host == "127.0.0.1"]
    assert loopback.is_up
    assert loopback.is_loopback
    assert reach_of(loopback) is Reach.LOOPBACK


def test_the_wildcard_listens_on_one_port_for_both_families_and_a_busy_port_is_named() -> None:
    async def ignore(channel: Channel) -> None:
        await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            transport = TlsTransport(Identity.generate())
            bound = await nursery.start(transport.serve, [Address("::", 0)], ignore)
            assert len({address.port for address in bound}) == 1
            hosts = ["0.0.0.0", "::"] if socket.has_ipv6 and len(bound) == 2 else ["0.0.0.0"]
            assert [address.host for address in bound] == hosts
            port = bound[0].port
            with pytest.raises(AddressInUse, match=f"port {port} is in use"):
                await nursery.start(TlsTransport(Identity.generate()).serve, [Address("::", port)], ignore)
            nursery.cancel_scope.cancel()

    trio.run(main)
