"""What others find out about this peer's address, in one line that a user can act on. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from swarm_peer.addresses import Address
from swarm_peer.dial_back import Outcome, Verdict
from swarm_peer.routing import is_local, wide_network_of

Nat = Literal["none", "port-preserving", "symmetric", "unknown"]
ReachKind = Literal["reachable", "outbound-only", "unknown"]

# Helpers of one provider may all be on our side of a wall: two must be in different networks.
_NETWORKS_NEEDED: Final = 2
_WHY: Final = {
    Outcome.TIMED_OUT: "no answer from outside",
    Outcome.REFUSED: "refused from outside",
    Outcome.UNREACHABLE: "no way from outside",
    Outcome.STRANGER: "another program answers there",
}


@dataclass(frozen=True, slots=True)
class Witness:
    """A verdict, and where the helper that gave it is (None: not known)."""

    verdict: Verdict
    helper: Address | None


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether this peer can be dialled, where, and how sure that is; `line` is for people."""

    kind: ReachKind
    at: Address | None
    line: str


def judge_reach(
    port: int | None, own: Sequence[Address], witnesses: Sequence[Witness], relays: Sequence[str] = ()
) -> Reach:
    """Says what the witnesses mean for a peer that listens on `port` (None: on nothing) and announces `own`.

    On the internet two witnesses in different /16 networks are wanted; on a local network, one is enough.
    """
    by_way = f", using relay{'s' if len(relays) > 1 else ''} {', '.join(relays)}" if relays else ""
    if port is None:
        return Reach("outbound-only", None, f"outbound-only{by_way}: this peer listens on no port, as asked")
    outside = [w for w in witnesses if not is_local(w.verdict.observed.host)] or list(witnesses)
    reached = [w for w in outside if w.verdict.is_reached]
    if reached:
        at = Address(reached[0].verdict.observed.host, port)
        networks = {wide_network_of((w.helper,)) for w in reached if w.helper is not None}
        if is_local(at.host) or len(networks) >= _NETWORKS_NEEDED:
            return Reach("reachable", at, f"reachable at {at}")
        return Reach("reachable", at, f"reachable at {at}, says one peer; one of another network would make it sure")
    if not outside:
        return Reach("unknown", None, "not known yet whether others can dial this peer: nobody has tried")
    observed = outside[0].verdict.observed
    why = _WHY.get(outside[0].verdict.outcome, str(outside[0].verdict.outcome))
    return Reach("outbound-only", None, f"outbound-only{by_way}: {why}; {open_port_advice(port, own, observed)}")


def open_port_advice(port: int, own: Sequence[Address], observed: Address) -> str:
    """How to become reachable: names the port, the flag, and the NAT if there is one."""
    if is_behind_nat(own, observed):
        inner = own[0].host if own else "its own address"
        return (
            f"others see this machine at {observed.host}, not at {inner}. To be reachable, forward TCP port {port} of "
            f"the router to it and start with --listen '[::]:{port}' --announce {Address(observed.host, port)}"
        )
    return f"to be reachable, allow incoming TCP port {port} in the firewall and start with --listen '[::]:{port}'"


def is_behind_nat(own: Sequence[Address], observed: Address) -> bool:
    """True if others see this machine at an address that it does not have."""
    return bool(own) and all(not _same_host(address.host, observed.host) for address in own)


def nat_kind(pairs: Sequence[tuple[Address, Address]]) -> Nat:
    """Names the NAT from our own end of some connections and what the other ends see.

    Where it keeps ports, two peers behind such NATs can open a path between them at the same moment; where it does
    not ("symmetric", or one that renumbers), that seldom works.
    """
    if not pairs:
        return "unknown"
    if all(_same_host(local.host, observed.host) for local, observed in pairs):
        return "none"
    translated = [(local, observed) for local, observed in pairs if not _same_host(local.host, observed.host)]
    return "port-preserving" if all(local.port == observed.port for local, observed in translated) else "symmetric"


def _same_host(a: str, b: str) -> bool:
    try:
        return _plain(a) == _plain(b)
    except ValueError:
        return a == b


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
