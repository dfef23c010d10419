from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address, Contact
from swarm_peer.dial_back import DIAL_BACK, DialBack, DialBackReply, DialBackRequest, Outcome
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import Refusal
from swarm_peer.identity import Identity, PeerId
from swarm_peer.memory import MemoryNetwork
from swarm_peer.raw import RawConnection, RawTransport
from swarm_peer.tcp import TlsTransport

WE, HELPER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
ANY = Address("0.0.0.0", 0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def running(
    identity: Identity, transport: RawTransport, listen: Address = ANY
) -> AsyncIterator[tuple[DialBack, Contact]]:
    endpoint = Endpoint(identity, transport)
    dial_back = DialBack(endpoint, transport)
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(endpoint.run, [listen])
        yield dial_back, Contact(identity.peer_id, tuple(bound))
        nursery.cancel_scope.cancel()


def test_a_peer_that_can_be_dialled_learns_so_over_real_sockets() -> None:
    async def scenario() -> None:
        local = Address("127.0.0.1", 0)
        async with (
            running(WE, TlsTransport(WE), local) as (asker, us),
            running(HELPER, TlsTransport(HELPER), local) as (_, helper),
        ):
            verdict = await asker.ask(helper, us.addresses[0].port)
            assert verdict.is_reached
            assert verdict.helper == HELPER.peer_id
            assert verdict.observed.host == "127.0.0.1"
            # The dial came on a connection of its own, not on the one that we have asked over.
            assert verdict.helper_at is not None
            assert verdict.helper_at not in (helper.addresses[0], verdict.observed)
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                assert (await asker.ask(helper, nobody.getsockname()[1])).outcome is Outcome.REFUSED
            # Another peer that listens there is not us.
            assert (await asker.ask(helper, helper.addresses[0].port)).outcome is Outcome.STRANGER

    trio.run(scenario)


def test_a_peer_behind_a_nat_learns_that_nobody_gets_through() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        network.put_behind_nat("home", "preserving")
        async with (
            running(WE, network.transport(WE, "home")) as (asker, us),
            running(HELPER, network.transport(HELPER, "public")) as (_, helper),
        ):
            began = trio.current_time()
            verdict = await asker.ask(helper, us.addresses[0].port)
            assert verdict.outcome is Outcome.TIMED_OUT
            assert verdict.observed.host == "home"
            assert trio.current_time() - began <= 5.0

    run(scenario)


def test_a_helper_that_claims_to_have_reached_us_is_not_believed() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        liar = Endpoint(HELPER, network.transport(HELPER, "public"))

        async def lie(remote: PeerId, request: DialBackRequest) -> DialBackReply:
            return DialBackReply(Outcome.REACHED, "home", 1)

        liar.handle(DIAL_BACK, lie)
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(liar.run, [ANY])
            async with running(WE, network.transport(WE, "home")) as (asker, us):
                verdict = await asker.ask(Contact(HELPER.peer_id, tuple(bound)), us.addresses[0].port)
                assert verdict.outcome is Outcome.STRANGER
            nursery.cancel_scope.cancel()

    run(scenario)


def test_something_else_that_answers_on_the_port_is_not_us() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        other = network.transport(Identity.from_seed(bytes([3]) * 32), "home")

        async def answer(raw: RawConnection, body: bytes) -> None:
            await raw.stream.send_all(bytes(16))

        async def ignore(channel: object) -> None:
            """Nobody calls."""

        other.on_greeting(b"SWD1", answer)
        async with (
            running(WE, network.transport(WE, "home")) as (asker, _),
            running(HELPER, network.transport(HELPER, "public")) as (_, helper),
            trio.open_nursery() as nursery,
        ):
            (address,) = await nursery.start(other.serve, [ANY], ignore)
            assert (await asker.ask(helper, address.port)).outcome is Outcome.STRANGER
            nursery.cancel_scope.cancel()

    run(scenario)


def test_requests_are_rationed_and_slow_answers_bounded() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with (
            running(WE, network.transport(WE, "home")) as (asker, us),
            running(HELPER, network.transport(HELPER, "public")) as (_, helper),
        ):
            for _ in range(6):
                assert (await asker.ask(helper, us.addresses[0].port)).is_reached
            with pytest.raises(Refusal) as refused:
                await asker.ask(helper, us.addresses[0].port)
            assert refused.value.code == "rate-limited"
            await trio.sleep(11)
            assert (await asker.ask(helper, us.addresses[0].port)).is_reached

    run(scenario)


def test_a_greeting_that_nobody_knows_is_dropped_at_once() -> None:
    async def scenario() -> None:
        local = Address("127.0.0.1", 0)
        transport = TlsTransport(HELPER)
        async with running(HELPER, transport, local) as (_, helper):
            for greeting in (b"SWD1" + b"\0\x10" + bytes(16), b"SWX1" + b"\0\x10"):
                tcp = await trio.open_tcp_stream("127.0.0.1", helper.addresses[0].port)
                with trio.fail_after(5), contextlib.suppress(trio.BrokenResourceError):
                    await tcp.send_all(greeting)
                    assert await tcp.receive_some() == b""
                await tcp.aclose()
            assert transport.drops["bad-preamble"] == 1

    trio.run(scenario)
