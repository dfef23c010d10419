"""What peers and relays say to each other: the methods, the greeting of a circuit, and who can be seen where."""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
import trio

from swarm_peer.addresses import Address, PeerIdBytes
from swarm_peer.errors import ProtocolError
from swarm_peer.raw import RawStream, receive_exactly
from swarm_peer.rpc import Method, Priority

CIRCUIT_MAGIC: Final = b"SWR1"
TOKEN_BYTES: Final = 16
LEASE_S: Final = 90.0
MAX_GO_BYTES: Final = 1024
_LENGTH: Final = struct.Struct("!H")

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Nothing(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A message that says all by its method."""


class ReserveReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where the relay sees the peer that reserved. The reservation holds for `LEASE_S`, if it stays connected."""

    seen_at: Address


class CircuitRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whom the asker wants to talk to."""

    target: PeerIdBytes


class CircuitReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The asker's token: the body of the greeting with which it opens its end."""

    token: Token


class Invitation(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """To the target: who wants to talk to it, and the token for its end."""

    dialer: PeerIdBytes
    token: Token


class CallBackRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Have `target` dial the asker at this port of the host that the relay sees it at."""

    target: PeerIdBytes
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class CallBack(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """To the target: who asks to be dialled, and where the relay sees it."""

    dialer: PeerIdBytes
    address: Address


class Go(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """To both ends of a circuit when both are there: where the relay sees each. What follows is the other end's."""

    own: Address
    other: Address


RESERVE: Final = Method("relay.reserve", Nothing, ReserveReply, 16, 512, priority=Priority.CONTROL)
OPEN_CIRCUIT: Final = Method("relay.open", CircuitRequest, CircuitReply, 64, 64, priority=Priority.CONTROL)
INVITE: Final = Method("relay.invite", Invitation, Nothing, 128, 16, priority=Priority.CONTROL)
ASK_CALL_BACK: Final = Method("relay.ask-call-back", CallBackRequest, Nothing, 64, 16, priority=Priority.CONTROL)
CALL_BACK: Final = Method("relay.call-back", CallBack, Nothing, 512, 16, priority=Priority.CONTROL)
PUNCH: Final = Method("relay.punch", Nothing, Nothing, 16, 16, priority=Priority.CONTROL)


def encode_go(go: Go) -> bytes:
    """With its length in front."""
    body = msgspec.msgpack.encode(go)
    return _LENGTH.pack(len(body)) + body


async def receive_go(stream: RawStream) -> Go:
    """Raises `trio.BrokenResourceError` if the relay closes instead, `ProtocolError` if it sends something else."""
    (length,) = _LENGTH.unpack(await receive_exactly(stream, _LENGTH.size))
    if length > MAX_GO_BYTES:
        raise ProtocolError("bad-go", f"{length} bytes")
    body = await receive_exactly(stream, length)
    await trio.lowlevel.checkpoint()
    return decode_go(body)


def decode_go(body: bytes) -> Go:
    """Reads what a relay sent behind the length. Raises `ProtocolError("bad-go")`."""
    try:
        return msgspec.msgpack.decode(body, type=Go)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("bad-go", str(error)) from None
