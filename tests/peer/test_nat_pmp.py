"""NAT-PMP against a responder on loopback that follows RFC 6886, and against hostile replies."""

from __future__ import annotations

import random
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from swarm_peer.nat_pmp import (
    MAX_LIFETIME_S,
    AddressReply,
    ErrorReply,
    Mapping,
    MappingReply,
    NatPmpClient,
    NatPmpError,
    decode_reply,
    default_router,
    mapping_request,
)


@dataclass
class Router:
    """A NAT-PMP router as RFC 6886 describes it: sections 3.2 to 3.5."""

    host: str = "11.22.33.44"
    taken: set[int] = field(default_factory=set)
    result: int = 0
    lost: int = 0  # so many requests get no answer
    mappings: dict[int, tuple[int, int]] = field(default_factory=dict)  # internal port -> external, lifetime
    requests: int = 0

    def answer(self, request: bytes) -> bytes | None:
        self.requests += 1
        if self.requests <= self.lost:
            return None
        version, opcode = request[:2]
        if version != 0:
            return struct.pack("!BBHI", 0, 128 + opcode, 1, 100)
        if self.result:
            return struct.pack("!BBHI", 0, 128 + opcode, self.result, 100)
        if opcode == 0:
            return struct.pack("!BBHI", 0, 128, 0, 100) + socket.inet_aton(self.host)
        internal, external, lifetime_s = struct.unpack("!HHI", request[4:])
        if lifetime_s == 0:
            self.mappings.pop(internal, None)
            external = 0
        else:
            while external in self.taken:
                external += 1
            self.mappings[internal] = (external, lifetime_s)
        return struct.pack("!BBHIHHI", 0, 128 + opcode, 0, 100, internal, external, lifetime_s)

    async def run(self, *, task_status: trio.TaskStatus[int]) -> None:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            await udp.bind(("127.0.0.1", 0))
            task_status.started(udp.getsockname()[1])
            while True:
                request, sender = await udp.recvfrom(100)
                reply = self.answer(request)
                if reply is not None:
                    await udp.sendto(b"garbage", sender)
                    await udp.sendto(reply, sender)


def test_a_port_is_mapped_renewed_and_unmapped() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            router = Router(taken={7766}, lost=1)
            client = NatPmpClient("127.0.0.1", await nursery.start(router.run))
            assert await client.external_host() == "11.22.33.44"
            assert await client.map_port(7766, 3600) == Mapping(7767, 3600)
            assert await client.map_port(7766, 3600, wanted=7767) == Mapping(7767, 3600)
            assert router.mappings == {7766: (7767, 3600)}
            await client.unmap_port(7766)
            assert router.mappings == {}
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_router_that_refuses_or_is_not_there_gets_one_line() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            client = NatPmpClient("127.0.0.1", await nursery.start(Router(result=2).run))
            with pytest.raises(NatPmpError, match="the router refuses: not authorised"):
                await client.map_port(7766, 3600)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind(("127.0.0.1", 0))
                nobody = probe.getsockname()[1]
            with pytest.raises(NatPmpError, match="no NAT-PMP at"):
                await NatPmpClient("127.0.0.1", nobody).external_host()
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_hundred_thousand_hostile_replies_are_read_or_refused() -> None:
    rng = random.Random(6886)
    router = Router()
    requests = (b"\0\0", mapping_request(7766, 7766, 3600))
    good = [reply for request in requests if (reply := router.answer(request)) is not None]
    kinds = set()
    for number in range(100_000):
        data = bytearray(good[number % 2])
        if number % 4 == 0:
            data = bytearray(rng.randbytes(rng.randrange(24)))
        elif number % 4 == 1:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        reply = decode_reply(bytes(data))
        kinds.add(type(reply))
        if isinstance(reply, MappingReply):
            assert 0 <= reply.mapping.lifetime_s <= MAX_LIFETIME_S
            assert 1 <= reply.internal_port <= 65535
            assert reply.mapping.lifetime_s == 0 or 1 <= reply.mapping.port <= 65535
        elif isinstance(reply, AddressReply):
            socket.inet_aton(reply.host)
        elif isinstance(reply, ErrorReply):
            assert str(reply)
    assert kinds == {type(None), AddressReply, MappingReply, ErrorReply}


def test_the_default_router_is_read_and_only_a_private_one_is_asked(tmp_path: Path) -> None:
    def table(*gateways: tuple[str, str, int]) -> Path:
        path = tmp_path / "route"
        lines = ["Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"]
        for destination, gateway, metric in gateways:
            codes = [f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}" for host in (destination, gateway)]
            lines.append("\t".join(["eth0", *codes, "0003", "0", "0", str(metric), "00000000", "0", "0", "0"]))
        path.write_text("\n".join(lines) + "\n")
        return path

    assert default_router(table(("0.0.0.0", "192.168.1.1", 100))) == "192.168.1.1"
    assert default_router(table(("0.0.0.0", "10.0.0.1", 200), ("0.0.0.0", "192.168.1.1", 100))) == "192.168.1.1"
    assert default_router(table(("0.0.0.0", "8.8.8.8", 0))) is None
    assert default_router(table(("192.168.0.0", "192.168.1.1", 0))) is None
    assert default_router(tmp_path / "missing") is None
    (tmp_path / "route").write_text("x\n" + "\t".join(["eth0", "00000000", "zz", "3", "0", "0", "0", "00000000"]))
    assert default_router(tmp_path / "route") is None
