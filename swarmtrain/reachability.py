"""What others find out about this peer's address, in one line that a user can act on. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from swarm_peer.addresses import Address
from swarm_peer.dial_back import Outcome, Verdict
from swarm_peer.routing import is_local, wide_network_of

Nat = Literal["none", "port-preserving", "symmetric", "unknown"]
ReachKind = Literal["reachable", "partial", "outbound-only", "unknown"]

# Peers of one provider may all be on our side of a wall: two must be in different networks.
NETWORKS_NEEDED: Final = 2
_WHY: Final = {
    Outcome.TIMED_OUT: "no answer from outside",
    Outcome.REFUSED: "refused from outside",
    Outcome.UNREACHABLE: "no way from outside",
    Outcome.STRANGER: "another program answers there",
}


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether this peer can be dialled, where, and how sure that is; `line` is for people.

    "partial": some get through and some do not, so direct addresses and relays are both of use.
    """

    kind: ReachKind
    at: Address | None
    line: str


def judge_reach(
    port: int | None, own: Sequence[Address], verdicts: Sequence[Verdict], relays: Sequence[str] = ()
) -> Reach:
    """Says what the verdicts mean for a peer that listens on `port` (None: on nothing) and announces `own`.

    On the internet two witnesses in different /16 networks (IPv6: /32) make it sure; on a local network, one does.
    Those who see us on the internet count, if there are any: neighbours say nothing about the outside.
    """
    by_way = f", using relay{'s' if len(relays) > 1 else ''} {', '.join(relays)}" if relays else ""
    if port is None:
        return Reach("outbound-only", None, f"outbound-only{by_way}: this peer listens on no port, as asked")
    heard = [verdict for verdict in verdicts if _is_outside(verdict)] or list(verdicts)
    if not heard:
        return Reach("unknown", None, "not known yet whether others can dial this peer: nobody has tried")
    reached = [verdict for verdict in heard if verdict.is_reached]
    missed = [verdict for verdict in heard if not verdict.is_reached]
    if not reached:
        why = f"{_why(missed[0])}; {open_port_advice(port, own, missed[0].observed)}"
        return Reach("outbound-only", None, f"outbound-only{by_way}: {why}")
    at = Address(_best_host(reached), port)
    if missed:
        return Reach("partial", at, f"partially reachable{by_way}: {_conflict(port, own, at, reached, missed)}")
    there = [verdict for verdict in reached if verdict.observed.host == at.host]
    if is_local(at.host) or len(networks_of(there)) >= NETWORKS_NEEDED:
        return Reach("reachable", at, f"reachable at {at}")
    who = "one peer only" if len(there) == 1 else f"{len(there)} peers of one network only"
    return Reach(
        "reachable", at, f"reachable at {at}, confirmed by {who}; a peer of another network would make it sure"
    )


def networks_of(verdicts: Iterable[Verdict]) -> set[Hashable]:
    """The /16 (IPv6: /32) networks of the internet in which these witnesses are."""
    found = {wide_network_of((verdict.helper_at,)) for verdict in verdicts if verdict.helper_at is not None}
    return found - {None}


def _is_outside(verdict: Verdict) -> bool:
    """False also for a neighbour that sees us at our router's address: its dial never left the router."""
    is_neighbour = verdict.helper_at is not None and is_local(verdict.helper_at.host)
    return not is_local(verdict.observed.host) and not is_neighbour


def _best_host(reached: Sequence[Verdict]) -> str:
    """The host that witnesses in most networks have reached."""
    hosts = dict.fromkeys(verdict.observed.host for verdict in reached)
    return max(hosts, key=lambda host: len(networks_of(v for v in reached if v.observed.host == host)))


def _conflict(
    port: int, own: Sequence[Address], at: Address, reached: Sequence[Verdict], missed: Sequence[Verdict]
) -> str:
    """Why some get through and some do not: another address of ours (IPv4 beside IPv6), or a choosy firewall."""
    some, others = _peers(len(reached), "gets", "get"), _peers(len(missed), "does", "do")
    elsewhere = [verdict for verdict in missed if not _same_host(verdict.observed.host, at.host)]
    if elsewhere:
        observed = elsewhere[0].observed
        where = f"at {observed.host} ({_why(elsewhere[0])})"
        return f"{some} through at {at}, {others} not {where}; {open_port_advice(port, own, observed)}"
    return f"{some} through at {at}, {others} not ({_why(missed[0])}); a firewall or router lets in some networks only"


def _peers(count: int, one: str, several: str) -> str:
    return f"{count} peer {one}" if count == 1 else f"{count} peers {several}"


def _why(missed: Verdict) -> str:
    return _WHY.get(missed.outcome, str(missed.outcome))


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
