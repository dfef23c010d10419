"""Where a peer can be reached: addresses, contacts, and how people write them.

Both structs travel on the wire, so their limits are part of their types: decoding enforces them.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import Annotated

import msgspec

from swarm_peer.identity import PEER_ID_BYTES, PeerId

MAX_ADDRESSES = 8
LOOPBACK = "loopback"
RELAY_PREFIX = "relay:"  # begins the host of a relay entry, see `relay_entry.py`
_HOST_PATTERN = r"^[0-9A-Za-z._:%-]{1,253}\Z"  # `$` would let a trailing newline through
_HOST_NAME = re.compile(r"[0-9A-Za-z_]([0-9A-Za-z_.-]*[0-9A-Za-z_])?\.?")
_PEER_ID_TEXT = re.compile(r"[0-9a-fA-F]{64}")

Host = Annotated[str, msgspec.Meta(pattern=_HOST_PATTERN, min_length=1, max_length=253)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
PeerIdBytes = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A TCP endpoint. `host` is a name or a literal IP address without brackets; port 0: any free port."""

    host: Host
    port: Port

    def __str__(self) -> str:
        if self.host.startswith(RELAY_PREFIX):
            _, relay, host = (*self.host.split(":", 2), "", "")[:3]
            return f"{RELAY_PREFIX}{relay[:8]}@{Address(host, self.port)}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Contact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Whom to reach (32-byte peer id) and where to try (at most 8 addresses, in order of preference)."""

    peer_id: PeerIdBytes
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]

    def __str__(self) -> str:
        where = str(self.addresses[0]) if self.addresses else "no address"
        return f"{self.peer_id.hex()[:8]}@{where}"


def parse_address(text: str) -> Address:
    """Reads HOST:PORT or [IPv6]:PORT. Raises `ValueError` with one line that states the accepted form."""
    host, separator, port_text = text.strip().rpartition(":")
    if not separator or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ValueError(_address_help(text))
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(_address_help(text)) from None
    elif len(host) > 253 or not _HOST_NAME.fullmatch(host):
        raise ValueError(_address_help(text))
    return Address(host, int(port_text))


def parse_announced(text: str) -> Address:
    """Reads an address that others are to dial. Raises `ValueError` with one line, also for port 0 and wildcards."""
    try:
        address = parse_address(text)
    except ValueError:
        address = None
    if address is None or address.port == 0 or address.host in ("0.0.0.0", "::"):
        raise ValueError(
            f"{text!r} is no address that others can dial; write HOST:PORT or [IPv6]:PORT with a real host and a port "
            "from 1 to 65535"
        )
    return address


def parse_contact(text: str) -> tuple[PeerId | None, Address]:
    """Reads [PEER_ID@]HOST:PORT, the peer id as 64 hex digits. Raises `ValueError` with one clear line."""
    peer_id_text, separator, address_text = text.strip().rpartition("@")
    if not separator:
        return None, parse_address(address_text)
    if not _PEER_ID_TEXT.fullmatch(peer_id_text):
        raise ValueError(f"{text!r}: what stands before @ must be a peer id of 64 hex digits")
    return PeerId(bytes.fromhex(peer_id_text)), parse_address(address_text)


@functools.lru_cache(maxsize=4096)
def host_group(host: str) -> str:
    """What one stranger is likely to own, for limits: an IPv4 address, an IPv6 /64, or all of `LOOPBACK`."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return LOOPBACK
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))


def _address_help(text: str) -> str:
    return f"{text!r} is no address; write HOST:PORT, for IPv6 [ADDRESS]:PORT, with a port from 0 to 65535"
