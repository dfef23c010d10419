"""Signed records: what a peer says about itself or about a run, in at most a kilobyte.

A record is kept and forwarded as its author wrote it: the signature covers a fixed byte layout
(`signed_bytes`), and the payload stays an opaque byte string inside it. Versions are told apart by `seq`
alone, and lifetimes are relative: a record lives `ttl_s` seconds, of which a forwarder states how many have
already passed (`AgedRecord`). No rule here looks at a wall clock, so peers with wrong clocks take part like
any other.

Which of two records of one author holds is decided by `supersedes`; what to do with the outcome belongs to
the holders (`storage.py` for the DHT, `members.py` for gossip).
"""

from __future__ import annotations

import hashlib
import math
import struct
from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec

from swarm_peer.addresses import MAX_ADDRESSES, Address
from swarm_peer.errors import RecordInvalid
from swarm_peer.identity import Identity, PeerId, peer_id_of, verify_signature

KEY_BYTES: Final = 32
PAYLOAD_CAP_BYTES: Final = 1024
STATUS_CAP_BYTES: Final = 512
TTL_CAP_S: Final = 3600
AGE_CAP_MS: Final = TTL_CAP_S * 1000
SEQ_CAP: Final = 2**63 - 1
KINDS: Final = ("run", "peer")

SIGNATURE_DOMAIN: Final = "swarmtrain-record-v1"
_INDEX_KEY: Final = hashlib.sha256(b"swarmtrain-runs").digest()
# kind length and kind, key, public key, seq, ttl, payload length; then the payload itself.
_SIGNED_HEAD: Final = struct.Struct("!B8s32s32sQHH")

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Seq = Annotated[int, msgspec.Meta(ge=0, le=SEQ_CAP)]
AgeMs = Annotated[int, msgspec.Meta(ge=0, le=AGE_CAP_MS)]


