"""Control messages: what is said arrives, however the bytes are cut; what is no message is a ControlError."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain import control
from swarmtrain.control import ControlError, ControlMessage, MessageReader, TrainerControl, decode_to_node, encode

START = control.Start(
    manifest=b"m",
    peer_id=bytes(32),
    slabs_fd=7,
    token_file="tokens",
    token_dtype="<u2",
    validation_file="validation.txt",
    device="cpu",
    threads=2,
    checkpoint_directory="checkpoints",
    checkpoint_interval_s=60.0,
    weights="slot",
    step=12,
    shard=(1, 4),
)
TO_TRAINER: list[ControlMessage] = [
    START,
    control.CloseRound(),
    control.Release(slot=2),
    control.Mix(exchange=1, own_slot=0, partner_slot=3, weight=0.5, factors={"mlp": 1.0}, partner_step=40),
    control.Abandon(),
    control.Adopt(slot=3, step=9),
    control.Evaluate(slot=3),
    control.SaveCheckpoint(),
    control.Stop(),
]
TO_NODE: list[ControlMessage] = [
    control.Ready(step=1, device="cpu", validation_loss=5.5),
    control.RoundClosed(
        slot=1, round=2, step=3, round_steps=4, tokens=5, steps=6, drift_norms={"mlp": 0.25, "ß": 1e-30}, requested=True
    ),
    control.Mixed(exchange=4, step=5),
    control.Adopted(step=6),
    control.Progress(step=1, loss=2.5, tokens_total=3, tokens_per_s=4.0, train_s=5.0, exchange_s=0.0),
    control.Evaluated(step=7, validation_loss=math.inf),
    control.Saved(step=8, path="/a/b"),
    control.Finished(slot=0, step=9, tokens_total=10, validation_loss=1.5),
    control.Stopped(step=11),
    control.Failed(reason="out of memory"),
]


def connected() -> tuple[socket.socket, TrainerControl]:
    ours, theirs = socket.socketpair()
    return ours, TrainerControl(theirs)


def test_every_kind_of_message_is_covered_here() -> None:
    assert {type(message) for message in TO_TRAINER} == set(get_args(control.ToTrainer))
    assert {type(message) for message in TO_NODE} == set(get_args(control.ToNode))


def test_what_the_trainer_says_arrives() -> None:
    for message in TO_NODE:
        (body,) = MessageReader().feed(encode(message))
        assert decode_to_node(body) == message
    not_known = control.Ready(step=0, device="cpu", validation_loss=math.nan)
    (body,) = MessageReader().feed(encode(not_known))
    ready = decode_to_node(body)
    assert isinstance(ready, control.Ready)
    assert math.isnan(ready.validation_loss)


def test_what_the_node_says_arrives() -> None:
    ours, channel = connected()
    with ours, channel._socket:
        ours.sendall(b"".join(map(encode, TO_TRAINER)))
        assert channel.wait() == TO_TRAINER[0]
        assert channel.poll() == TO_TRAINER[1:]
        assert channel.poll() == []
        assert channel.wait(timeout_s=0.0) is None


def test_messages_survive_every_cut() -> None:
    stream = b"".join(map(encode, TO_NODE[:4]))
    for cut in range(len(stream) + 1):
        reader = MessageReader()
        bodies = [*reader.feed(stream[:cut]), *reader.feed(stream[cut:])]
        assert [decode_to_node(body) for body in bodies] == TO_NODE[:4]
    reader = MessageReader()
    bodies = [body for at in range(len(stream)) for body in reader.feed(stream[at : at + 1])]
    assert [decode_to_node(body) for body in bodies] == TO_NODE[:4]


def test_half_a_message_waits_for_its_rest() -> None:
    ours, channel = connected()
    data = encode(control.Stop())
    with ours, channel._socket:
        ours.sendall(data[:3])
        assert channel.poll() == []
        ours.sendall(data[3:-1])
        assert channel.wait(timeout_s=0.0) is None
        ours.sendall(data[-1:])
        assert channel.wait(timeout_s=5.0) == control.Stop()


@pytest.mark.parametrize("length", [control.MAX_MESSAGE_BYTES + 1, 2**31, 2**32 - 1])
def test_an_absurd_length_is_refused_at_once(length: int) -> None:
    with pytest.raises(ControlError, match="at most"):
        list(MessageReader().feed(struct.pack("!I", length)))
    ours, channel = connected()
    with ours, channel._socket:
        ours.sendall(struct.pack("!I", length))
        with pytest.raises(ControlError):
            channel.poll()


def test_the_largest_length_is_allowed() -> None:
    body = bytes(control.MAX_MESSAGE_BYTES)
    assert list(MessageReader().feed(struct.pack("!I", len(body)) + body)) == [body]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_control_error_on_either_side(garbage: bytes) -> None:
    reader = MessageReader()
    with contextlib.suppress(ControlError):
        for body in reader.feed(garbage):
            decode_to_node(body)
    ours, channel = connected()
    with ours, channel._socket:
        ours.sendall(garbage)
        with contextlib.suppress(ControlError):
            assert all(isinstance(message, ControlMessage) for message in channel.poll())


def test_mutated_messages_are_messages_or_control_errors() -> None:
    numbers = random.Random(7)
    for _ in range(3000):
        body = bytearray(encode(numbers.choice(TO_NODE))[4:])
        for _ in range(numbers.choice([1, 2, 5])):
            body[numbers.randrange(len(body))] = numbers.randrange(256)
        with contextlib.suppress(ControlError):
            assert isinstance(decode_to_node(bytes(body)), ControlMessage)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "Stopped"},
        {"type": "Stopped", "step": "1"},
        {"type": "Stopped", "step": 1, "more": 2},
        {"type": "Stop"},
        {"type": "Nonsense", "step": 1},
        {"step": 1},
        [],
        None,
    ],
)
def test_decoding_is_strict(fields: Any) -> None:
    with pytest.raises(ControlError):
        decode_to_node(msgspec.msgpack.encode(fields))


def test_deep_nesting_is_a_control_error() -> None:
    with pytest.raises(ControlError):
        decode_to_node(b"\x91" * 100_000)
    ours, channel = connected()
    with ours, channel._socket:
        deep = b"\x91" * 100_000
        ours.settimeout(5.0)
        ours.sendall(struct.pack("!I", len(deep)) + deep)
        with pytest.raises(ControlError):
            channel.wait(timeout_s=5.0)


def test_a_dead_node_is_a_control_error_in_every_call() -> None:
    ours, channel = connected()
    with channel._socket:
        ours.sendall(encode(control.Stop())[:-1])
        ours.close()
        with pytest.raises(ControlError, match="gone"):
            channel.wait()
        with pytest.raises(ControlError, match="gone"):
            channel.poll()
        with pytest.raises(ControlError, match="gone"):
            channel.send(control.Stopped(step=1))


def test_the_trainers_words_arrive_at_the_other_end() -> None:
    ours, channel = connected()
    with ours, channel._socket:
        for message in TO_NODE:
            channel.send(message)
        bodies = list(MessageReader().feed(ours.recv(1 << 16)))
        assert [decode_to_node(body) for body in bodies] == TO_NODE
