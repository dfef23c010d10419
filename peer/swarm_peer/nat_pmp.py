"""NAT-PMP (RFC 6886): asks the home router to forward a TCP port. Messages free of I/O, and a small client.

Everything that comes back is checked against the router's address, the length and the request; RFC 6886, section 3.5:
a result code other than 0 means that nothing was mapped.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio

NAT_PMP_PORT: Final = 5351
# RFC 6886, section 3.1, asks for nine tries over two minutes; whoever is there answers the first few.
_TRIES_S: Final = (0.25, 0.5, 1.0, 2.0)
_MAP_TCP: Final = 2
_REPLY: Final = 128
MAX_LIFETIME_S: Final = 7 * 24 * 3600
_RESULTS: Final = {
    1: "unsupported version",
    2: "not authorised (switched off in the router's settings)",
    3: "network failure: the router itself has no public address",
    4: "out of resources",
    5: "unsupported request",
}


class NatPmpError(Exception):
    """The router said no, or nothing; one line for people."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Connections to `port` of the router are forwarded for `lifetime_s` seconds from now."""

    port: int
    lifetime_s: int


@dataclass(frozen=True, slots=True)
class AddressReply:
    """The router's own address on its far side."""

    host: str


@dataclass(frozen=True, slots=True)
class MappingReply:
    internal_port: int
    mapping: Mapping


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """`opcode` is that of the request that failed."""

    opcode: int
    code: int

    def __str__(self) -> str:
        return _RESULTS.get(self.code, f"result code {self.code}")


def address_request() -> bytes:
    """Asks for the router's address (section 3.2)."""
    return b"\0\0"


def mapping_request(internal_port: int, external_port: int, lifetime_s: int) -> bytes:
    """Asks for a TCP mapping (section 3.3); lifetime 0 and external port 0 end one (section 3.4)."""
    return struct.pack("!BBHHHI", 0, _MAP_TCP, 0, internal_port, external_port, lifetime_s)


def decode_reply(packet: bytes) -> AddressReply | MappingReply | ErrorReply | None:
    """Reads a reply; None if it is none of the two that we ask for. Lifetimes are cut to `MAX_LIFETIME_S`."""
    if not 8 <= len(packet) <= 16:
        return None
    version, opcode, code = struct.unpack_from("!BBH", packet)
    if version != 0 or opcode not in (_REPLY, _REPLY + _MAP_TCP):
        return None
    if code != 0:
        return ErrorReply(opcode - _REPLY, code)
    if opcode == _REPLY and len(packet) == 12:
        return AddressReply(socket.inet_ntop(socket.AF_INET, packet[8:12]))
    if opcode == _REPLY + _MAP_TCP and len(packet) == 16:
        internal, external, lifetime_s = struct.unpack_from("!HHI", packet, 8)
        if internal == 0 or (external == 0 and lifetime_s != 0):
            return None
        return MappingReply(internal, Mapping(external, min(lifetime_s, MAX_LIFETIME_S)))
    return None


R = TypeVar("R", AddressReply, MappingReply)


class NatPmpClient:
    """Talks to one router. Every call ends within four seconds."""

    def __init__(self, router: str, port: int = NAT_PMP_PORT) -> None:
        self._router = (router, port)

    async def external_host(self) -> str:
        """Returns the router's address on its far side. Raises `NatPmpError`."""
        reply = await self._ask(address_request(), AddressReply)
        return reply.host

    async def map_port(self, port: int, lifetime_s: int, *, wanted: int | None = None) -> Mapping:
        """Has a TCP port forwarded to ours of that number; the router may choose another one than `wanted`.

        Raises `NatPmpError`.
        """
        reply = await self._ask(mapping_request(port, wanted or port, lifetime_s), MappingReply, port)
        if reply.mapping.lifetime_s == 0:
            raise NatPmpError("the router ended the mapping at once")
        return reply.mapping

    async def unmap_port(self, port: int) -> None:
        """Ends the mapping. Raises `NatPmpError`."""
        await self._ask(mapping_request(port, 0, 0), MappingReply, port)

    async def _ask(self, request: bytes, kind: type[R], port: int = 0) -> R:
        """Sends until there is an answer. A connected socket takes packets of the router alone."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                await udp.connect(self._router)
                for wait_s in _TRIES_S:
                    with trio.move_on_after(wait_s):
                        await udp.send(request)
                        return await self._receive(udp, request[1], kind, port)
            except OSError as error:
                raise NatPmpError(f"no NAT-PMP at {self._router[0]}: {error.strerror or error}") from None
        raise NatPmpError(f"no NAT-PMP at {self._router[0]}: no answer")

    async def _receive(self, udp: trio.socket.SocketType, opcode: int, kind: type[R], port: int) -> R:
        while True:
            reply = decode_reply(await udp.recv(64))
            if isinstance(reply, ErrorReply) and reply.opcode == opcode:
                raise NatPmpError(f"the router refuses: {reply}")
            if isinstance(reply, MappingReply) and reply.internal_port != port:
                continue
            if isinstance(reply, kind):
                return reply


def default_router(table: Path = Path("/proc/net/route")) -> str | None:
    """Returns the IPv4 default router if it has a private address; None if there is none, or no such table (macOS)."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return None
    routes = []
    for fields in (line.split() for line in lines):
        # Interface, destination, gateway, flags, reference count, use, metric, mask: in hexadecimal, host byte order.
        if len(fields) >= 8 and fields[1] == "00000000" and fields[7] == "00000000":
            try:
                gateway = ipaddress.IPv4Address(socket.ntohl(int(fields[2], 16)))
                routes.append((int(fields[6]), gateway))
            except ValueError:
                continue
    usable = [gateway for _, gateway in sorted(routes) if gateway.is_private and not gateway.is_unspecified]
    return str(usable[0]) if usable else None
