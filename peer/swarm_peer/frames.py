"""The frame codec: bytes of a connection to frames and back, without any I/O.

Every frame starts with 12 bytes, `!BBHII`: type, flags, reserved (0), stream id, payload length. PROTOCOL.md
has the table of types. The decoder checks the whole header before it takes a single byte of the payload, holds
at most one short frame, and hands DATA payloads on as they arrive. Whatever bytes a stranger sends, only
`ProtocolError` leaves it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from swarm_peer.errors import ProtocolError

_HEADER = struct.Struct("!BBHII")
HEADER_BYTES = _HEADER.size
MAX_DATA_BYTES = 256 * 1024
MAX_HEADER_PAYLOAD_BYTES = 1024
FIN = 0x01


class FrameType(IntEnum):
    """What a frame is for."""

    OPEN = 1  # opens a stream; payload: request header
    HEAD = 2  # answers a stream; payload: reply header
    DATA = 3  # bytes of a body
    WINDOW = 4  # u32: so many more DATA bytes are welcome on this stream
    RESET = 5  # u16: the stream ends now, in both directions
    PING = 6  # 8 bytes to be sent back
    PONG = 7  # the 8 bytes of a PING
    BYE = 8  # u8: the sender opens no more streams and closes when the open ones have ended


class _Rule(NamedTuple):
    min_bytes: int
    max_bytes: int
    may_end: bool
    on_stream: bool


_RULES = {
    FrameType.OPEN: _Rule(1, MAX_HEADER_PAYLOAD_BYTES, True, True),
    FrameType.HEAD: _Rule(1, MAX_HEADER_PAYLOAD_BYTES, True, True),
    FrameType.DATA: _Rule(0, MAX_DATA_BYTES, True, True),
    FrameType.WINDOW: _Rule(4, 4, False, True),
    FrameType.RESET: _Rule(2, 2, False, True),
    FrameType.PING: _Rule(8, 8, False, False),
    FrameType.PONG: _Rule(8, 8, False, False),
    FrameType.BYE: _Rule(1, 1, False, False),
}


class Frame(NamedTuple):
    """One frame, or a piece of a DATA frame. `fin`: the sender's half of the stream ends with this."""

    type: FrameType
    stream_id: int
    payload: bytes
    fin: bool = False


def encode_header(kind: FrameType, stream_id: int, length: int, *, fin: bool = False) -> bytes:
    """The 12 bytes before a payload of `length` bytes."""
    return _HEADER.pack(kind, FIN if fin else 0, 0, stream_id, length)


def encode_frame(kind: FrameType, stream_id: int, payload: bytes, *, fin: bool = False) -> bytes:
    """A whole frame."""
    return _HEADER.pack(kind, FIN if fin else 0, 0, stream_id, len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into frames. Feed it whatever arrives, in pieces of any size."""

    def __init__(self) -> None:
        self._held = bytearray()  # an incomplete header or short payload
        self._short: tuple[FrameType, int, int, bool] | None = None  # type, stream id, length, fin
        self._data_left = 0
        self._data_stream = 0
        self._data_fin = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes. Raises `ProtocolError`; the decoder is then useless."""
        view = memoryview(data)
        while view or self._short is not None:
            if self._data_left:
                piece = bytes(view[: self._data_left])
                view = view[len(piece) :]
                self._data_left -= len(piece)
                yield Frame(FrameType.DATA, self._data_stream, piece, self._data_fin and not self._data_left)
                continue
            needed = HEADER_BYTES if self._short is None else self._short[2]
            missing = needed - len(self._held)
            self._held += view[:missing]
            view = view[missing:]
            if len(self._held) < needed:
                return
            held = bytes(self._held)
            self._held.clear()
            if self._short is not None:
                kind, stream_id, _, fin = self._short
                self._short = None
                yield Frame(kind, stream_id, held, fin)
                continue
            kind, stream_id, length, fin = _check_header(held)
            if kind is not FrameType.DATA:
                self._short = (kind, stream_id, length, fin)
            elif length:
                self._data_left, self._data_stream, self._data_fin = length, stream_id, fin
            else:
                yield Frame(kind, stream_id, b"", fin)


def _check_header(header: bytes) -> tuple[FrameType, int, int, bool]:
    type_byte, flags, reserved, stream_id, length = _HEADER.unpack(header)
    try:
        kind = FrameType(type_byte)
    except ValueError:
        raise ProtocolError("unknown-frame", f"type {type_byte}") from None
    rule = _RULES[kind]
    if reserved or flags & ~(FIN if rule.may_end else 0):
        raise ProtocolError("bad-flags", f"{kind.name} with flags {flags:#x}, reserved {reserved:#x}")
    if bool(stream_id) is not rule.on_stream:
        raise ProtocolError("bad-stream-id", f"{kind.name} on stream {stream_id}")
    if length > rule.max_bytes:
        raise ProtocolError("oversized-frame", f"{kind.name} of {length} bytes")
    if length < rule.min_bytes:
        raise ProtocolError("undersized-frame", f"{kind.name} of {length} bytes")
    if kind is FrameType.DATA and not length and not flags:
        raise ProtocolError("empty-frame")
    return kind, stream_id, length, bool(flags)
