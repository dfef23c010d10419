"""`swarmtrain doctor`: what this machine's network lets a peer do, and what would help."""

from __future__ import annotations

import dataclasses
import ipaddress
import time
from collections.abc import Sequence
from typing import Final

import click
import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.errors import PeerError, sanitise
from swarm_peer.identity import Identity, PeerId, short
from swarm_peer.nat_pmp import NatPmpClient, NatPmpError, default_router
from swarm_peer.observing import observe
from swarm_peer.probing import look, measure_download, measure_upload

from swarmtrain.diagnosis import Diagnosis, Measured, OwnAddress, SavedRun, WayIn, render, to_json
from swarmtrain.errors import ExitCode
from swarmtrain.invite import EntryPoint, parse_entry_point, parse_invite
from swarmtrain.node import Node, NodeConfig, judge_interfaces, open_node
from swarmtrain.options import DoctorOptions
from swarmtrain.port_mapping import MappingFailed, Upnp
from swarmtrain.progress import Progress
from swarmtrain.reachability import nat_kind
from swarmtrain.saved_peers import all_saved
from swarmtrain.way_in import in_order

# With how many peers clocks and links are measured, the slow part of it.
MEASURED_WITH: Final = 2
ENTRIES_TRIED: Final = 16
OBSERVE_S: Final = 5.0


def run_doctor(options: DoctorOptions) -> int:
    """Looks around for some seconds and prints the report.  Returns the exit code; raises UserError."""
    saved = all_saved(options.state)
    given = [parse_entry_point(peer) for peer in options.peers]
    link = parse_invite(options.invite).peers if options.invite else ()
    known = [entry for entries in saved.values() for entry in entries]
    entries = in_order(given, link, known)[:ENTRIES_TRIED]
    with Progress() as progress:
        found = trio.run(_examine, options, entries, progress)
    found = dataclasses.replace(found, saved=tuple(SavedRun(run=run, peers=len(them)) for run, them in saved.items()))
    click.echo(to_json(found) if options.json else render(found))
    is_lost = bool(entries) and all(way.problem for way in found.ways_in)
    return int(ExitCode.NO_PEER if is_lost else ExitCode.OK)


async def _examine(options: DoctorOptions, entries: Sequence[EntryPoint], progress: Progress) -> Diagnosis:
    # An identity of its own: the peer that trains here may be running.
    config = NodeConfig(
        listen=options.listen,
        announce=options.announce,
        interface=options.interface,
        entries=entries,
        connect_timeout_s=options.connect_timeout,
    )
    async with open_node(Identity.generate(), config) as node:
        own = judge_interfaces(entries, options.interface)
        progress.say(f"trying {len(entries)} entry points")
        ways = await _try_ways_in(node, entries)
        progress.say("asking others whether they can dial this machine, and measuring the link")
        await node.relaying.settle()
        reach = node.relaying.reach
        connected = node.endpoint.connected()
        measured = [await _measure(node, peer) for peer in connected[:MEASURED_WITH]]
        reached = [address for (_, address), way in zip(entries, ways, strict=True) if way.problem is None]
        router = default_router()
        return Diagnosis(
            addresses=tuple(
                OwnAddress(host=j.found.host, interface=j.found.interface, is_told=j.is_told, why=j.why) for j in own
            ),
            listens_on=tuple(map(str, node.addresses)),
            ways_in=tuple(ways),
            measured=tuple(measured),
            nat=nat_kind(await _ends(node, reached[:MEASURED_WITH])),
            reach=reach.kind,
            reach_line=reach.line,
            relays=tuple(map(short, node.relaying.relays)),
            router=router,
            router_says=await _ask_router(router) if router else "",
        )


async def _try_ways_in(node: Node, entries: Sequence[EntryPoint]) -> list[WayIn]:
    """Tries each entry point to its end: here it is of interest which of them work."""
    found: dict[int, WayIn] = {}

    async def attempt(index: int, peer_id: PeerId | None, address: Address) -> None:
        [(_, error)] = await node.discovery.bootstrap([(peer_id, address)])
        peer = None if error else _who_is_at(node, peer_id, address)
        found[index] = WayIn(address=str(address), peer=peer, problem=str(error) if error else None)

    async with trio.open_nursery() as nursery:
        for index, entry in enumerate(entries):
            nursery.start_soon(attempt, index, *entry)
    return [found[index] for index in sorted(found)]


def _who_is_at(node: Node, peer_id: PeerId | None, address: Address) -> str:
    if peer_id is not None:
        return short(peer_id)
    at = [contact.peer_id for contact in node.discovery.table.contacts() if address in contact.addresses]
    return short(PeerId(at[0])) if at else "?"


async def _measure(node: Node, peer: PeerId) -> Measured:
    """Measures one thing after the other; what comes before a failure is kept."""
    contact = Contact(peer, ())
    found = Measured(peer=short(peer))
    try:
        glance = await look(node.endpoint, contact, wall_clock=time.time)
        observed = str(glance.observed) if glance.observed else None
        found = dataclasses.replace(found, observed=observed, rtt_s=glance.rtt_s, clock_ahead_s=glance.clock_ahead_s)
        down = await measure_download(node.endpoint, contact)
        found = dataclasses.replace(found, down_bits_per_s=down.bits_per_s)
        up = await measure_upload(node.endpoint, contact)
        return dataclasses.replace(found, up_bits_per_s=up.bits_per_s)
    except PeerError as error:
        return dataclasses.replace(found, problem=sanitise(str(error)))


async def _ends(node: Node, addresses: Sequence[Address]) -> list[tuple[Address, Address]]:
    """Our own end of some fresh connections, and what the other side sees of it."""
    pairs = []
    for address in addresses:
        assert node.transport is not None
        try:
            ends = await observe(node.transport, address, deadline_s=OBSERVE_S)
        except PeerError:  # a peer that is full, or does not answer such questions
            continue
        pairs.append((ends.local, ends.observed))
    return pairs


async def _ask_router(router: str) -> str:
    try:
        way, host = "NAT-PMP", await NatPmpClient(router).external_host()
    except NatPmpError as error:
        try:
            way, host = "UPnP", await Upnp().external_host()
        except MappingFailed as failure:
            return f"{error}; {failure}"
    public = "public" if ipaddress.ip_address(host).is_global else "not public: another NAT is before it"
    return f"answers {way}; its own address is {host} ({public})"