class SignedRecord(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A statement of one author under one key. `seq` orders the author's statements, `ttl_s` bounds their
    life.
    """

    kind: Annotated[str, msgspec.Meta(max_length=8)]
    key: Key
    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    seq: Seq
    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=TTL_CAP_S)]
    payload: Annotated[bytes, msgspec.Meta(max_length=PAYLOAD_CAP_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    def author(self) -> PeerId:
        """The peer id of whoever signed this."""
        return peer_id_of(self.public_key)

    def signed_bytes(self) -> bytes:
        """The bytes that the signature covers. Raises `RecordInvalid` if a field is out of range."""
        kind = self.kind.encode("ascii", "replace")
        if self.kind not in KINDS:
            raise RecordInvalid("unknown-kind")
        if len(self.key) != KEY_BYTES or len(self.public_key) != 32:
            raise RecordInvalid("bad-key-length")
        if not 0 <= self.seq <= SEQ_CAP:
            raise RecordInvalid("seq-out-of-range")
        if not 1 <= self.ttl_s <= TTL_CAP_S:
            raise RecordInvalid("ttl-out-of-range")
        if len(self.payload) > PAYLOAD_CAP_BYTES:
            raise RecordInvalid("oversized-payload")
        names = (len(kind), kind, self.key, self.public_key)
        return _SIGNED_HEAD.pack(*names, self.seq, self.ttl_s, len(self.payload)) + self.payload

    def content_hash(self) -> bytes:
        """SHA-256 of the signed bytes: equal for equal statements, and the tie-break between unequal ones."""
        return hashlib.sha256(self.signed_bytes()).digest()

    def verify(self) -> None:
        """Checks field ranges and the signature. Raises `RecordInvalid`."""
        message = self.signed_bytes()
        if len(self.signature) != 64:
            raise RecordInvalid("bad-signature-length")
        if not verify_signature(self.public_key, SIGNATURE_DOMAIN, message, self.signature):
            raise RecordInvalid("bad-signature")


class AgedRecord(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A record as it travels: with its age in milliseconds, so that no copy outlives the original."""

    record: SignedRecord
    age_ms: AgeMs

    @property
    def age_s(self) -> float:
        return self.age_ms / 1000

    @property
    def remaining_s(self) -> float:
        """Seconds that the record has left to live; zero or less when it has expired."""
        return self.record.ttl_s - self.age_ms / 1000


class PeerState(StrEnum):
    """What a peer says it does. "lost" is not among them: that is what an observer concludes from silence."""

    TRAINING = "training"
    WATCHING = "watching"
    FINISHED = "finished"
    LEFT = "left"


class PeerPayload(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Payload of a "peer" record: where a peer of a run listens and what it does. `status` is opaque here."""

    run_id: Key
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    state: PeerState
    status: Annotated[bytes, msgspec.Meta(max_length=STATUS_CAP_BYTES)]


class RunPayload(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Payload of a "run" record: a run's name, its creator's key, the blob of its manifest, the announcer's
    addresses.
    """

    run_id: Key
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    creator: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    manifest_blob: Key
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


Payload = TypeVar("Payload", PeerPayload, RunPayload)


def run_key(name: str) -> bytes:
    """The DHT key under which runs called `name` are announced."""
    return hashlib.sha256(b"swarmtrain-run" + name.encode()).digest()


def index_key() -> bytes:
    """The DHT key under which all runs are announced."""
    return _INDEX_KEY


def peers_key(run_id: bytes, shard: int = 0) -> bytes:
    """The DHT key of the peers of a run. Large runs spread over several shards (0..255)."""
    return hashlib.sha256(b"swarmtrain-peers" + run_id + bytes([shard])).digest()


def members_key(run_id: bytes) -> bytes:
    """The key of records that travel by gossip.

    It differs from `peers_key` on purpose: a gossip record lives for seconds and a DHT record for many
    minutes, and neither may be replayed as the other.
    """
    return hashlib.sha256(b"swarmtrain-members" + run_id).digest()


def make_record(identity: Identity, kind: str, key: bytes, seq: int, ttl_s: int, payload: bytes) -> SignedRecord:
    """Signs a record. Raises `RecordInvalid` if a field is out of range."""
    unsigned = SignedRecord(kind, key, identity.public_key, seq, ttl_s, payload, bytes(64))
    signature = identity.sign(SIGNATURE_DOMAIN, unsigned.signed_bytes())
    return msgspec.structs.replace(unsigned, signature=signature)


def encode_payload(payload: Payload) -> bytes:
    """Encodes a payload, dropping the last addresses while it does not fit. Raises `RecordInvalid`."""
    fitting = payload
    while True:
        body = msgspec.msgpack.encode(fitting)
        if len(body) <= PAYLOAD_CAP_BYTES:
            break
        if len(fitting.addresses) <= 1:
            raise RecordInvalid("oversized-payload")
        fitting = msgspec.structs.replace(fitting, addresses=fitting.addresses[:-1])
    # Encoding checks no constraints; decoding does, so a payload that a stranger would refuse never leaves here.
    _decode(body, type(fitting))
    return body


def decode_peer(record: SignedRecord) -> PeerPayload:
    """Decodes the payload of a "peer" record. Raises `RecordInvalid`. The signature is the caller's business."""
    if record.kind != "peer":
        raise RecordInvalid("wrong-kind")
    return _decode(record.payload, PeerPayload)


def decode_run(record: SignedRecord) -> RunPayload:
    """Decodes the payload of a "run" record. Raises `RecordInvalid`. The signature is the caller's business."""
    if record.kind != "run":
        raise RecordInvalid("wrong-kind")
    return _decode(record.payload, RunPayload)


def _decode(body: bytes, payload_type: type[Payload]) -> Payload:
    try:
        payload = msgspec.msgpack.decode(body, type=payload_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordInvalid("bad-payload") from error
    if any(address.port == 0 for address in payload.addresses):
        raise RecordInvalid("bad-address")
    return payload


def slot_of(record: SignedRecord) -> bytes:
    """Which of its author's statements under one key this is; only those of one slot take each other's place.

    A peer says one thing about itself per key. Runs differ: the index has every run that an author announces, and
    a run's name has one run of each creator. Raises `RecordInvalid` for a "run" record with a payload of another
    kind.
    """
    if record.kind != "run":
        return b""
    run = decode_run(record)
    return run.run_id if record.key == index_key() else run.creator


def supersedes(new: SignedRecord, held: SignedRecord) -> bool:
    """True if `new` takes the place of `held`; both are valid, of one author, under one key and in one slot.

    A higher `seq` wins. Two different statements with one `seq` mean that two processes sign with one key:
    then every holder must end up with the same one, whatever the order of arrival, so "left" goes before any
    other and else the smaller hash wins. Equal statements do not replace each other.
    """
    if new.seq != held.seq:
        return new.seq > held.seq
    new_hash, held_hash = new.content_hash(), held.content_hash()
    if new_hash == held_hash:
        return False
    new_left, held_left = says_left(new), says_left(held)
    if new_left != held_left:
        return new_left
    return new_hash < held_hash


def says_left(record: SignedRecord) -> bool:
    """True if this is a peer's goodbye."""
    try:
        return record.kind == "peer" and decode_peer(record).state is PeerState.LEFT
    except RecordInvalid:
        return False


def age_record(record: SignedRecord, age_s: float) -> AgedRecord:
    """Pairs a record with its age, rounded up so that rounding never makes it younger."""
    return AgedRecord(record, min(max(math.ceil(age_s * 1000), 0), AGE_CAP_MS))


def check_placement(record: SignedRecord) -> PeerPayload | RunPayload:
    """The decoded payload of a DHT record whose key is the one that its payload calls for.

    Raises `RecordInvalid`. Without this check anybody could fill any key with valid records.
    """
    if record.kind == "run":
        run = decode_run(record)
        if record.key not in (run_key(run.name), index_key()):
            raise RecordInvalid("wrong-key")
        return run
    peer = decode_peer(record)
    if record.key != peers_key(peer.run_id):
        raise RecordInvalid("wrong-key")
    return peer
