"""Home routers for the lab: they translate addresses as most do (RFC 4787), and let in only answers.

Both kinds filter by address and port: a packet from outside passes if the same inner address has sent to exactly its
source before, through the mapping that it arrives at. Everything else is dropped without a word.

- `preserving`: one inner port has one outer port, the same number where that is free, whatever the remote
  (endpoint-independent mapping).
- `symmetric`: every remote gets an outer port of its own, at random.
"""

from __future__ import annotations

import random
import socket
import struct

from lab.router import Direction, LinkConfig, Translate

Endpoint = tuple[bytes, int]

_TCP, _UDP = 6, 17
_CHECKSUM_AT = {_TCP: 16, _UDP: 6}  # in the transport header
_PORTS = struct.Struct("!HH")
_FIRST_RANDOM_PORT = 32768


def preserving(config: LinkConfig) -> Translate:
    """A router whose mapping does not depend on the remote, and which keeps port numbers."""
    return _Router(config, is_symmetric=False)


def symmetric(config: LinkConfig) -> Translate:
    """A router that maps every remote to another random port."""
    return _Router(config, is_symmetric=True)


class _Router:
    def __init__(self, config: LinkConfig, *, is_symmetric: bool) -> None:
        self._public = socket.inet_aton(config.public.partition("/")[0])
        self._is_symmetric = is_symmetric
        self._random = random.Random(config.name)
        # Per transport protocol: (inner, remote or None) -> outer port, and the way back.
        self._outer: dict[tuple[int, Endpoint, Endpoint | None], int] = {}
        self._inner: dict[tuple[int, int], Endpoint] = {}
        self._sent: set[tuple[int, int, Endpoint]] = set()

    def __call__(self, packet: bytes, direction: Direction) -> bytes | None:
        at, protocol = 4 * (packet[0] & 15), packet[9]
        if protocol not in _CHECKSUM_AT or len(packet) < at + 8:
            return None
        source, target = _PORTS.unpack_from(packet, at)
        if direction == "up":
            remote = (packet[16:20], target)
            port = self._map(protocol, (packet[12:16], source), remote)
            self._sent.add((protocol, port, remote))
            return _rewrite(packet, at, address_at=12, port_at=at, address=self._public, port=port)
        if (protocol, target, (packet[12:16], source)) not in self._sent:
            return None
        address, port = self._inner[protocol, target]
        return _rewrite(packet, at, address_at=16, port_at=at + 2, address=address, port=port)

    def _map(self, protocol: int, inner: Endpoint, remote: Endpoint) -> int:
        key = (protocol, inner, remote if self._is_symmetric else None)
        if key not in self._outer:
            port = self._random.randrange(_FIRST_RANDOM_PORT, 65536) if self._is_symmetric else inner[1]
            while (protocol, port) in self._inner:
                port = self._random.randrange(_FIRST_RANDOM_PORT, 65536)
            self._outer[key] = port
            self._inner[protocol, port] = inner
        return self._outer[key]


def _rewrite(packet: bytes, at: int, *, address_at: int, port_at: int, address: bytes, port: int) -> bytes:
    """Replaces one address and port, and mends both checksums (RFC 1624, equation 3)."""
    new = bytearray(packet)
    new[address_at : address_at + 4] = address
    struct.pack_into("!H", new, port_at, port)
    checksum_at = at + _CHECKSUM_AT[packet[9]]
    changed = [(packet[i : i + 2], new[i : i + 2]) for i in (address_at, address_at + 2)]
    _mend(new, 10, changed)
    if packet[9] != _UDP or packet[checksum_at : checksum_at + 2] != b"\0\0":
        _mend(new, checksum_at, [*changed, (packet[port_at : port_at + 2], new[port_at : port_at + 2])])
    return bytes(new)


def _mend(packet: bytearray, at: int, changed: list[tuple[bytes, bytearray]]) -> None:
    total = ~struct.unpack_from("!H", packet, at)[0] & 0xFFFF
    for old, new in changed:
        total += (~int.from_bytes(old, "big") & 0xFFFF) + int.from_bytes(new, "big")
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, ~total & 0xFFFF)
