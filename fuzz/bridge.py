"""Targets: what the hivemind process says, and what strangers have left in its DHT."""

from __future__ import annotations

from swarm_peer.addresses import Address
from swarm_peer.errors import RecordInvalid
from swarm_peer.identity import Identity
from swarm_peer.records import RunPayload

from fuzz.target import Target
from swarmtrain.hivemind_bridge import messages
from swarmtrain.hivemind_bridge.entries import keys_of, make_entry, read_entry
from swarmtrain.hivemind_bridge.messages import BridgeError, Frames, decode_to_child, decode_to_node, encode

_NOW_S = 1_800_000_000.0
_AUTHOR = Identity.from_seed(b"bridge fuzz author".ljust(32, b"."))
_RUN = RunPayload(b"r" * 32, "reading-group", b"c" * 32, b"m" * 32, (Address("192.0.2.1", 7766),))
_KEY = keys_of(_RUN)[0]


def _decode_messages(data: bytes) -> int:
    """The first byte says who listens (its lowest bit) and into what pieces the bytes are cut."""
    decode = decode_to_child if data and data[0] & 1 else decode_to_node
    size = (data[0] >> 1 if data else 0) or max(1, len(data))
    frames, count = Frames(), 0
    for start in range(1, len(data), size):
        for body in frames.feed(data[start : start + size]):
            decode(body)
            count += 1
    return count


def _message_seeds() -> dict[str, bytes]:
    to_child: list[messages.ToChild] = [
        messages.Open(("/ip4/192.0.2.1/tcp/31337/p2p/" + "Q" * 46,), "/run/sockets"),
        messages.Put(1, _KEY, _AUTHOR.peer_id, b"value", 1200.0),
        messages.Get(2, _KEY),
        messages.Probe(3),
    ]
    to_node: list[messages.ToNode] = [
        messages.Opened("12D3KooW"),
        messages.Stored(1, True),
        messages.Found(2, (b"one", b"two")),
        messages.Alive(3, 5),
        messages.Failed("p2pd ended with status -9"),
    ]
    return {
        "to-child": b"\x01" + b"".join(map(encode, to_child)),
        "to-node": b"\x0a" + b"".join(map(encode, to_node)),
    }


def _decode_entry(data: bytes) -> None:
    record, run = read_entry(data, _KEY, _NOW_S)
    assert record.key == _KEY
    assert run.run_id == _RUN.run_id


def _entry_seeds() -> dict[str, bytes]:
    return {"entry": make_entry(_AUTHOR, _KEY, _RUN, _NOW_S)}


TARGETS = [
    Target("hivemind-messages", _decode_messages, (BridgeError,), _message_seeds, lines_per_byte=100),
    Target("hivemind-entry", _decode_entry, (RecordInvalid,), _entry_seeds),
]
