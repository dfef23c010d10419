from __future__ import annotations

import itertools
import random
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_peer.addresses import Contact
from swarm_peer.errors import ProtocolError
from swarm_peer.frames import MAX_DATA_BYTES, Frame, FrameDecoder, FrameType, encode_frame
from swarm_peer.mux import Mux
from swarm_peer.mux_events import ByeCode, Headed, MuxLimits, Opened, Received, ResetCode
from swarm_peer.rpc import (
    Priority,
    ReplyHeader,
    RequestHeader,
    decode_body,
    decode_header,
)

from fuzz.mutator import mutate

FUZZED_INPUTS = 100_000


def header(kind: int, flags: int, reserved: int, stream_id: int, length: int) -> bytes:
    return struct.pack("!BBHII", kind, flags, reserved, stream_id, length)


def merged(frames: list[Frame]) -> list[Frame]:
    """Joins the pieces of DATA frames, which the decoder hands on as they come."""
    result: list[Frame] = []
    for frame in frames:
        last = result[-1] if result else None
        if last and last.type is frame.type is FrameType.DATA and last.stream_id == frame.stream_id and not last.fin:
            result[-1] = last._replace(payload=last.payload + frame.payload, fin=frame.fin)
        else:
            result.append(frame)
    return result


EVERY_KIND = [
    Frame(FrameType.OPEN, 1, b"header"),
    Frame(FrameType.OPEN, 3, b"h", True),
    Frame(FrameType.HEAD, 2, b"x" * 1024),
    Frame(FrameType.DATA, 1, b"d" * 300),
    Frame(FrameType.WINDOW, 2, b"\x00\x00\x10\x00"),
    Frame(FrameType.DATA, 2, b"", True),
    Frame(FrameType.DATA, 4, b"d", True),
    Frame(FrameType.RESET, 5, b"\x00\x01"),
    Frame(FrameType.PING, 0, b"12345678"),
    Frame(FrameType.PONG, 0, b"12345678"),
    Frame(FrameType.BYE, 0, b"\x00"),
]
WIRE = b"".join(encode_frame(f.type, f.stream_id, f.payload, fin=f.fin) for f in EVERY_KIND)


def test_the_header_is_as_documented() -> None:
    assert encode_frame(FrameType.DATA, 7, b"ab", fin=True) == bytes([3, 1, 0, 0, 0, 0, 0, 7, 0, 0, 0, 2]) + b"ab"


def test_every_kind_survives_a_split_at_every_byte() -> None:
    for cut in range(len(WIRE) + 1):
        decoder = FrameDecoder()
        frames = [*decoder.feed(WIRE[:cut]), *decoder.feed(WIRE[cut:])]
        assert merged(frames) == EVERY_KIND


def test_every_kind_survives_byte_by_byte() -> None:
    decoder = FrameDecoder()
    frames = [frame for byte in WIRE for frame in decoder.feed(bytes([byte]))]
    assert merged(frames) == EVERY_KIND


@given(st.lists(st.integers(0, len(WIRE)), max_size=12))
@settings(deadline=None)
def test_every_kind_survives_any_splits(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WIRE)]
    decoder = FrameDecoder()
    frames = [f for a, b in itertools.pairwise(edges) for f in decoder.feed(WIRE[a:b])]
    assert merged(frames) == EVERY_KIND


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(0, 0, 0, 1, 0), "unknown-frame"),
        (header(9, 0, 0, 1, 0), "unknown-frame"),
        (header(255, 0, 0, 1, 0), "unknown-frame"),
        (header(1, 2, 0, 1, 1), "bad-flags"),
        (header(3, 0, 1, 1, 1), "bad-flags"),
        (header(6, 1, 0, 0, 8), "bad-flags"),
        (header(1, 0, 0, 0, 1), "bad-stream-id"),
        (header(6, 0, 0, 1, 8), "bad-stream-id"),
        (header(1, 0, 0, 1, 1025), "oversized-frame"),
        (header(2, 0, 0, 1, 2**32 - 1), "oversized-frame"),
        (header(3, 0, 0, 1, MAX_DATA_BYTES + 1), "oversized-frame"),
        (header(8, 0, 0, 0, 2), "oversized-frame"),
        (header(1, 0, 0, 1, 0), "undersized-frame"),
        (header(4, 0, 0, 1, 3), "undersized-frame"),
        (header(5, 0, 0, 1, 1), "undersized-frame"),
        (header(7, 0, 0, 0, 0), "undersized-frame"),
        (header(3, 0, 0, 1, 0), "empty-frame"),
    ],
)
def test_bad_headers_are_caught_before_their_payload(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        list(FrameDecoder().feed(data))
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", b"\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 500, b"\xdb\xff\xff\xff\xff"]
    + [msgspec.msgpack.encode(value) for value in (["m", 0, 0], ["m", 1, -1], ["", 1, 0], ["m", 1, 0, 0], ["m", 1])]
    + [msgspec.msgpack.encode(["x" * 65, 1, 0]), msgspec.msgpack.encode(["m", 1.5, 0]), b"\x93\xa2\xff\xfe\x01\x01"],
)
def test_bad_request_headers_are_protocol_errors(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed-header"):
        decode_header(RequestHeader, payload)


def corpus() -> list[bytes]:
    """What an honest dialer sends in a few conversations, and every kind of frame."""
    pairs: list[bytes] = [WIRE]
    for size in (0, 10, 2000):
        dialer = Mux(is_dialer=True, now=0.0, limits=MuxLimits(window_bytes=1024))
        for number in range(3):
            request = msgspec.msgpack.encode(RequestHeader(f"method-{number}", 5000, size))
            stream_id = dialer.open(request, Priority.NORMAL)
            dialer.send(stream_id, bytes(size), fin=True)
        dialer.reset(3, ResetCode.CANCELLED)
        dialer.tick(20.0)
        dialer.say_bye(ByeCode.IDLE)
        pairs.append(dialer.next_output(1 << 20).data)
    return pairs


def swallow(mux: Mux, data: bytes) -> None:
    """What a connection does with bytes of a stranger, up to the handler."""
    for event in mux.receive(data, 1.0):
        match event:
            case Opened(stream_id, head):
                decode_header(RequestHeader, head)
                mux.answer(stream_id, b"ok", Priority.NORMAL)
                mux.send(stream_id, b"answer", fin=True)
            case Headed(_, head):
                decode_header(ReplyHeader, head)
            case Received(stream_id, data):
                mux.grant(stream_id, len(data))
                decode_body(Contact, data)


def test_fuzzed_input_raises_nothing_but_protocol_errors() -> None:
    rng = random.Random(20240607)
    seeds = corpus()
    survived = 0
    for _ in range(FUZZED_INPUTS):
        data = mutate(rng.choice(seeds), rng, seeds)
        mux = Mux(is_dialer=False, now=0.0, limits=MuxLimits(window_bytes=1024))
        mux.open(b"call of ours", Priority.NORMAL)
        cut = rng.randrange(len(data) + 1)
        try:
            swallow(mux, data[:cut])
            swallow(mux, data[cut:])
            mux.next_output(1 << 16)
            survived += 1
        except ProtocolError:
            pass
    assert 0 < survived < FUZZED_INPUTS, "the mutator must produce both kinds"
