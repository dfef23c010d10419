"""Remote procedure calls: what a method is, and the seam that everything above the transport uses.

A method has a name, a request type and a reply type, size caps and a priority. Types are `msgspec.Struct`
(array_like, forbid_unknown_fields), sent as MessagePack, or `bytes` for a raw body. Both ends must define the
method alike; the caps are checked before anything is allocated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Generic, Protocol, TypeVar, cast

import msgspec

from swarm_peer.addresses import Contact
from swarm_peer.errors import ProtocolError
from swarm_peer.identity import PeerId

Q = TypeVar("Q")
R = TypeVar("R")

MAX_METHOD_NAME_CHARS = 64
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_BODY_BYTES = 2**40


class Priority(IntEnum):
    """Which bytes go first on a connection. A lower number goes first."""

    CONTROL = 0
    NORMAL = 1
    BULK = 2


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """A remote method, defined once and used on both ends."""

    name: str
    request: type[Q]
    reply: type[R]
    max_request_bytes: int = 65536
    max_reply_bytes: int = 65536
    priority: Priority = Priority.NORMAL

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_METHOD_NAME_CHARS or not self.name.isascii():
            raise ValueError(f"a method name has 1 to {MAX_METHOD_NAME_CHARS} ASCII characters: {self.name!r}")


Handler = Callable[[PeerId, Q], Awaitable[R]]
"""Answers one request of an authenticated peer. It may raise `Refusal`; any other exception is logged here
and reaches the caller as `Refusal("internal")`. It is cancelled when the caller gives up, at the caller's
deadline, and when the connection ends."""


class PartSender(Protocol):
    """What a streaming handler writes to. Part boundaries are not kept: the receiver sees a byte stream."""

    async def send(self, part: bytes | bytearray | memoryview) -> None:
        """Returns when the part is on its way; waits while the receiver is slow."""


StreamHandler = Callable[[PeerId, Q, PartSender], Awaitable[None]]


class Caller(Protocol):
    """The seam: DHT, membership, blobs and exchanges need nothing else from the network."""

    @property
    def peer_id(self) -> PeerId: ...

    def handle(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Registers the one handler of a method."""

    async def call(self, to: Contact, method: Method[Q, R], request: Q, *, deadline_s: float = 5.0) -> R:
        """Sends a request and returns the reply; connects first if need be, within the same deadline.

        Raises `ConnectError`, `DeadlineExpired`, `Disconnected`, `Refusal` or `ProtocolError`. An unknown
        method is `Refusal` with code "unknown-method".
        """
        ...

    def stream(
        self, to: Contact, method: Method[Q, bytes], request: Q, *, deadline_s: float = 60.0, lane: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """A call whose reply is taken in parts, as they arrive. `lane` 0 is the connection that all calls share;
        others are connections of their own, for bulk, dialled when they are first used. Raises as `call`."""
        ...

    def rtt_s(self, peer_id: PeerId) -> float | None:
        """The round trip to a connected peer, if it has been measured."""
        ...


def encode_body(kind: type[Any], value: object) -> bytes:
    """The wire form of a request or reply of type `kind`."""
    if kind is bytes:
        return value if isinstance(value, bytes) else bytes(cast("bytearray | memoryview", value))
    return msgspec.msgpack.encode(value)


def decode_body(kind: type[Q], body: bytes) -> Q:
    """The value of a stranger's body, strictly typed. Raises `ProtocolError("malformed-body")`."""
    if kind is bytes:
        return cast("Q", body)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError("malformed-body", str(error)) from None


class RequestHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The payload of OPEN. The deadline travels as what is left of it, so that clocks need not agree."""

    method: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_METHOD_NAME_CHARS)]
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_DEADLINE_MS)]
    body_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BODY_BYTES)]


class ReplyHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The payload of HEAD. `code` is empty for success; `body_bytes` is -1 for a streamed reply."""

    code: Annotated[str, msgspec.Meta(max_length=40)]
    detail: Annotated[str, msgspec.Meta(max_length=200)]
    body_bytes: Annotated[int, msgspec.Meta(ge=-1, le=MAX_BODY_BYTES)]


H = TypeVar("H", RequestHeader, ReplyHeader)


def decode_header(kind: type[H], payload: bytes) -> H:
    """A stranger's header. Raises `ProtocolError("malformed-header")`."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError("malformed-header", str(error)) from None
