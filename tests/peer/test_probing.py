"""Probes between two endpoints in virtual time: clocks, speeds over a link of known rate, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import NotSwarmtrain, Refusal
from swarm_peer.identity import Identity
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.observing import Observer, observe
from swarm_peer.probing import PROBE_BYTES, PROBE_S, ProbeServer, look, measure_download, measure_upload
from swarm_peer.tcp import TlsTransport
from swarm_peer.transport import Channel

IDENTITIES = [Identity.from_seed(hashlib.sha256(b"prober %d" % n).digest()) for n in range(2)]


def between_two(link: Link, scenario: Callable[[Endpoint, Contact], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=1, link=link)
        endpoints = [Endpoint(i, network.transport(i, f"10.0.0.{n + 1}")) for n, i in enumerate(IDENTITIES)]
        ProbeServer(endpoints[1], wall_clock=lambda: 1_000_600.0)
        async with trio.open_nursery() as nursery:
            for number, endpoint in enumerate(endpoints):
                await nursery.start(endpoint.run, [Address(f"10.0.0.{number + 1}", 4000)])
            with trio.fail_after(3600):
                await scenario(endpoints[0], Contact(IDENTITIES[1].peer_id, (Address("10.0.0.2", 4000),)))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_glance_tells_the_clock_the_round_trip_and_the_address() -> None:
    async def scenario(endpoint: Endpoint, peer: Contact) -> None:
        glance = await look(endpoint, peer, wall_clock=lambda: 1_000_000.0)
        assert glance.rtt_s == pytest.approx(0.1, rel=0.2)
        assert glance.clock_ahead_s == pytest.approx(600, abs=0.2)
        assert glance.observed is not None
        assert glance.observed.host == "10.0.0.1"

    between_two(Link(latency_s=0.05), scenario)


@pytest.mark.parametrize("mbit_per_s", [2.0, 40.0])
def test_speeds_are_those_of_the_link_within_bounds_of_time_and_size(mbit_per_s: float) -> None:
    async def scenario(endpoint: Endpoint, peer: Contact) -> None:
        for measure in (measure_download, measure_upload):
            began = trio.current_time()
            speed = await measure(endpoint, peer)
            assert speed.size_bytes <= PROBE_BYTES
            assert trio.current_time() - began <= 2 * PROBE_S
            assert speed.bits_per_s == pytest.approx(mbit_per_s * 1e6, rel=0.25)

    between_two(Link(latency_s=0.02, bandwidth_bytes_per_s=mbit_per_s * 1e6 / 8), scenario)


def test_nobody_is_served_without_bound() -> None:
    async def scenario(endpoint: Endpoint, peer: Contact) -> None:
        for _ in range(5):
            assert (await measure_download(endpoint, peer)).size_bytes == PROBE_BYTES
        with pytest.raises(Refusal, match="rate-limited"):
            await measure_download(endpoint, peer)
        with pytest.raises(Refusal, match="rate-limited"):
            await look(endpoint, peer, wall_clock=lambda: 0.0, tries=100)

    between_two(Link(), scenario)


def test_an_observation_tells_both_ends_of_a_connection() -> None:
    async def main() -> None:
        ours, theirs = (TlsTransport(Identity.generate()) for _ in range(2))
        Observer(theirs)

        async def ignore(channel: Channel) -> None:
            await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            (bound,) = await nursery.start(theirs.serve, [Address("127.0.0.1", 0)], ignore)
            ends = await observe(ours, bound)
            assert ends.local == ends.observed, "there is no NAT on loopback"
            assert ends.local.host == "127.0.0.1"
            (deaf,) = await nursery.start(TlsTransport(Identity.generate()).serve, [Address("127.0.0.1", 0)], ignore)
            with pytest.raises(NotSwarmtrain):
                await observe(ours, deaf)
            nursery.cancel_scope.cancel()

    trio.run(main)
