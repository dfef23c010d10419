"""Signed records: signatures, versions, ages, payloads."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_peer.addresses import Address
from swarm_peer.errors import RecordInvalid
from swarm_peer.identity import Identity
from swarm_peer.records import (
    AGE_CAP_MS,
    AgedRecord,
    PeerPayload,
    PeerState,
    RunPayload,
    SignedRecord,
    age_record,
    decode_peer,
    decode_run,
    encode_payload,
    index_key,
    make_record,
    members_key,
    peers_key,
    run_key,
    supersedes,
)

ALICE = Identity.from_seed(bytes(32))
BOB = Identity.from_seed(bytes([1]) * 32)
RUN = bytes(range(32))
KEY = peers_key(RUN)


def record(seq: int = 1, payload: bytes = b"hello", ttl_s: int = 60, identity: Identity = ALICE) -> SignedRecord:
    return make_record(identity, "peer", KEY, seq, ttl_s, payload)


def peer_payload(state: PeerState, status: bytes = b"", addresses: int = 1) -> bytes:
    where = tuple(Address(f"10.0.0.{n}", 4000) for n in range(addresses))
    return encode_payload(PeerPayload(RUN, where, state, status))


def test_a_made_record_verifies_and_names_its_author() -> None:
    made = record()
    made.verify()
    assert made.author() == ALICE.peer_id


def test_the_bytes_survive_the_wire_and_the_signature_still_holds() -> None:
    made = record(payload=bytes(range(256)))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(AgedRecord(made, 5)), type=AgedRecord)
    received.record.verify()
    assert received.record == made


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "run"},
        {"key": bytes(32)},
        {"public_key": BOB.public_key},
        {"seq": 2},
        {"ttl_s": 61},
        {"payload": b"hello!"},
        {"signature": bytes(64)},
    ],
)
def test_any_change_breaks_the_signature(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(record(), **change)
    with pytest.raises(RecordInvalid) as caught:
        changed.verify()
    assert caught.value.reason == "bad-signature"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("spam", KEY, 1, 60, b""), "unknown-kind"),
        (("peer", b"short", 1, 60, b""), "bad-key-length"),
        (("peer", KEY, -1, 60, b""), "seq-out-of-range"),
        (("peer", KEY, 2**63, 60, b""), "seq-out-of-range"),
        (("peer", KEY, 1, 0, b""), "ttl-out-of-range"),
        (("peer", KEY, 1, 3601, b""), "ttl-out-of-range"),
        (("peer", KEY, 1, 60, bytes(1025)), "oversized-payload"),
    ],
)
def test_fields_out_of_range_are_refused(arguments: tuple[str, bytes, int, int, bytes], reason: str) -> None:
    with pytest.raises(RecordInvalid) as caught:
        make_record(ALICE, *arguments)
    assert caught.value.reason == reason


@pytest.mark.parametrize("age_ms", [-1, AGE_CAP_MS + 1, 1.5, float("nan"), "1"])
def test_ages_out_of_range_do_not_decode(age_ms: object) -> None:
    body = msgspec.msgpack.encode([msgspec.to_builtins(record(), builtin_types=(bytes,)), age_ms])
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(body, type=AgedRecord)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_payloads_raise_only_record_invalid(payload: bytes) -> None:
    for kind, decode in (("peer", decode_peer), ("run", decode_run)):
        with pytest.raises(RecordInvalid):
            decode(make_record(ALICE, kind, KEY, 1, 60, payload))


def test_payloads_go_round() -> None:
    where = (Address("10.0.0.1", 4000), Address("2001:db8::1", 4001))
    peer = PeerPayload(RUN, where, PeerState.WATCHING, b"\x00\xff")
    assert decode_peer(make_record(ALICE, "peer", KEY, 1, 60, encode_payload(peer))) == peer
    run = RunPayload(RUN, "näme", BOB.public_key, bytes(32), where)
    assert decode_run(make_record(ALICE, "run", KEY, 1, 60, encode_payload(run))) == run


def test_the_kinds_do_not_decode_as_each_other() -> None:
    body = peer_payload(PeerState.TRAINING)
    with pytest.raises(RecordInvalid):
        decode_run(make_record(ALICE, "peer", KEY, 1, 60, body))
    with pytest.raises(RecordInvalid):
        decode_peer(make_record(ALICE, "run", KEY, 1, 60, body))


def test_a_payload_that_does_not_fit_loses_its_last_addresses() -> None:
    long_hosts = tuple(Address(f"h{n}." + "x" * 200, 4000) for n in range(8))
    body = encode_payload(PeerPayload(RUN, long_hosts, PeerState.TRAINING, bytes(512)))
    kept = decode_peer(make_record(ALICE, "peer", KEY, 1, 60, body)).addresses
    assert 1 <= len(kept) < 8
    assert kept == long_hosts[: len(kept)]


def test_a_status_or_name_beyond_its_cap_is_refused_before_it_is_sent() -> None:
    with pytest.raises(RecordInvalid):
        peer_payload(PeerState.TRAINING, status=bytes(513))
    with pytest.raises(RecordInvalid):
        encode_payload(RunPayload(RUN, "", BOB.public_key, bytes(32), ()))
    with pytest.raises(RecordInvalid):
        encode_payload(PeerPayload(RUN, (Address("10.0.0.1", 0),), PeerState.TRAINING, b""))


def test_a_higher_seq_supersedes_and_equal_statements_do_not() -> None:
    assert supersedes(record(2), record(1))
    assert not supersedes(record(1), record(2))
    assert not supersedes(record(1), record(1))


def test_of_two_statements_with_one_seq_all_keep_the_same() -> None:
    one, other = record(payload=b"one"), record(payload=b"other")
    assert supersedes(one, other) != supersedes(other, one)


def test_left_wins_over_another_statement_with_the_same_seq() -> None:
    left = record(payload=peer_payload(PeerState.LEFT))
    for n in range(4):
        training = record(payload=peer_payload(PeerState.TRAINING, status=bytes([n])))
        assert supersedes(left, training)
        assert not supersedes(training, left)


def test_ages_are_rounded_up_and_capped() -> None:
    assert age_record(record(), 0.0001).age_ms == 1
    assert age_record(record(), -1.0).age_ms == 0
    assert age_record(record(), 1e9).age_ms == AGE_CAP_MS


def test_keys_of_different_purposes_differ() -> None:
    keys = {run_key("a"), run_key("b"), index_key(), peers_key(RUN), peers_key(RUN, 1), members_key(RUN)}
    assert len(keys) == 6
