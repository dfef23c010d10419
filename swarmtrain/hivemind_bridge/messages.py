"""What node and hivemind process say to each other: length-prefixed MessagePack over a socket pair, all of it typed.

The process on the other side runs other people's code and relays strangers' bytes, so every length has a cap that is
checked before anything is kept, and a message that does not fit its type ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

MAX_FRAME_BYTES: Final = 256 * 1024
# A record of ours has at most 1.3 KiB. hivemind's own processes lose the thread above 16 KiB.
MAX_VALUE_BYTES: Final = 2048
MAX_VALUES: Final = 64
MAX_INITIAL_PEERS: Final = 32
MAX_MULTIADDR_CHARS: Final = 512
KEY_BYTES: Final = 32

_LENGTH: Final = struct.Struct("!I")

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Multiaddr = Annotated[str, msgspec.Meta(max_length=MAX_MULTIADDR_CHARS)]
Line = Annotated[str, msgspec.Meta(max_length=2000)]


class Open(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """To the child, first of all: whom to contact, and the folder for its sockets."""

    initial_peers: Annotated[tuple[Multiaddr, ...], msgspec.Meta(max_length=MAX_INITIAL_PEERS)]
    socket_folder: Annotated[str, msgspec.Meta(max_length=4096)]


class Put(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """To the child: store one author's value under a key for some seconds."""

    number: Number
    key: Key
    author: Key
    value: Value
    life_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Get(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """To the child: the values of all authors under a key."""

    number: Number
    key: Key


class Probe(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """To the child: are you there, and are others?"""

    number: Number


class Opened(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """From the child: the DHT has been joined."""

    peer_id: Annotated[str, msgspec.Meta(max_length=128)]


class Failed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """From the child, last of all: why it cannot go on."""

    reason: Line


class Stored(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """From the child: whether anybody took the value. hivemind says yes too when it stored at home only."""

    number: Number
    stored: bool


class Found(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """From the child: a sample of what is under the key, unverified."""

    number: Number
    values: Annotated[tuple[Value, ...], msgspec.Meta(max_length=MAX_VALUES)]


class Alive(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """From the child: the number of peers that it is connected to."""

    number: Number
    connected: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


Request = Put | Get | Probe
Reply = Stored | Found | Alive
ToChild = Open | Put | Get | Probe
ToNode = Opened | Failed | Stored | Found | Alive

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_node = msgspec.msgpack.Decoder(ToNode)


class BridgeError(Exception):
    """The other side sent what is not a message of ours."""


class Frames:
    """Sans-I/O: bytes in, message bodies out; holds at most one frame's worth."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields every body that is complete now. Raises BridgeError for a length above the cap."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise BridgeError(f"a message of {length} bytes, {MAX_FRAME_BYTES} are allowed")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield body


def encode(message: ToChild | ToNode) -> bytes:
    """One message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_to_node(body: bytes) -> ToNode:
    """What the child says. Raises BridgeError."""
    try:
        return _to_node.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BridgeError(f"not a message: {error}") from None


def decode_to_child(body: bytes) -> ToChild:
    """What the node says. Raises BridgeError."""
    try:
        return _to_child.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BridgeError(f"not a message: {error}") from None
