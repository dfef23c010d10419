"""Targets: the bytes of a connection, from its preamble to the bodies of calls."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import msgspec
from swarm_peer import membership_messages
from swarm_peer.addresses import Address, Contact
from swarm_peer.blob_store import Descriptor, blob_id_of, decode_descriptor, describe, encode_descriptor
from swarm_peer.blobs import CHUNK, DESCRIPTOR, ChunkRequest, DescriptorRequest
from swarm_peer.dht import (
    FIND_NODES,
    FIND_RECORDS,
    PING,
    STORE,
    FindNodes,
    FindRecords,
    Nodes,
    Ping,
    Pong,
    Records,
    StoreRecord,
    StoreReply,
)
from swarm_peer.dial_back import DIAL_BACK, DialBackReply, DialBackRequest, Outcome
from swarm_peer.errors import BlobInvalid, ProtocolError, RecordInvalid
from swarm_peer.frames import FrameDecoder, FrameType, encode_frame
from swarm_peer.identity import Identity, PeerId
from swarm_peer.members import Digest
from swarm_peer.mux import Mux
from swarm_peer.mux_events import Headed, Opened, Received
from swarm_peer.records import (
    AgedRecord,
    PeerPayload,
    PeerState,
    RunPayload,
    SignedRecord,
    check_placement,
    encode_payload,
    make_record,
    members_key,
    peers_key,
    run_key,
    says_left,
    supersedes,
)
from swarm_peer.relay_messages import (
    ASK_CALL_BACK,
    CALL_BACK,
    INVITE,
    OPEN_CIRCUIT,
    RESERVE,
    CallBack,
    CallBackRequest,
    CircuitReply,
    CircuitRequest,
    Go,
    Invitation,
    Nothing,
    ReserveReply,
    decode_go,
)
from swarm_peer.rpc import (
    Method,
    Priority,
    ReplyHeader,
    RequestHeader,
    decode_body,
    decode_header,
    encode_body,
)
from swarm_peer.storage import PutOutcome
from swarm_peer.tls import PREAMBLE_BYTES, make_certificate, read_certificate, read_preamble

from fuzz.target import Target

RUN_ID = bytes(range(32))
IDENTITY = Identity.from_seed(bytes(range(1, 33)))
ADDRESSES = (Address("192.0.2.7", 7000), Address("2001:db8::1", 7000), Address("peer.example.org", 443))
CONTACT = Contact(IDENTITY.peer_id, ADDRESSES)
MAX_BLOB_BYTES = 1 << 20


# ------------------------------------------------------------------------------------------------------ TLS preamble


def _decode_preamble(data: bytes) -> PeerId:
    if len(data) < PREAMBLE_BYTES:
        raise ProtocolError("bad-preamble")  # the driver would wait for more
    _, length = read_preamble(data[:PREAMBLE_BYTES])
    return read_certificate(data[PREAMBLE_BYTES : PREAMBLE_BYTES + length])


def _preamble_seeds() -> dict[str, bytes]:
    certificate = make_certificate(IDENTITY)
    return {"peer": struct.pack("!4sH", b"SWT1", len(certificate)) + certificate}


# ------------------------------------------------------------------------------------------------------------ frames


def _decode_frames(data: bytes) -> int:
    """The first byte says into what pieces the rest is cut: the frames must be the same."""
    whole = _joined(FrameDecoder(), [data[1:]])
    size = data[0] if data else 0
    if size:
        pieces = [data[start : start + size] for start in range(1, len(data), size)]
        assert _joined(FrameDecoder(), pieces) == whole
    return len(whole)


def _joined(decoder: FrameDecoder, pieces: list[bytes]) -> list[tuple[int, int, bytes, bool]]:
    """The frames, with the pieces of a DATA frame laid together."""
    frames: list[tuple[int, int, bytes, bool]] = []
    open_data = False
    for piece in pieces:
        for kind, stream_id, payload, fin in decoder.feed(piece):
            if open_data and kind is FrameType.DATA and frames[-1][1] == stream_id and not frames[-1][3]:
                payload = frames.pop()[2] + payload
            open_data = kind is FrameType.DATA
            frames.append((kind, stream_id, payload, fin))
    return frames


def _frame_seeds() -> dict[str, bytes]:
    request = msgspec.msgpack.encode(RequestHeader("exchange.open", 5000, 40))
    asked = (
        encode_frame(FrameType.OPEN, 2, request),
        encode_frame(FrameType.DATA, 2, b"a body in two "),
        encode_frame(FrameType.DATA, 2, b"parts", fin=True),
    )
    answered = (
        encode_frame(FrameType.WINDOW, 1, struct.pack("!I", 4096)),
        encode_frame(FrameType.HEAD, 1, msgspec.msgpack.encode(ReplyHeader("", "", 4))),
        encode_frame(FrameType.DATA, 1, b"done", fin=True),
    )
    ended = (
        encode_frame(FrameType.PING, 0, bytes(8)),
        encode_frame(FrameType.OPEN, 4, request, fin=True),
        encode_frame(FrameType.RESET, 4, struct.pack("!H", 1)),
        encode_frame(FrameType.BYE, 0, b"\0"),
    )
    return {
        "asked": b"\0" + b"".join(asked),
        "answered": b"\0" + b"".join(answered),
        "ended": b"\0" + b"".join(ended),
        "pieces": b"\x21" + b"".join(asked + answered),
    }


def _decode_connection(data: bytes) -> int:
    """One end of a connection that has a call under way: events, answers and output, to the end of the bytes."""
    mux = Mux(is_dialer=True, now=0.0)
    mux.send(mux.open(b"request", Priority.NORMAL), b"body", fin=True)
    mux.next_output(1 << 16)
    events = 0
    size = data[0] if data and data[0] else max(1, len(data))
    for number, start in enumerate(range(1, len(data), size)):
        for event in mux.receive(data[start : start + size], 0.001 * number):
            events += 1
            if isinstance(event, Opened):
                decode_header(RequestHeader, event.header)
                mux.answer(event.stream_id, b"answer", Priority.NORMAL)
                mux.send(event.stream_id, b"reply", fin=True)
            elif isinstance(event, Headed):
                decode_header(ReplyHeader, event.header)
            elif isinstance(event, Received):
                mux.grant(event.stream_id, len(event.data))
        while mux.has_output and mux.next_output(1 << 16).data:
            events += 1
    assert events <= 2 * len(data)
    assert mux.stream_count <= mux.limits.max_streams
    return events


# ----------------------------------------------------------------------------------------------------------- records


def _decode_record(data: bytes) -> AgedRecord:
    try:
        aged = msgspec.msgpack.decode(data, type=AgedRecord)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise RecordInvalid("malformed") from None
    # Not in the order of the product, which verifies first: the payload's decoder has to bear anything too.
    says_left(aged.record)
    assert not supersedes(aged.record, aged.record)
    check_placement(aged.record)
    aged.record.verify()
    return aged


def _peer_record(state: PeerState = PeerState.TRAINING, key: bytes = peers_key(RUN_ID)) -> AgedRecord:
    payload = encode_payload(PeerPayload(RUN_ID, ADDRESSES, state, b"\x81"))
    return AgedRecord(make_record(IDENTITY, "peer", key, 3, 60, payload), 1500)


def _run_record() -> SignedRecord:
    run = RunPayload(RUN_ID, "reading-group", IDENTITY.public_key, bytes(32), ADDRESSES)
    return make_record(IDENTITY, "run", run_key("reading-group"), 1, 1200, encode_payload(run))


def _record_seeds() -> dict[str, bytes]:
    records = {
        "peer": _peer_record(),
        "left": _peer_record(PeerState.LEFT),
        "run": AgedRecord(_run_record(), 0),
    }
    return {name: msgspec.msgpack.encode(record) for name, record in records.items()}


# ---------------------------------------------------------------------------------------------------------- messages


def decode_message(methods: list[tuple[Method[Any, Any], bool]], data: bytes) -> object:
    """The first byte chooses the method and the direction; caps are kept as the transport keeps them."""
    method, is_reply = methods[data[0] % len(methods)] if data else methods[0]
    body, cap = data[1:], method.max_reply_bytes if is_reply else method.max_request_bytes
    if len(body) > cap:
        raise ProtocolError("oversized-body")
    return decode_body(method.reply if is_reply else method.request, body)


def both_ways(methods: list[Method[Any, Any]]) -> list[tuple[Method[Any, Any], bool]]:
    """Requests and replies of all methods, raw bodies left out."""
    ways = [(method, is_reply) for method in methods for is_reply in (False, True)]
    return [(m, is_reply) for m, is_reply in ways if (m.reply if is_reply else m.request) is not bytes]


def encode_messages(methods: list[tuple[Method[Any, Any], bool]], values: list[object]) -> dict[str, bytes]:
    """A seed for each message: the byte that chooses it, and its body."""
    kinds = [method.reply if is_reply else method.request for method, is_reply in methods]
    return {
        type(value).__name__.lower(): bytes([kinds.index(type(value))]) + encode_body(type(value), value)
        for value in values
    }


@cache
def _peer_methods() -> list[tuple[Method[Any, Any], bool]]:
    exchange, trade, page = membership_messages.methods_of(RUN_ID)
    return both_ways([PING, FIND_NODES, FIND_RECORDS, STORE, DESCRIPTOR, CHUNK, exchange, trade, page, DIAL_BACK])


def _peer_message_seeds() -> dict[str, bytes]:
    member = _peer_record(key=members_key(RUN_ID))
    digest = Digest(IDENTITY.peer_id, 7)
    values: list[object] = [
        Ping(CONTACT),
        Pong(),
        FindNodes(CONTACT, RUN_ID),
        Nodes((CONTACT,)),
        FindRecords(None, RUN_ID),
        Records((_peer_record(),), (CONTACT,)),
        StoreRecord(CONTACT, _peer_record()),
        StoreReply(PutOutcome.STORED, None),
        DescriptorRequest(RUN_ID, 1000),
        ChunkRequest(RUN_ID, 3),
        membership_messages.Exchange((digest,), True, (member,)),
        membership_messages.ExchangeReply((), (IDENTITY.peer_id,), (digest,)),
        membership_messages.Trade((member,), (IDENTITY.peer_id,)),
        membership_messages.TradeReply((member,)),
        membership_messages.ListRequest(b""),
        membership_messages.ListReply(1, (member,)),
        DialBackRequest(7000, bytes(16), bytes(16)),
        DialBackReply(Outcome.REACHED, "192.0.2.7", 51000),
    ]
    return encode_messages(_peer_methods(), values)


@cache
def _relay_methods() -> list[tuple[Method[Any, Any], bool]]:
    return both_ways([RESERVE, OPEN_CIRCUIT, INVITE, ASK_CALL_BACK, CALL_BACK])


def _decode_relay(data: bytes) -> object:
    """The messages of a relay; behind the byte 255 what it says to both ends of a circuit."""
    return decode_go(data[1:]) if data[:1] == b"\xff" else decode_message(_relay_methods(), data)


def _relay_seeds() -> dict[str, bytes]:
    values: list[object] = [
        Nothing(),
        ReserveReply(ADDRESSES[0]),
        CircuitRequest(IDENTITY.peer_id),
        CircuitReply(bytes(16)),
        Invitation(IDENTITY.peer_id, bytes(16)),
        CallBackRequest(IDENTITY.peer_id, 7000),
        CallBack(IDENTITY.peer_id, ADDRESSES[1]),
    ]
    go = b"\xff" + msgspec.msgpack.encode(Go(ADDRESSES[0], ADDRESSES[1]))
    return {**encode_messages(_relay_methods(), values), "go": go}


def _decode_descriptor(data: bytes) -> Descriptor:
    # A forger chooses the id along with the bytes: it is their hash.
    return decode_descriptor(blob_id_of(data), data, MAX_BLOB_BYTES)


def _descriptor_seeds() -> dict[str, bytes]:
    return {
        "empty": encode_descriptor(describe(b"")),
        "chunks": encode_descriptor(describe(bytes(300_000), 65536)),
    }


TARGETS = [
    Target("preamble", _decode_preamble, (ProtocolError,), _preamble_seeds),
    Target("frames", _decode_frames, (ProtocolError,), _frame_seeds, lines_per_byte=200),
    Target("connection", _decode_connection, (ProtocolError,), _frame_seeds, lines_per_byte=400),
    Target("record", _decode_record, (RecordInvalid,), _record_seeds),
    Target("peer-messages", lambda data: decode_message(_peer_methods(), data), (ProtocolError,), _peer_message_seeds),
    Target("relay-messages", _decode_relay, (ProtocolError,), _relay_seeds),
    Target("descriptor", _decode_descriptor, (BlobInvalid,), _descriptor_seeds),
]
