"""Which part a node takes: dialled by others, or found through relays."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import click
import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.admission import Admission
from swarm_peer.certificates import AdmissionMode, Charter
from swarm_peer.endpoint import Endpoint
from swarm_peer.gated import Gate
from swarm_peer.identity import Identity, PeerId
from swarm_peer.interfaces import InterfaceAddress
from swarm_peer.memory import MemoryNetwork, Nat
from swarm_peer.memory_stream import Link
from swarm_peer.relay_entry import relay_of
from swarm_peer.routing import RoutingTable
from swarm_peer.rpc import Method

from swarmtrain.node import INTERFACES_S, NodeConfig, follow_interfaces
from swarmtrain.options import relay_rate
from swarmtrain.relaying import RECHECK_S, RELAYED_PREFERENCE, Relaying, relaying_line

ANY = Address("0.0.0.0", 0)
ECHO = Method("echo", bytes, bytes, 100, 100)


async def echo(remote: PeerId, request: bytes) -> bytes:
    return request


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def node(
    network: MemoryNetwork,
    number: int,
    *known: Contact,
    nat: Nat | None = None,
    listens: bool = True,
    takes_part: bool = True,
    is_given: bool = False,
    host: str | None = None,
) -> AsyncIterator[tuple[Relaying, Contact, Endpoint]]:
    """A node at 8.8.8.<number> that knows some others."""
    host = host or f"8.8.8.{number}"
    if nat:
        network.put_behind_nat(host, nat)
    identity = Identity.from_seed(bytes([number]) * 32)
    transport = network.transport(identity, host)
    endpoint = Endpoint(identity, transport)
    table = RoutingTable(identity.peer_id)
    for contact in known:
        table.offer(contact, 0.0)
    async with trio.open_nursery() as nursery:
        bound: list[Address] = await nursery.start(endpoint.run, [ANY] if listens else [])
        relaying = Relaying(
            endpoint,
            transport,
            table,
            own=tuple(bound),
            port=bound[0].port if bound else None,
            is_given=is_given,
            limit_bytes_per_s=1e6,
            takes_part=takes_part,
            rng=random.Random(number),
        )
        await nursery.start(relaying.run)
        yield relaying, Contact(identity.peer_id, tuple(bound)), endpoint
        nursery.cancel_scope.cancel()


def test_a_peer_behind_a_nat_is_found_through_a_relay_and_one_that_can_be_dialled_is_not() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with (
            node(network, 1) as (_, public, _),
            node(network, 2, public, nat="symmetric") as (home, _, endpoint),
            node(network, 3, public) as (other, other_contact, _),
        ):
            told: list[tuple[Address, ...]] = []
            home.on_addresses(told.append)
            assert await home.settle()
            assert home.is_outbound_only
            assert home.relays == (public.peer_id,)
            (entry,) = home.addresses
            assert relay_of(entry) == public
            assert told[-1] == home.addresses
            assert await other.settle()
            assert not other.is_outbound_only
            assert other.addresses == other_contact.addresses
            assert other.relays == ()
            # Partners of which only relays are known are met less often.
            relayed = Contact(bytes(32), home.addresses)
            assert home.preference(relayed) == RELAYED_PREFERENCE
            assert other.preference(relayed) == 1.0, "it would call back"
            assert home.preference(other_contact) == 1.0
            assert not endpoint.is_relayed(PeerId(public.peer_id))

    run(scenario)


def test_a_peer_that_listens_on_nothing_needs_nobody_s_word() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with node(network, 1) as (_, public, _), node(network, 2, public, listens=False) as (home, _, _):
            assert await home.settle()
            assert home.relays == (public.peer_id,)

    run(scenario)


def test_without_a_relay_it_says_so_and_goes_on_looking() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with node(network, 2, listens=False) as (home, _, _):
            began = trio.current_time()
            assert not await home.settle()
            assert trio.current_time() - began < 10
            assert home.addresses == ()

    run(scenario)


def test_who_only_looks_holds_no_place_with_a_relay() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with (
            node(network, 1) as (relay, public, _),
            node(network, 2, public, listens=False, takes_part=False) as (monitor, _, _),
        ):
            assert not await monitor.settle()
            await trio.sleep(60)
            assert relay.relay is not None
            assert relay.relay.reservations == 0

    run(scenario)


def test_a_relay_of_a_closed_run_serves_its_members_only() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        members: set[PeerId] = set()
        async with (
            node(network, 1) as (relay, public, _),
            node(network, 2, public, listens=False) as (home, contact, _),
        ):
            relay.serve_only(members.__contains__)
            assert not await home.settle()
            members.add(PeerId(contact.peer_id))
            await trio.sleep(10)
            assert home.relays == (public.peer_id,)

    run(scenario)


def test_a_member_shows_its_relay_that_it_is_one() -> None:
    creator = Identity.from_seed(bytes(32))
    listed = frozenset(Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))
    charter = Charter(bytes(32), creator.public_key, AdmissionMode.ALLOWLIST, listed)

    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with (
            node(network, 1) as (relay, public, public_endpoint),
            node(network, 2, public, listens=False) as (member, _, member_endpoint),
            node(network, 3, public, listens=False) as (stranger, _, _),
        ):
            for relaying, endpoint in ((relay, public_endpoint), (member, member_endpoint)):
                admission = Admission(charter, endpoint.peer_id)
                relaying.belong_to(Gate(endpoint, admission, rng=random.Random(0), clock=lambda: 0.0))
            assert await member.settle()
            assert member.relays == (public.peer_id,)
            assert not await stranger.settle()

    run(scenario)


def test_stated_addresses_are_not_called_in_question() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with (
            node(network, 1) as (_, public, _),
            node(network, 2, public, nat="symmetric", is_given=True) as (home, contact, _),
        ):
            assert await home.settle()
            assert home.addresses == contact.addresses

    run(scenario)


def test_a_router_that_changes_its_mind_is_noticed() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with (
            node(network, 1) as (_, public, _),
            node(network, 2, public) as (home, _, _),
            trio.open_nursery() as nursery,
        ):
            assert await home.settle()
            nursery.start_soon(home.keep_settled)
            network.put_behind_nat("8.8.8.2", "symmetric")
            await trio.sleep(RECHECK_S + 60)
            assert home.is_outbound_only
            assert home.relays == (public.peer_id,)
            nursery.cancel_scope.cancel()

    run(scenario)


def test_one_who_gets_through_and_one_who_does_not_make_a_peer_that_is_found_both_ways() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        network.put_behind_wall("11.22.33.44", ["9.9.9.2", "9.9.9.5"])
        async with (
            node(network, 1) as (_, relay, _),
            node(network, 2, host="9.9.9.2") as (_, kept_out, _),
            node(network, 3, relay, kept_out, host="11.22.33.44") as (home, own, endpoint),
            node(network, 5, host="9.9.9.5", listens=False) as (_, _, caller),
        ):
            endpoint.handle(ECHO, echo)
            began = trio.current_time()
            assert await home.settle()
            assert trio.current_time() - began < 6
            assert home.reach.kind == "partial"
            assert home.reach.line.startswith("partially reachable, using relays ")
            assert not home.is_outbound_only
            assert home.addresses[: len(own.addresses)] == own.addresses
            assert relay in [relay_of(entry) for entry in home.addresses]
            # Whoever is kept out as well gets through by relay.
            assert await caller.call(Contact(own.peer_id, home.addresses), ECHO, b"x", deadline_s=15) == b"x"
            assert caller.is_relayed(PeerId(own.peer_id))

    run(scenario)


def test_what_was_found_out_at_one_port_is_not_said_of_another() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with (
            node(network, 1) as (_, public, _),
            node(network, 2, public) as (home, contact, _),
            trio.open_nursery() as nursery,
        ):
            own = contact.addresses[0]
            nursery.start_soon(home.settle)
            await trio.sleep(0.05)
            # The router's answer comes while others dial the port that this machine listens on.
            home.forwarded(Address(own.host, own.port + 1))
            await trio.sleep(5)
            assert home.reach.at == own
            assert home.addresses == (own,)

    run(scenario)


def test_the_limit_is_a_rate_or_none() -> None:
    assert relay_rate("10Mbit") == 1.25e6
    assert relay_rate("0") == relay_rate("none") == 0.0
    with pytest.raises(click.BadParameter):
        relay_rate("fast")
    assert relaying_line(1.25e6) == "relays for peers that cannot reach each other, 10 Mbit/s at most (--relay-limit)"


def test_a_machine_that_changes_networks_tells_its_new_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["192.168.1.7"]
    monkeypatch.setattr("swarmtrain.node.list_interfaces", lambda: [InterfaceAddress("wlan0", host) for host in hosts])

    async def scenario() -> None:
        told: list[tuple[Address, ...]] = []
        async with node(MemoryNetwork(seed=1), 1) as (relaying, _, _), trio.open_nursery() as nursery:
            relaying.on_addresses(told.append)
            config = NodeConfig(listen="[::]:7766")
            nursery.start_soon(follow_interfaces, [Address("0.0.0.0", 7766)], config, relaying.moved)
            await trio.sleep(2 * INTERFACES_S + 1)
            hosts[:] = ["10.1.2.3"]
            await trio.sleep(INTERFACES_S)
            assert told == [(Address("192.168.1.7", 7766),), (Address("10.1.2.3", 7766),)]
            assert relaying.addresses == told[-1]
            nursery.cancel_scope.cancel()

    run(scenario)


def test_what_the_user_has_stated_does_not_follow_the_interfaces() -> None:
    async def scenario() -> None:
        async with node(MemoryNetwork(seed=1), 1, is_given=True) as (relaying, contact, _):
            relaying.moved((Address("10.1.2.3", 1),))
            assert relaying.addresses == contact.addresses

    run(scenario)
