from __future__ import annotations

import pytest
from swarm_peer.bans import MAX_HOSTS, HostBans
from swarm_peer.tcp import AcceptGate, AcceptLimits


def test_a_host_waits_and_comes_back() -> None:
    bans = HostBans()
    assert bans.ban("8.8.8.8", until=600.0)
    assert bans.is_banned("8.8.8.8", 599.9)
    assert not bans.is_banned("8.8.4.4", 0.0)
    assert not bans.is_banned("8.8.8.8", 600.0)


def test_an_ipv6_host_is_its_network() -> None:
    bans = HostBans()
    bans.ban("2600:1:2:3::1", until=600.0)
    assert bans.is_banned("2600:1:2:3:4:5:6:7", 0.0)
    assert not bans.is_banned("2600:1:2:4::1", 0.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "192.168.1.7", "10.0.0.3", "fe80::1", "fd00::1"])
def test_households_and_laboratories_are_exempt(host: str) -> None:
    bans = HostBans()
    assert not bans.ban(host, until=600.0)
    assert not bans.is_banned(host, 0.0)


def test_the_list_is_bounded_and_the_oldest_gives_way() -> None:
    bans = HostBans()
    for number in range(MAX_HOSTS + 1):
        bans.ban(f"8.{number >> 16}.{number >> 8 & 255}.{number & 255}", until=600.0)
    assert not bans.is_banned("8.0.0.0", 0.0)
    assert bans.is_banned("8.0.0.1", 0.0)


def test_a_network_of_many_addresses_is_rationed_as_one_but_a_home_network_is_not() -> None:
    gate = AcceptGate(AcceptLimits())
    answers = [gate.enter(f"8.8.8.{number}", 0.0) for number in range(30)]
    assert answers.count(None) == 10
    assert set(answers[10:]) == {"rate"}
    assert gate.enter("8.8.9.1", 0.0) is None
    assert [gate.enter(f"2600:1:2:3::{number:x}", 0.0) for number in range(6)].count(None) == 4  # one host: its knocks
    home = AcceptGate(AcceptLimits())
    assert all(home.enter(f"192.168.1.{number}", 0.0) is None for number in range(30))
