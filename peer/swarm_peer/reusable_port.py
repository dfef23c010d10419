"""TCP connections whose local port serves twice: once towards a relay, once towards the peer behind it.

A router that translates all connections from one local port to one outer port lets a peer see there, through the
relay, where the other must aim (Ford, Srisuresh and Kegel, 2005, section 4). For that both sockets are bound to the
same local address with SO_REUSEADDR and SO_REUSEPORT, before they connect.
"""

from __future__ import annotations

import contextlib
import errno
import socket

import trio

from swarm_peer.addresses import Address
from swarm_peer.errors import AddressUnresolvable, ConnectionRefused, ConnectTimedOut, Unreachable
from swarm_peer.raw import RawConnection

_ATTEMPTS = 3


async def connect_reusably(address: Address) -> RawConnection:
    """Connects from a port of which the same user may bind another socket. Raises `ConnectError`."""
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressUnresolvable(address, getattr(error, "strerror", None) or "not a host name") from None
    failure: OSError | None = None
    for family, _, _, _, target in found:
        try:
            return await _connect(family, None, target)
        except OSError as error:
            failure = error
    assert failure is not None
    if failure.errno == errno.ECONNREFUSED:
        raise ConnectionRefused(address)
    raise Unreachable(address, failure.strerror or str(failure))


async def open_simultaneously(local: Address, remote: Address, deadline_s: float) -> RawConnection:
    """As `RawTransport.meet`. A refused attempt is repeated at the end of its share of the time."""
    family = socket.AF_INET6 if ":" in remote.host else socket.AF_INET
    reason = "no answer"
    for attempt in range(_ATTEMPTS):
        end = trio.current_time() + deadline_s / _ATTEMPTS
        try:
            with trio.move_on_at(end):
                return await _connect(family, (local.host, local.port), (remote.host, remote.port))
        except OSError as error:
            reason = error.strerror or str(error)
            if attempt < _ATTEMPTS - 1:
                await trio.sleep_until(end)
    raise ConnectTimedOut(remote, f"no simultaneous open within {deadline_s:.1f} s ({reason})")


async def _connect(
    family: int, local: tuple[str, int] | None, target: tuple[str | int, ...] | tuple[str, int] | tuple[int, bytes]
) -> RawConnection:
    tcp = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await tcp.bind(local or ("::" if family == socket.AF_INET6 else "0.0.0.0", 0))
        await tcp.connect(target)
        stream = trio.SocketStream(tcp)
        ours, theirs = tcp.getsockname(), tcp.getpeername()
        return RawConnection(stream, Address(ours[0], ours[1]), Address(theirs[0], theirs[1]))
    except BaseException:
        tcp.close()
        raise
