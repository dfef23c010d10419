"""Which of this machine's addresses are told to others, and in which order.

Pure: the interfaces are a parameter. Told are, best first, public IPv6, public IPv4, the local network, tunnels, and
the inside of a virtual machine. Never told are wildcards, link-local addresses and the bridges that containers and
virtual machines share with this machine only; loopback only where there is nothing else and the peers are on this
machine, too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from swarm_peer.addresses import MAX_ADDRESSES, Address
from swarm_peer.interfaces import InterfaceAddress

WILDCARDS: Final = ("0.0.0.0", "::")
_BRIDGES: Final = re.compile(
    r"(docker|podman|cni|lxcbr|lxdbr|virbr|vnet|veth|vmnet|vboxnet|cali|flannel|kube|nerdctl|br-[0-9a-f]{12}|bridge1\d\d"
    r"|vethernet|docker_gwbridge|awdl|llw)[\w .()-]*",
    re.IGNORECASE,
)
_TUNNELS: Final = re.compile(r"(tun|tap|utun|wg|tailscale|zt|nordlynx|ipsec|vpn|ts)\w*", re.IGNORECASE)
# Shared by the customers of one provider (RFC 6598), and what Tailscale gives its own.
_SHARED_SPACE: Final = ipaddress.ip_network("100.64.0.0/10")
# Privacy extensions give one interface many addresses of one network.
_PER_INTERFACE_AND_FAMILY: Final = 2


class Reach(IntEnum):
    """How far an address reaches; the smaller, the sooner it is told. From `BRIDGE` on it is not told."""

    PUBLIC_V6 = 0
    PUBLIC_V4 = 1
    LAN = 2
    VPN = 3
    VIRTUAL_MACHINE = 4
    BRIDGE = 5
    LINK_LOCAL = 6
    LOOPBACK = 7
    DOWN = 8
    UNUSABLE = 9


_WORDS: Final = {
    Reach.PUBLIC_V6: "public",
    Reach.PUBLIC_V4: "public",
    Reach.LAN: "local network",
    Reach.VPN: "tunnel or VPN, tried after the others",
    Reach.VIRTUAL_MACHINE: "behind the NAT of its Windows host (WSL), tried last",
    Reach.BRIDGE: "bridge to containers or virtual machines on this machine",
    Reach.LINK_LOCAL: "link-local",
    Reach.LOOPBACK: "this machine only",
    Reach.DOWN: "interface is down",
    Reach.UNUSABLE: "no address of one machine",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """An address of this machine, how far it reaches, and whether it is told; `why` is for people."""

    found: InterfaceAddress
    reach: Reach
    is_told: bool
    why: str


def reach_of(found: InterfaceAddress, *, in_wsl: bool = False) -> Reach:
    """Classifies one address of one interface."""
    ip = ipaddress.ip_address(found.host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback or found.is_loopback:
        return Reach.LOOPBACK
    if ip.is_unspecified or ip.is_multicast or ip.is_reserved:
        return Reach.UNUSABLE
    if not found.is_up:
        return Reach.DOWN
    if ip.is_link_local:
        return Reach.LINK_LOCAL
    if _BRIDGES.fullmatch(found.interface):
        return Reach.BRIDGE
    if _TUNNELS.fullmatch(found.interface) or (ip.version == 4 and ip in _SHARED_SPACE):
        return Reach.VPN
    if ip.is_global:
        # A modem's own dial-up link is point-to-point, too, and has a public address.
        return Reach.PUBLIC_V6 if ip.version == 6 else Reach.PUBLIC_V4
    if found.is_point_to_point:
        return Reach.VPN
    return Reach.VIRTUAL_MACHINE if in_wsl else Reach.LAN


def judge(
    interfaces: Sequence[InterfaceAddress],
    *,
    only: str | None = None,
    loopback_allowed: bool = False,
    in_wsl: bool = False,
) -> list[Judged]:
    """Judges all addresses, those that are told first and in the order in which they are told.

    `only` is the name of an interface or one address of this machine: nothing else is told. Raises `ValueError` with
    one line that lists what there is, if `only` is none of it.
    """
    if only is not None and not any(_is_meant(only, found) for found in interfaces):
        there = sorted({f"{found.interface} ({found.host})" for found in interfaces})
        raise ValueError(f"{only!r} is no interface or address of this machine; there are: {', '.join(there)}")
    ranked = sorted(((reach_of(found, in_wsl=in_wsl), found) for found in interfaces), key=lambda pair: pair[0])
    told: list[Judged] = []
    others: list[Judged] = []
    seen: dict[tuple[str, bool], int] = {}
    for reach, found in ranked:
        kept = (found.interface, ":" in found.host)
        if only is not None and not _is_meant(only, found):
            others.append(Judged(found, reach, False, f"{_WORDS[reach]}; --interface {only} leaves it out"))
        elif reach >= Reach.BRIDGE and not (only is not None and reach is Reach.BRIDGE):
            others.append(Judged(found, reach, False, _WORDS[reach]))
        elif seen.get(kept, 0) >= _PER_INTERFACE_AND_FAMILY or len(told) >= MAX_ADDRESSES:
            others.append(Judged(found, reach, False, f"{_WORDS[reach]}; enough others are told"))
        else:
            seen[kept] = seen.get(kept, 0) + 1
            told.append(Judged(found, reach, True, _WORDS[reach]))
    if not told and loopback_allowed:
        loopback = [judged for judged in others if judged.reach is Reach.LOOPBACK]
        others = [judged for judged in others if judged.reach is not Reach.LOOPBACK]
        told = [Judged(j.found, j.reach, True, "this machine only, as there is nothing else") for j in loopback]
    return told + others


def announced(bound: Iterable[Address], judged: Iterable[Judged]) -> tuple[Address, ...]:
    """Returns where others can reach a listener: for a wildcard, every address of its family that is told.

    A listener on one address is told as it is. A wildcard for IPv4 and one for IPv6 on the same port make one list.
    """
    told = [one.found.host for one in judged if one.is_told]
    ports = {address.host: address.port for address in bound if address.host in WILDCARDS}
    found: dict[Address, None] = {a: None for a in bound if a.host not in WILDCARDS}
    for host in told:
        wildcard = "::" if ":" in host else "0.0.0.0"
        if wildcard in ports:
            found[Address(host, ports[wildcard])] = None
    return tuple(found)[:MAX_ADDRESSES]


def is_loopback(host: str) -> bool:
    """True for "localhost" and literal loopback addresses."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _is_meant(only: str, found: InterfaceAddress) -> bool:
    if only == found.interface:
        return True
    try:
        return ipaddress.ip_address(only.strip("[]")) == ipaddress.ip_address(found.host)
    except ValueError:
        return False
