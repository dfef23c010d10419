"""Targets: what a training peer reads from partners, from its trainer, and from files and links that people send."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from swarm_compression import Layout, TensorSpec
from swarm_peer.errors import ProtocolError
from swarm_peer.identity import Identity
from swarm_peer.rpc import Method

from fuzz.admission import ticket
from fuzz.connection import CONTACT, RUN_ID, both_ways, decode_message, encode_messages
from fuzz.target import Target
from swarmtrain import control
from swarmtrain.donor import GET_SNAPSHOT, SnapshotReply, SnapshotRequest
from swarmtrain.errors import InviteError, UserError
from swarmtrain.exchange_messages import (
    APPLY,
    CANCEL,
    COMMIT,
    OPEN,
    ApplyRequest,
    CancelRequest,
    CommitRequest,
    Done,
    Offer,
    OpenReply,
    OpenRequest,
)
from swarmtrain.invite import Invite, parse_entry_point, parse_invite
from swarmtrain.manifest import (
    DataSection,
    GenesisSection,
    Manifest,
    MixerSection,
    ModelSection,
    OptimizerSection,
    RoundSection,
    SignedManifest,
    TokenizerSection,
    ValidationSection,
    WeightsSection,
    sign_manifest,
)
from swarmtrain.naming import fingerprint
from swarmtrain.run_package import decode_manifest_file
from swarmtrain.snapshots import Payload
from swarmtrain.status import FinalReplica, Status, decode_status, estimate_step
from swarmtrain.tensor_file import RawTensor, TensorEntry, TensorFileError, encode_tensors, parse_header

CREATOR = Identity.from_seed(bytes(range(32)))
_HASH = "ab" * 32


# ---------------------------------------------------------------------------------------------------------- partners


@cache
def _exchange_methods() -> list[tuple[Method[Any, Any], bool]]:
    return both_ways([OPEN, COMMIT, APPLY, CANCEL, GET_SNAPSHOT])


def _exchange_seeds() -> dict[str, bytes]:
    offer = Offer(RUN_ID, RUN_ID, 400, 20, 81920, 20, (RUN_ID, bytes(32)))
    payload = Payload(RUN_ID, b"", bytes(32), 12345)
    values: list[object] = [
        OpenRequest(bytes(16), offer),
        OpenReply(offer, payload),
        CommitRequest(bytes(16), payload),
        ApplyRequest(bytes(16)),
        CancelRequest(bytes(16), "partner-stale"),
        Done(),
        SnapshotRequest(RUN_ID, (RUN_ID,)),
        SnapshotReply(payload, 400, 81920),
    ]
    return encode_messages(_exchange_methods(), values)


def _decode_status(data: bytes) -> Status:
    status = decode_status(data)
    assert 0 <= estimate_step(status, 5.0, 1024) <= 2**60
    assert not math.isinf(status.loss)
    return status


def _status_seeds() -> dict[str, bytes]:
    final = FinalReplica(RUN_ID, RUN_ID, 1000, 2000)
    return {
        "training": Status(step=40, total_steps=400, loss=2.5, tokens_per_s=900.0, last_partner=b"abcd").encode(),
        "finished": Status(step=400, total_steps=400, validation_loss=2.25, final=final, merged=True).encode(),
    }


# ----------------------------------------------------------------------------------------------------------- trainer


def _decode_control(data: bytes) -> int:
    """The first byte says who listens (its lowest bit) and into what pieces the bytes are cut."""
    decode = control.decode_to_trainer if data and data[0] & 1 else control.decode_to_node
    size = (data[0] >> 1 if data else 0) or max(1, len(data))
    reader, count = control.MessageReader(), 0
    for start in range(1, len(data), size):
        for body in reader.feed(data[start : start + size]):
            decode(body)
            count += 1
    return count


def _control_seeds() -> dict[str, bytes]:
    to_trainer = [
        control.Start(b"{}", RUN_ID, 3, "t", "u8", "v", "cpu", 1, "c", 60.0, "file", shard=(0, 2)),
        control.CloseRound(),
        control.Mix(1, 0, 1, 0.5, {"embed": 1.0, "norm": 0.5}, 40),
        control.Adopt(0, 40),
        control.Stop(),
    ]
    to_node = [
        control.Ready(0, "cpu", 5.5),
        control.RoundClosed(0, 1, 20, 20, 81920, 20, {"embed": 0.25}, False),
        control.Progress(20, 3.5, 81920, 900.0, 60.0, 1.0),
        control.Failed("no memory"),
    ]
    return {
        "to-trainer": b"\x01" + b"".join(map(control.encode, to_trainer)),
        "to-node": b"\x0a" + b"".join(map(control.encode, to_node)),
    }


# --------------------------------------------------------------------------------------------------- files and links


def _manifest_seeds() -> dict[str, bytes]:
    sections: dict[str, Any] = {
        "name": "reading-group",
        "creator": CREATOR.public_key.hex(),
        "created_by": "swarmtrain 0.1.0",
        "model": ModelSection(),
        "tokenizer": TokenizerSection(),
        "data": DataSection(),
        "validation": ValidationSection(blob=_HASH, size_bytes=1000),
        "optimizer": OptimizerSection(),
        "round": RoundSection(inner_steps=20),
        "mixer": MixerSection(),
        "genesis": GenesisSection(seed=7),
    }
    weights = GenesisSection(weights=WeightsSection(blob=_HASH, size_bytes=1 << 20, digest=_HASH))
    noloco = MixerSection(kind="noloco", gamma=0.7)
    named = DataSection(kind="named", content_hash=_HASH)
    other = sections | {"genesis": weights, "mixer": noloco, "data": named, "round": RoundSection(seconds=30.0)}
    return {
        "seed": sign_manifest(Manifest(**sections), CREATOR).encode(),
        "weights": sign_manifest(Manifest(**other), CREATOR).encode(),
    }


def expect_one_line(error: UserError) -> None:
    """A message may quote what a stranger wrote, but it must not reach the terminal as it is."""
    assert error.message.isprintable(), error.message


def _decode_run_file(data: bytes) -> SignedManifest:
    """The manifest of a run, as it comes in a file or as a blob."""
    try:
        signed = decode_manifest_file(Path("shared.run"), data)
    except UserError as error:
        expect_one_line(error)
        raise
    assert signed.encode() == data, "a manifest has one encoding"
    return signed


def _decode_invite(data: bytes) -> Invite:
    """As the command line gives it: bytes that are no UTF-8 arrive as lone surrogates."""
    try:
        invite = parse_invite(data.decode("utf-8", "surrogateescape"))
    except InviteError as error:
        expect_one_line(error)
        raise
    assert parse_invite(str(invite)) == invite
    return invite


def _invite_seeds() -> dict[str, bytes]:
    peers = [(CONTACT.peer_id if number else None, address) for number, address in enumerate(CONTACT.addresses)]
    entries = tuple(parse_entry_point(f"{peer.hex()}@{at}" if peer else str(at)) for peer, at in peers)
    mark = fingerprint(CREATOR.public_key)
    return {
        "peers": str(Invite("reading-group", mark, RUN_ID, entries)).encode(),
        "alone": str(Invite("reading-group", mark, RUN_ID)).encode(),
        "ticket": str(Invite("reading-group", mark, RUN_ID, entries[:1], ticket())).encode(),
    }


_DATA_BYTES = 152


def _decode_tensor_header(data: bytes) -> dict[str, TensorEntry]:
    """The header of a file with so many bytes of tensors, and the layout that commands make of it."""
    entries = parse_header(data, 8 + len(data) + _DATA_BYTES)
    raw = np.zeros(_DATA_BYTES, np.uint8)
    for spec in Layout(TensorSpec(name, entry.dtype.lower(), entry.shape) for name, entry in entries.items()):
        entry = entries[spec.name]
        start = 8 + len(data)
        raw[entry.start - start : entry.stop - start].view(spec.kind.bits_dtype).reshape(spec.shape)
    return entries


def _tensor_header_seeds() -> dict[str, bytes]:
    tensors = {
        "model.embed_tokens.weight": RawTensor("BF16", (6, 8), memoryview(bytes(96))),
        "norm": RawTensor("F32", (4,), memoryview(bytes(16))),
        "scale": RawTensor("F64", (), memoryview(bytes(8))),
        "ids": RawTensor("I64", (2, 2), memoryview(bytes(32))),
        "none": RawTensor("U8", (0, 7), memoryview(b"")),
    }
    head = next(iter(encode_tensors(tensors, {"format": "pt"})))
    return {"mixed": bytes(head[8:])}


TARGETS = [
    Target(
        "exchange-messages", lambda data: decode_message(_exchange_methods(), data), (ProtocolError,), _exchange_seeds
    ),
    Target("status", _decode_status, (), _status_seeds),
    Target("control", _decode_control, (control.ControlError,), _control_seeds, lines_per_byte=100),
    Target("run-file", _decode_run_file, (UserError,), _manifest_seeds),
    Target("invite", _decode_invite, (InviteError,), _invite_seeds, lines_per_byte=50),
    Target("tensor-header", _decode_tensor_header, (TensorFileError,), _tensor_header_seeds, lines_per_byte=100),
]
