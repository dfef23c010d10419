"""The seam between sockets and everything above: a transport dials and serves authenticated channels.

Two implementations: `TlsTransport` (TCP with mutually authenticated TLS 1.3) and `MemoryNetwork` (the
in-memory twin for tests and virtual swarms). A channel exists only after both ends have proved who they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from swarm_peer.addresses import Address
from swarm_peer.identity import PeerId


class ByteStream(Protocol):
    """An ordered byte stream for one reader task and one writer task.

    Failures of the link raise `trio.BrokenResourceError`; use after `aclose` `trio.ClosedResourceError`.
    """

    @property
    def rtt_s(self) -> float | None:
        """The round trip as the layer below measures it; None if it does not."""
        ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    async def wait_send_all_might_not_block(self) -> None:
        """Waits until little that was sent before is still unsent: choose what to send after this returns."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """At least one byte, or b"" at the end of the stream."""
        ...

    async def aclose(self) -> None:
        """Closes at once; never raises but for cancellation."""


class Channel(Protocol):
    """A byte stream to an authenticated remote, with its socket-level counters."""

    @property
    def stream(self) -> ByteStream: ...

    @property
    def remote(self) -> PeerId: ...

    @property
    def remote_address(self) -> Address:
        """Where the remote's bytes come from (its ephemeral port, if it dialled)."""
        ...

    @property
    def is_lane(self) -> bool:
        """Whether it was dialled as a lane: a further connection between the same peers, for bulk."""
        ...

    @property
    def origin(self) -> str:
        """The host that limits per host count: the remote's, or loopback for another process of this machine."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes put on the socket, including the transport's own overhead."""
        ...

    @property
    def bytes_received(self) -> int: ...


class Transport(Protocol):
    """Dials and serves channels under one identity."""

    @property
    def drops(self) -> Counter[str]:
        """Incoming connections that ended before they became a channel, by reason."""
        ...

    async def dial(
        self, address: Address, expected: PeerId | None, deadline_s: float, *, is_lane: bool = False
    ) -> Channel:
        """Connects and authenticates. Raises a subclass of `ConnectError`, `WrongIdentity` if another peer
        than `expected` answers."""
        ...

    async def serve(
        self,
        addresses: Sequence[Address],
        on_channel: Callable[[Channel], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listens until cancelled; starts with the list of bound addresses. `on_channel` owns its channel's
        life: the channel is closed when it returns. Raises `AddressInUse` or `ListenError`."""
