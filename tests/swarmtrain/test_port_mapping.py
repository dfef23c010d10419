"""Port mapping against a NAT-PMP responder on loopback, in real time with lifetimes of a second or two."""

from __future__ import annotations

import socket
import struct
import sys

import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address
from swarm_peer.nat_pmp import NatPmpClient

from swarmtrain.port_mapping import Mapped, MappingFailed, NatPmp, PortMapping, Upnp


class Responder:
    """RFC 6886, sections 3.2 to 3.4; gives port 40000 to everybody."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.mapped: list[int] = []  # the lifetimes that were asked for, 0 for a deletion
        self.renewed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[int]) -> None:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            await udp.bind(("127.0.0.1", 0))
            task_status.started(udp.getsockname()[1])
            while True:
                request, sender = await udp.recvfrom(100)
                if request[1] == 0:
                    await udp.sendto(struct.pack("!BBHI", 0, 128, 0, 1) + socket.inet_aton(self.host), sender)
                    continue
                internal, _, lifetime_s = struct.unpack("!HHI", request[4:])
                self.mapped.append(lifetime_s)
                external = 40000 if lifetime_s else 0
                await udp.sendto(struct.pack("!BBHIHHI", 0, 130, 0, 1, internal, external, lifetime_s), sender)
                if len(self.mapped) == 3:
                    self.renewed.set()


def test_a_mapping_is_told_once_renewed_at_half_its_life_and_deleted_at_the_end() -> None:
    async def main() -> None:
        changes: list[Address | None] = []
        async with trio.open_nursery() as outer:
            responder = Responder("11.22.33.44")
            client = NatPmpClient("127.0.0.1", await outer.start(responder.run))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(PortMapping(7766, [NatPmp(client)], changes.append, lifetime_s=1).run)
                with trio.fail_after(30):
                    await responder.renewed.wait()
                nursery.cancel_scope.cancel()
            outer.cancel_scope.cancel()
        assert changes == [Address("11.22.33.44", 40000)]
        assert responder.mapped == [1, 1, 1, 0]

    trio.run(main)


def test_a_router_behind_another_nat_is_of_no_use_and_says_so() -> None:
    async def main() -> None:
        changes: list[Address | None] = []
        async with trio.open_nursery() as nursery:
            client = NatPmpClient("127.0.0.1", await nursery.start(Responder("100.64.1.2").run))
            mapping = PortMapping(7766, [NatPmp(client)], changes.append, retry_s=3600)
            nursery.start_soon(mapping.run)
            with trio.move_on_after(20):
                while "another NAT" not in mapping.reason:  # noqa: ASYNC110  # it has no event for this
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        assert "100.64.1.2 is not public" in mapping.reason
        assert changes == []

    trio.run(main)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "not-an-address"])
def test_a_router_that_names_no_address_ends_nothing(host: str) -> None:
    class Confused:
        """A router that agrees, and does not know its own address."""

        name = "confused"
        unmapped = False

        async def map_port(self, port: int, lifetime_s: int) -> Mapped:
            return Mapped(Address(host, port), lifetime_s)

        async def unmap_port(self, port: int) -> None:
            self.unmapped = True

    async def main() -> None:
        changes: list[Address | None] = []
        router = Confused()
        mapping = PortMapping(7766, [router], changes.append, retry_s=60)
        with trio.move_on_after(200):
            await mapping.run()
        assert "is not public" in mapping.reason
        assert changes == []
        assert router.unmapped

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_without_miniupnpc_upnp_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", None)

    async def main() -> None:
        with pytest.raises(MappingFailed, match=r"swarmtrain\[portmap\]"):
            await Upnp().map_port(7766, 3600)

    trio.run(main)
