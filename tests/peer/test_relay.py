"""Peers that cannot be dialled meet: by call-back, through relays, and by simultaneous open."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing
from relayed_peers import ECHO, SLOW, SLOW_S, Peer, peer, reserved
from swarm_peer.addresses import Address, Contact
from swarm_peer.circuit_table import RelayLimits
from swarm_peer.errors import ConnectError, PeerError, Refusal
from swarm_peer.identity import PeerId
from swarm_peer.memory import MemoryNetwork, Nat
from swarm_peer.memory_stream import Link
from swarm_peer.relay_entry import relay_of
from swarm_peer.relay_messages import CALL_BACK, INVITE, PUNCH, RESERVE, CallBack, Invitation, Nothing

LINK = Link(latency_s=0.02)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


async def settle() -> None:
    """Longer than any simultaneous open takes."""
    await trio.sleep(8)


@pytest.mark.parametrize("first", ["preserving", "symmetric"])
@pytest.mark.parametrize("second", ["preserving", "symmetric"])
def test_two_peers_behind_nats_talk_at_once_and_directly_where_nats_allow_it(first: Nat, second: Nat) -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1))
            a = await stack.enter_async_context(peer(network, 2, nat=first, relays=lambda: [public.contact]))
            b = await stack.enter_async_context(peer(network, 3, nat=second, relays=lambda: [public.contact]))
            await reserved(a)
            await reserved(b)
            began = trio.current_time()
            assert await a.endpoint.call(b.contact, ECHO, b"hello") == b"hello"
            assert trio.current_time() - began < 1.0
            assert a.endpoint.is_relayed(b.id)
            assert b.endpoint.is_relayed(a.id)
            await settle()
            is_direct = first == second == "preserving"
            assert await b.endpoint.call(a.contact, ECHO, b"back") == b"back"
            assert a.endpoint.is_relayed(b.id) is not is_direct
            assert b.endpoint.is_relayed(a.id) is not is_direct
            assert public.relay.stats.circuits == 1

    run(scenario)


def test_a_public_peer_is_called_back() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public, other = [await stack.enter_async_context(peer(network, n)) for n in (1, 2)]
            home = await stack.enter_async_context(peer(network, 3, nat="symmetric", relays=lambda: [public.contact]))
            await reserved(home)
            assert await other.endpoint.call(home.contact, ECHO, b"hello") == b"hello"
            assert other.endpoint.is_relayed(home.id) is False
            assert public.relay.stats.call_backs == 1
            assert public.relay.stats.circuits == 0
            # The relay itself uses the connection that is there.
            assert await public.endpoint.call(home.contact, ECHO, b"hello") == b"hello"

    run(scenario)


def test_who_says_to_be_public_and_is_not_gets_a_circuit() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public, other = [await stack.enter_async_context(peer(network, n)) for n in (1, 2)]
            home = await stack.enter_async_context(peer(network, 3, nat="symmetric", relays=lambda: [public.contact]))
            await reserved(home)
            network.put_behind_nat("h2", "symmetric")
            assert await other.endpoint.call(home.contact, ECHO, b"hello") == b"hello"
            assert other.endpoint.is_relayed(home.id)

    run(scenario)


def test_one_public_and_three_outbound_only_peers_all_reach_each_other() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1))
            homes = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in (2, 3, 4)
            ]
            for home in homes:
                await reserved(home)
            peers = [public, *homes]
            async with trio.open_nursery() as nursery:
                for here, there in itertools.permutations(peers, 2):
                    nursery.start_soon(_greet, here, there)
            # Both of a pair dialled at once; no more than one circuit per pair is left.
            await trio.sleep(5)
            assert public.relay.circuits == 3

    run(scenario)


async def _greet(here: Peer, there: Peer) -> None:
    message = here.id + there.id
    assert await here.endpoint.call(there.contact, ECHO, message, deadline_s=5.0) == message


def test_a_transfer_goes_on_where_it_is_while_new_calls_take_the_direct_way() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1))
            a, b = [
                await stack.enter_async_context(peer(network, n, nat="preserving", relays=lambda: [public.contact]))
                for n in (2, 3)
            ]
            await reserved(b)
            answers: list[bytes] = []

            async def call_slowly() -> None:
                answers.append(await a.endpoint.call(b.contact, SLOW, b"slow", deadline_s=60))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call_slowly)
                await trio.sleep(SLOW_S / 2)
                assert a.endpoint.is_relayed(b.id) is False
                assert public.relay.circuits == 1
                before = public.relay.stats.bytes
                assert await a.endpoint.call(b.contact, ECHO, bytes(500_000)) == bytes(500_000)
                assert public.relay.stats.bytes - before < 1000
            assert answers == [b"slow"]
            # The circuit ends when nobody has used it for half a minute.
            await trio.sleep(20)
            assert public.relay.circuits == 1
            await trio.sleep(20)
            assert public.relay.circuits == 0
            assert await a.endpoint.call(b.contact, ECHO, b"still") == b"still"

    run(scenario)


def test_when_a_relay_dies_another_takes_over_and_it_is_used_again_when_it_is_back() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            publics = {n: await stack.enter_async_context(peer(network, n)) for n in (1, 2, 3, 4)}

            def known() -> list[Contact]:
                return [public.contact for public in publics.values()]

            a, b = [await stack.enter_async_context(peer(network, n, nat="symmetric", relays=known)) for n in (5, 6)]
            await reserved(b, 3)
            contact = b.contact
            assert await a.endpoint.call(contact, ECHO, b"one") == b"one"
            (used,) = [n for n, public in publics.items() if public.relay.circuits]
            old = publics.pop(used)
            network.crash(f"h{used}")
            old.scope.cancel()
            # The contact that we have still names the dead relay; the others in it do.
            assert await a.endpoint.call(contact, ECHO, b"two") == b"two"
            with trio.fail_after(3):
                while old.id in {relay_of(entry).peer_id for entry in b.reservations.entries}:  # type: ignore[union-attr]
                    await b.reservations.changed.wait()
            await reserved(b, 3)
            for n in list(publics)[:2]:
                network.crash(f"h{n}")
                publics.pop(n).scope.cancel()
            network.restart(f"h{used}")
            publics[used] = await stack.enter_async_context(peer(network, used))
            await trio.sleep(10)
            assert len(b.reservations.entries) == 2
            assert await a.endpoint.call(b.contact, ECHO, b"three") == b"three"

    run(scenario)


def test_a_relay_serves_whom_it_may_and_no_more_than_its_limits() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        members = set()
        async with AsyncExitStack() as stack:
            limits = RelayLimits(circuits=2, reservations=2)
            public = await stack.enter_async_context(
                peer(network, 1, limits=limits, may_relay=lambda who: who in members)
            )
            homes = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in (2, 3, 4, 5)
            ]
            await trio.sleep(5)
            assert not any(home.reservations.entries for home in homes)
            with pytest.raises(Refusal) as refused:
                await homes[0].endpoint.call(public.contact, RESERVE, Nothing())
            assert refused.value.code == "not-a-member"
            members |= {home.id for home in homes}
            await trio.sleep(130)
            assert sum(bool(home.reservations.entries) for home in homes) == 2
            (one, two), (three, four) = (
                [home for home in homes if bool(home.reservations.entries) is held] for held in (True, False)
            )
            assert await three.endpoint.call(one.contact, ECHO, b"") == b""
            assert await three.endpoint.call(two.contact, ECHO, b"") == b""
            with pytest.raises(ConnectError, match="no more circuits"):
                await four.endpoint.call(one.contact, ECHO, b"")

    run(scenario)


def test_circuits_share_the_relay_s_rate_alike() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        done: dict[bytes, float] = {}
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1, limits=RelayLimits(bytes_per_s=100_000)))
            homes = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in (2, 3, 4, 5)
            ]
            for home in homes:
                await reserved(home)

            async def send(here: Peer, there: Peer) -> None:
                await here.endpoint.call(there.contact, ECHO, b"")
                began = trio.current_time()
                await here.endpoint.call(there.contact, ECHO, bytes(250_000), deadline_s=60)
                done[here.id] = trio.current_time() - began

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, homes[0], homes[1])
                nursery.start_soon(send, homes[2], homes[3])
        first, second = done.values()
        # 250 kB there and back, twice.
        assert 9.0 < max(first, second) < 12.0
        assert abs(first - second) < 1.0

    run(scenario)


def test_a_peer_with_three_circuits_gets_no_more_of_the_relay_than_one_with_one() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        done: dict[bytes, float] = {}
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1, limits=RelayLimits(bytes_per_s=100_000)))
            one, busy, *others = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in range(2, 8)
            ]
            for home in (one, busy, *others):
                await reserved(home)

            async def send(here: Peer, there: Peer) -> None:
                await here.endpoint.call(there.contact, ECHO, b"")
                began = trio.current_time()
                await here.endpoint.call(there.contact, ECHO, bytes(250_000), deadline_s=60)
                done[there.id] = trio.current_time() - began

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, one, others[0])
                for other in others[1:]:
                    nursery.start_soon(send, busy, other)
        # 250 kB there and back at half of the rate, and then the other three.
        assert 9.0 < done[others[0].id] < 12.0
        assert all(18.0 < done[other.id] < 22.0 for other in others[1:])

    run(scenario)


def test_one_circuit_can_be_kept_below_the_relay_s_rate() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            limits = RelayLimits(bytes_per_s=1_000_000, circuit_bytes_per_s=50_000)
            public = await stack.enter_async_context(peer(network, 1, limits=limits))
            a, b = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in (2, 3)
            ]
            await reserved(b)
            began = trio.current_time()
            await a.endpoint.call(b.contact, ECHO, bytes(250_000), deadline_s=60)
            assert 9.0 < trio.current_time() - began < 12.0  # 250 kB there and back

    run(scenario)


def test_nobody_but_a_relay_of_ours_can_make_us_dial() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public, stranger = [await stack.enter_async_context(peer(network, n)) for n in (1, 2)]
            home = await stack.enter_async_context(peer(network, 3, nat="symmetric", relays=lambda: [public.contact]))
            await reserved(home)
            await home.endpoint.call(stranger.contact, ECHO, b"")
            for method, request in (
                (CALL_BACK, CallBack(stranger.id, stranger.bound[0])),
                (INVITE, Invitation(stranger.id, bytes(16))),
            ):
                with pytest.raises(Refusal) as refused:
                    await stranger.endpoint.call(home.contact, method, request)
                assert refused.value.code == "not-my-relay"
            with pytest.raises(Refusal) as refused:
                await stranger.endpoint.call(home.contact, PUNCH, Nothing())
            assert refused.value.code == "not-now"

    run(scenario)


def test_a_peer_without_a_way_is_reported_with_the_reasons() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1))
            a, b = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in (2, 3)
            ]
            await reserved(b)
            contact = b.contact
            b.scope.cancel()
            await trio.sleep(1)
            with pytest.raises(ConnectError, match=r"relay .*no reservation"):
                await a.endpoint.call(contact, ECHO, b"")
            with pytest.raises(PeerError, match="known to no relay but this peer"):
                await public.endpoint.call(contact, ECHO, b"")

    run(scenario)


def test_a_circuit_that_nobody_uses_ends() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public = await stack.enter_async_context(peer(network, 1))
            a, b = [
                await stack.enter_async_context(peer(network, n, nat="symmetric", relays=lambda: [public.contact]))
                for n in (2, 3)
            ]
            await reserved(b)
            await a.endpoint.call(b.contact, ECHO, b"")
            network.crash("h2", silent=True)
            await trio.sleep(200)
            assert public.relay.circuits == 0
            assert public.relay.reservations == 1

    run(scenario)


def test_where_a_peer_has_been_met_is_tried_before_its_relays_and_does_not_delay_them_much() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(link=LINK)
        async with AsyncExitStack() as stack:
            public, other = [await stack.enter_async_context(peer(network, n)) for n in (1, 2)]
            home = await stack.enter_async_context(peer(network, 3, nat="symmetric", relays=lambda: [public.contact]))
            await reserved(home)
            asked: list[PeerId] = []

            def met(who: PeerId) -> tuple[Address, ...]:
                asked.append(who)
                return other.bound

            home.endpoint.also_at = met
            contact = Contact(other.id, home.contact.addresses)  # as if it were to be found with the relay
            assert await home.endpoint.call(contact, ECHO, b"here") == b"here"
            assert asked == [other.id]
            assert home.endpoint.is_relayed(other.id) is False
            assert public.relay.stats.circuits == 0
            # An address that does not answer any more.
            away = await stack.enter_async_context(peer(network, 4, nat="symmetric", relays=lambda: [public.contact]))
            await reserved(away)
            home.endpoint.also_at = lambda who: away.bound
            began = trio.current_time()
            assert await home.endpoint.call(away.contact, ECHO, b"there") == b"there"
            assert home.endpoint.is_relayed(away.id)
            assert trio.current_time() - began < 2.0

    run(scenario)
