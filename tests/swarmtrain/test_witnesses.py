"""Who is asked to dial back, with real dial-backs in an in-memory network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.dial_back import DialBack
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.routing import wide_network_of

from swarmtrain.witnesses import ASKED_AT_MOST, ASKED_AT_ONCE, Candidate, candidates, hear, in_turn


def hosts_heard(helpers: Sequence[str], own: str, silent: Sequence[str] = ()) -> tuple[list[str], float]:
    """Which of the helpers, told in this order, have dialled a peer at `own`, and after how many seconds that ends."""

    async def scenario() -> tuple[list[str], float]:
        network = MemoryNetwork(link=Link(latency_s=0.02))
        async with trio.open_nursery() as nursery:

            async def start(number: int, host: str) -> tuple[Endpoint, DialBack, Contact]:
                identity = Identity.from_seed(bytes([number]) * 32)
                transport = network.transport(identity, host)
                endpoint = Endpoint(identity, transport)
                dial_back = DialBack(endpoint, transport)
                bound = await nursery.start(endpoint.run, [Address("0.0.0.0", 0)])
                return endpoint, dial_back, Contact(identity.peer_id, tuple(bound))

            known = [(await start(number, host))[2] for number, host in enumerate(helpers, 1)]
            for host in silent:
                network.crash(host, silent=True)
            endpoint, dial_back, contact = await start(100, own)
            began = trio.current_time()
            verdicts = await hear(dial_back, candidates(endpoint, known), contact.addresses[0].port)
            seconds = trio.current_time() - began
            nursery.cancel_scope.cancel()
        assert all(verdict.is_reached for verdict in verdicts)
        return [verdict.helper_at.host for verdict in verdicts if verdict.helper_at], seconds

    heard: tuple[list[str], float] = trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
    return heard


def test_the_second_network_is_asked_although_the_first_has_many_peers() -> None:
    crowd = [f"8.8.8.{number}" for number in range(1, 9)]
    heard, seconds = hosts_heard([*crowd, "8.8.9.1", "9.9.9.9"], "11.22.33.44")
    assert len(heard) == ASKED_AT_ONCE
    assert "9.9.9.9" in heard
    assert seconds < 1


def test_when_the_first_of_a_network_are_silent_others_are_asked() -> None:
    silent = ["9.9.1.1", "9.9.2.2"]
    heard, seconds = hosts_heard(["8.8.1.1", "8.8.2.2", *silent, "8.8.3.3", "9.9.3.3"], "11.22.33.44", silent)
    assert sorted(heard) == ["8.8.1.1", "8.8.2.2", "9.9.3.3"], "no more of the network that has spoken"
    assert seconds < 21


@pytest.mark.parametrize("prefix", ["10.0.0", "127.0.0", "8.8.8"])
def test_a_swarm_of_one_network_waits_for_nobody_else(prefix: str) -> None:
    heard, seconds = hosts_heard([f"{prefix}.{number}" for number in range(1, 10)], f"{prefix}.20")
    assert len(heard) == ASKED_AT_ONCE
    assert seconds < 1


def test_while_nobody_answers_the_next_are_asked_and_no_more_than_eight() -> None:
    helpers = [f"10.0.0.{number}" for number in range(1, 12)]
    heard, seconds = hosts_heard(helpers, "10.0.0.20", silent=helpers[:ASKED_AT_ONCE])
    assert len(heard) == ASKED_AT_MOST - ASKED_AT_ONCE
    assert seconds < 21


def test_networks_take_turns_and_keep_their_order() -> None:
    def candidate(host: str) -> Candidate:
        return Candidate(Contact(host.encode().ljust(32), (Address(host, 1),)), wide_network_of((Address(host, 1),)))

    hosts = ["8.8.1.1", "8.8.1.2", "10.0.0.1", "8.8.1.3", "2a00:1::1", "2a00:1:2::2", "10.0.0.2"]
    ordered = [one.contact.addresses[0].host for one in in_turn(map(candidate, hosts))]
    assert ordered == ["8.8.1.1", "10.0.0.1", "2a00:1::1", "8.8.1.2", "2a00:1:2::2", "10.0.0.2", "8.8.1.3"]
