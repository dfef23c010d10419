"""What node and trainer say to each other over their socket pair.  Arrays travel through `slabs`, never here.

Messages are MessagePack, each behind a 4-byte big-endian length.  The two ends belong to one user on one machine,
but a crash may cut a message in half, so lengths are capped and decoding is strict all the same.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Literal

import msgspec

MAX_MESSAGE_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")


class ControlError(Exception):
    """The other process sent something that is no control message, or is gone."""


class ControlMessage(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Each message is tagged with its class name."""


# ------------------------------------------------------------------------------------------------ node to trainer


class Start(ControlMessage):
    """First message: the whole job.  `weights` says where the replica starts."""

    manifest: bytes
    peer_id: bytes
    slabs_fd: int
    token_file: str
    token_dtype: str
    validation_file: str
    device: str
    threads: int
    checkpoint_directory: str
    checkpoint_interval_s: float
    weights: Literal["file", "slot", "checkpoint"]  # slot: PARTNER_SLOT holds a donor's snapshot
    weights_file: str = ""  # the genesis: FP32, little-endian, in the model's order
    step: int = 0
    shard: tuple[int, int] | None = None  # (index, count) where slices are assigned exactly


class CloseRound(ControlMessage):
    """Close the round at the next step boundary: a partner is waiting.  Answered by RoundClosed(requested=True)."""


class Release(ControlMessage):
    """An own slot is free again."""

    slot: int


class Mix(ControlMessage):
    """Mix with the partner's snapshot, matched against the own snapshot of the same exchange."""

    exchange: int
    own_slot: int
    partner_slot: int
    weight: float
    factors: dict[str, float]
    partner_step: int


class Abandon(ControlMessage):
    """The exchange that the last closed round was meant for will not happen."""


class Adopt(ControlMessage):
    """Catch up: replace the replica by the snapshot in `slot`, at the swarm's schedule `step`."""

    slot: int
    step: int


class Evaluate(ControlMessage):
    """After Finished: measure the snapshot in `slot` on the validation text.  Answered by Evaluated."""

    slot: int


class SaveCheckpoint(ControlMessage):
    """Write a checkpoint at the next step boundary."""


class Stop(ControlMessage):
    """Finish the step, write a checkpoint, leave."""


ToTrainer = Start | CloseRound | Release | Mix | Abandon | Adopt | Evaluate | SaveCheckpoint | Stop


# ------------------------------------------------------------------------------------------------ trainer to node


class Ready(ControlMessage):
    """The replica is loaded and training starts."""

    step: int
    device: str
    validation_loss: float
    resumed_from: str = ""


class RoundClosed(ControlMessage):
    """A round ended; `slot` (now the node's) holds its snapshot.

    `tokens` and `steps` count since the last exchange; `round_steps` is the length of this round.
    """

    slot: int
    round: int
    step: int
    round_steps: int
    tokens: int
    steps: int
    drift_norms: dict[str, float]
    requested: bool


class Mixed(ControlMessage):
    """A Mix was applied; both of its slots are the node's again."""

    exchange: int
    step: int


class Adopted(ControlMessage):
    """An Adopt was applied; its slot is the node's again."""

    step: int


class Progress(ControlMessage):
    """Where training stands.  `train_s` and `exchange_s` are totals of the time spent on either."""

    step: int
    loss: float
    tokens_total: int
    tokens_per_s: float
    train_s: float
    exchange_s: float


class Evaluated(ControlMessage):
    """Loss on the run's validation text, nats per token."""

    step: int
    validation_loss: float


class Saved(ControlMessage):
    """A checkpoint is complete on disk."""

    step: int
    path: str


class Finished(ControlMessage):
    """The schedule is at its end; `slot` holds the final snapshot.  The trainer evaluates on request until Stop."""

    slot: int
    step: int
    tokens_total: int
    validation_loss: float


class Stopped(ControlMessage):
    """The trainer obeyed Stop and exits."""

    step: int


class Failed(ControlMessage):
    """The trainer cannot go on; one line for the user."""

    reason: str


ToNode = Ready | RoundClosed | Mixed | Adopted | Progress | Evaluated | Saved | Finished | Stopped | Failed

_encoder = msgspec.msgpack.Encoder()
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)
_to_node = msgspec.msgpack.Decoder(ToNode)


def encode(message: ControlMessage) -> bytes:
    """Returns one message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Sans-I/O: bytes in, message bodies out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields every body that is now complete.  Raises ControlError on an absurd length."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ControlError(f"control message of {length} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield body


def decode_to_node(body: bytes) -> ToNode:
    """Decodes what a trainer says.  Raises ControlError."""
    try:
        return _to_node.decode(body)
    except msgspec.MsgspecError as error:
        raise ControlError(f"trainer sent an invalid control message: {error}") from error


def decode_to_trainer(body: bytes) -> ToTrainer:
    """Decodes what a node says.  Raises ControlError."""
    try:
        return _to_trainer.decode(body)
    except msgspec.MsgspecError as error:
        raise ControlError(f"node sent an invalid control message: {error}") from error


class TrainerControl:
    """The trainer's blocking end.  It never waits for the node: `poll` returns at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = MessageReader()
        self._pending: list[ToTrainer] = []
        self._sending = threading.Lock()  # the checkpoint thread reports too

    def wait(self, timeout_s: float | None = None) -> ToTrainer | None:
        """Waits for one message; returns None when the time is over.  Raises ControlError when the node is gone."""
        if not self._pending:
            self._receive(timeout_s)
        return self._pending.pop(0) if self._pending else None

    def poll(self) -> list[ToTrainer]:
        """Returns what has arrived, without waiting.  Raises ControlError when the node is gone."""
        self._receive(0)
        messages, self._pending = self._pending, []
        return messages

    def send(self, message: ControlMessage) -> None:
        """Sends one message.  Raises ControlError when the node is gone."""
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except OSError as error:
            raise ControlError("the node process is gone") from error

    def _receive(self, timeout_s: float | None) -> None:
        try:
            while select.select([self._socket], [], [], timeout_s)[0]:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise ControlError("the node process is gone")
                self._pending += map(decode_to_trainer, self._reader.feed(data))
                timeout_s = 0
        except OSError as error:
            raise ControlError(f"the control channel broke: {error}") from error
