"""Connections that begin with a greeting in place of a TLS handshake: what a relay splices, what a dial-back probes.

A greeting has the form of the TLS preamble: 4 bytes that say what it is, the length of the body in 2, the body. Who
receives one knows the body as a secret that it has given to one peer over an authenticated connection, or closes.
TLS may follow later on the same bytes (`RawTransport.upgrade`).
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from swarm_peer.addresses import Address
from swarm_peer.identity import PeerId
from swarm_peer.transport import Channel, Transport

GREETING: Final = struct.Struct("!4sH")
MAX_GREETING_BYTES: Final = 1024


class RawStream(Protocol):
    """The part of a byte stream that needs no TLS. Raises as `ByteStream` does."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """At least one byte, or nothing at the end of the stream."""
        ...

    async def send_eof(self) -> None:
        """Says that nothing more will be sent."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RawConnection:
    """A connection whose remote has proved nothing. `local` is our own end of it, before any translation."""

    stream: RawStream
    local: Address
    remote: Address


GreetingHandler = Callable[[RawConnection, bytes], Awaitable[None]]
"""Owns the life of a connection that began with its greeting; gets the greeting's body. The connection is closed when
it returns."""


class RawTransport(Transport, Protocol):
    """A transport that can also do without TLS, for a while."""

    def on_greeting(self, magic: bytes, handler: GreetingHandler) -> None:
        """Registers who gets the incoming connections that begin with these 4 bytes."""

    async def greet(self, address: Address, magic: bytes, body: bytes, deadline_s: float) -> RawConnection:
        """Connects and sends a greeting. The local port can be used once more by `meet`. Raises `ConnectError`."""
        ...

    async def meet(self, local: Address, remote: Address, deadline_s: float) -> RawConnection:
        """Simultaneous open (RFC 9293, section 3.5): connects from `local` to a peer that does the same at this time.

        At most three attempts. Raises `ConnectError`.
        """
        ...

    async def upgrade(self, raw: RawConnection, expected: PeerId, *, is_client: bool, deadline_s: float) -> Channel:
        """TLS over a raw connection, with a certain peer at the other end. Closes it on failure.

        Raises `ConnectError`.
        """
        ...


async def receive_exactly(stream: RawStream, size: int) -> bytes:
    """Raises `trio.BrokenResourceError` if the stream ends before."""
    data = b""
    while len(data) < size:
        piece = await stream.receive_some(size - len(data))
        if not piece:
            raise trio.BrokenResourceError("the remote hung up")
        data += piece
    return data


async def close_now(stream: RawStream) -> None:
    """Closes without waiting for anything."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.aclose()
