"""Our entries in a foreign DHT: one signed record per author and key that says "I am in this run, and here I am".

Pure. The foreign DHT checks nothing, so an entry is believed only as far as its author's signature reaches: key, run
and addresses are signed together, and the sequence number is the second of signing, which bounds its life without
asking the DHT. That needs clocks that agree within minutes; hivemind itself wants three seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec
from swarm_peer.errors import RecordInvalid
from swarm_peer.identity import Identity
from swarm_peer.records import RunPayload, SignedRecord, decode_run, encode_payload, make_record

from swarmtrain.hivemind_bridge.messages import MAX_VALUE_BYTES
from swarmtrain.naming import RunReference, fingerprint

ENTRY_LIFE_S: Final = 1200
CLOCK_SLACK_S: Final = 120.0

_decoder = msgspec.msgpack.Decoder(SignedRecord)


def run_id_key(run_id: bytes) -> bytes:
    """The 32-byte key of one run."""
    return hashlib.sha256(b"swarmtrain-hivemind-run-id\0" + run_id).digest()


def name_key(name: str, mark: str | None) -> bytes:
    """The key of the runs called `name`, or of those whose creator's fingerprint is `mark` too."""
    label = name if mark is None else f"{name}@{mark}"
    return hashlib.sha256(b"swarmtrain-hivemind-name\0" + label.encode()).digest()


def keys_of(run: RunPayload) -> tuple[bytes, bytes, bytes]:
    """All keys under which an entry of this run belongs."""
    return run_id_key(run.run_id), name_key(run.name, fingerprint(run.creator)), name_key(run.name, None)


def key_for(reference: RunReference) -> bytes:
    """The key to look under: the narrowest that the reference allows."""
    if reference.run_id is not None:
        return run_id_key(reference.run_id)
    return name_key(reference.name or "", reference.fingerprint)


def make_entry(identity: Identity, key: bytes, run: RunPayload, now_s: float) -> bytes:
    """Signs an entry at `now_s`, seconds since 1970. Raises RecordInvalid if the payload does not fit."""
    record = make_record(identity, "run", key, int(now_s), ENTRY_LIFE_S, encode_payload(run))
    return msgspec.msgpack.encode(record)


def read_entry(value: bytes, key: bytes, now_s: float) -> tuple[SignedRecord, RunPayload]:
    """Verifies what was found under `key`. Raises RecordInvalid, whatever the bytes are."""
    if len(value) > MAX_VALUE_BYTES:
        raise RecordInvalid("oversized-entry")
    try:
        record = _decoder.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RecordInvalid("bad-entry") from None
    if record.key != key:
        raise RecordInvalid("wrong-key")
    if not now_s - record.ttl_s - CLOCK_SLACK_S <= record.seq <= now_s + CLOCK_SLACK_S:
        raise RecordInvalid("out-of-time")
    run = decode_run(record)
    if key not in keys_of(run):
        raise RecordInvalid("wrong-key")
    record.verify()
    return record, run


def newest_entries(
    values: Iterable[bytes], key: bytes, now_s: float
) -> tuple[list[tuple[SignedRecord, RunPayload]], int]:
    """The newest valid entry of each author, and how many were not valid."""
    newest: dict[bytes, tuple[SignedRecord, RunPayload]] = {}
    invalid = 0
    for value in values:
        try:
            record, run = read_entry(value, key, now_s)
        except RecordInvalid:
            invalid += 1
            continue
        held = newest.get(record.author())
        if held is None or record.seq > held[0].seq:
            newest[record.author()] = record, run
    return list(newest.values()), invalid
