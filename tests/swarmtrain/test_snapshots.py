"""Snapshots as payloads: the form chosen, the round trip, and every way in which a stranger's bytes can be wrong."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from swarm_compression import encode_dense, encode_patch

from swarmtrain.layout import FlatLayout, fp32_to_bf16
from swarmtrain.snapshots import (
    MAX_HAVES,
    Payload,
    PayloadInvalid,
    Snapshot,
    SnapshotLibrary,
    all_finite,
    decode_payload,
    encode_payload,
    hash_bits,
    max_payload_bytes,
    take_snapshot,
)

LAYOUT = FlatLayout.of(
    [("model.embed_tokens.weight", (60, 32)), ("model.layers.0.mlp.up.weight", (33, 32)), ("model.norm.weight", (32,))]
)
OTHER = FlatLayout.of([("model.embed_tokens.weight", (60, 32)), ("model.norm.weight", (34, 32))])


def replica(seed: int, layout: FlatLayout = LAYOUT) -> Snapshot:
    values = np.random.default_rng(seed).standard_normal(layout.size).astype(np.float32) * np.float32(0.02)
    return take_snapshot(layout, fp32_to_bf16(values))


def near(base: Snapshot, changes: int, seed: int = 0) -> Snapshot:
    bits = base.bits.copy()
    numbers = np.random.default_rng(seed)
    bits[numbers.choice(bits.size, changes, replace=False)] ^= 1
    return take_snapshot(LAYOUT, bits)


def payload_of(snapshot: Snapshot, bases: list[Snapshot]) -> tuple[Payload, bytes]:
    encoded = encode_payload(LAYOUT, snapshot, bases)
    return Payload(snapshot.hash, encoded.base, bytes(32), len(encoded.data)), encoded.data


def reason_of(payload: Payload, data: bytes, base: Snapshot | None = None) -> str:
    with pytest.raises(PayloadInvalid) as caught:
        decode_payload(LAYOUT, payload, data, base)
    return caught.value.reason


# ---------------------------------------------------------------------------------------------------------- round trip

finite_bits = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.lists(finite_bits, min_size=24, max_size=24),
    base_bits=st.lists(st.integers(0, 0xFFFF), min_size=24, max_size=24),
    with_base=st.booleans(),
)
def test_any_finite_snapshot_survives(bits: list[int], base_bits: list[int], with_base: bool) -> None:
    layout = FlatLayout.of([("b", (2, 5)), ("a", (1, 7, 2))])
    snapshot = take_snapshot(layout, np.array(bits, np.uint16))
    base = take_snapshot(layout, np.array(base_bits, np.uint16))
    encoded = encode_payload(layout, snapshot, [base] if with_base else [])
    payload = Payload(snapshot.hash, encoded.base, bytes(32), len(encoded.data))
    decoded = decode_payload(layout, payload, encoded.data, base if encoded.base else None)
    np.testing.assert_array_equal(decoded.bits, snapshot.bits)
    assert decoded.hash == snapshot.hash
    assert not decoded.bits.flags.writeable
    assert len(encoded.data) <= max_payload_bytes(layout)


def test_a_near_base_gives_a_small_patch() -> None:
    base = replica(1)
    payload, data = payload_of(near(base, 10), [base])
    assert payload.base == base.hash
    assert len(data) < LAYOUT.size / 4
    decoded = decode_payload(LAYOUT, payload, data, base)
    assert decoded.hash == near(base, 10).hash


def test_the_nearest_of_several_bases_is_taken() -> None:
    snapshot = replica(1)
    bases = [near(snapshot, 900, 3), near(snapshot, 5, 4), near(snapshot, 200, 5), replica(9)]
    payload, _ = payload_of(snapshot, bases)
    assert payload.base == bases[1].hash


def test_an_unrelated_base_is_not_used() -> None:
    payload, data = payload_of(replica(1), [replica(2)])
    assert payload.base == b""
    assert decode_payload(LAYOUT, payload, data, None).hash == replica(1).hash


def test_the_same_snapshot_as_base_costs_almost_nothing() -> None:
    payload, data = payload_of(replica(1), [replica(1)])
    assert len(data) < 600
    assert decode_payload(LAYOUT, payload, data, replica(1)).hash == replica(1).hash


@settings(max_examples=20, deadline=None)
@given(changes=st.integers(0, LAYOUT.size), seed=st.integers(0, 2**32 - 1))
def test_whatever_is_chosen_is_about_the_smallest(changes: int, seed: int) -> None:
    base = replica(1)
    snapshot = near(base, changes, seed)
    _, data = payload_of(snapshot, [base])
    dense = len(encode_dense(LAYOUT.views(snapshot.bits)))
    patch = len(encode_patch(LAYOUT.views(snapshot.bits), LAYOUT.views(base.bits)))
    assert len(data) <= 1.15 * min(dense, patch) + 64


# ---------------------------------------------------------------------------------------------------- hostile payloads


def test_truncated_payloads_are_malformed() -> None:
    base = replica(1)
    for bases in ([], [base]):
        payload, data = payload_of(near(base, 50), bases)
        for end in range(0, len(data) - 1, max(1, len(data) // 40)):
            assert reason_of(payload, data[:end], base if bases else None) == "malformed-payload"
        assert reason_of(payload, data + b"\0", base if bases else None) == "malformed-payload"


def test_another_snapshot_than_the_promised_one_is_refused() -> None:
    payload, _ = payload_of(replica(1), [])
    _, data = payload_of(replica(2), [])
    assert reason_of(payload, data) == "wrong-snapshot-hash"


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
@pytest.mark.parametrize("at", [0, LAYOUT.size - 1])
def test_values_that_are_not_finite_are_refused(value: int, at: int) -> None:
    base = replica(1)
    bits = base.bits.copy()
    bits[at] = value
    bad = take_snapshot(LAYOUT, bits)
    assert not all_finite(bits)
    for bases in ([], [base]):
        payload, data = payload_of(bad, bases)
        assert reason_of(payload, data, base if payload.base else None) == "not-finite"


def test_oversized_data_is_refused_before_it_is_read() -> None:
    payload, data = payload_of(replica(1), [])
    assert reason_of(payload, data + bytes(max_payload_bytes(LAYOUT))) == "oversized-payload"


def test_another_models_layout_is_refused() -> None:
    assert LAYOUT.size == OTHER.size
    snapshot = replica(1, OTHER)
    encoded = encode_payload(OTHER, snapshot, [])
    assert reason_of(Payload(snapshot.hash, b"", bytes(32), len(encoded.data)), encoded.data) == "wrong-layout"
    base = replica(2, OTHER)
    patch = encode_patch(OTHER.views(snapshot.bits), OTHER.views(base.bits))
    ours = replica(3)
    assert reason_of(Payload(snapshot.hash, ours.hash, bytes(32), len(patch)), patch, ours) in (
        "wrong-layout",
        "wrong-base",
    )


def test_the_base_must_be_the_one_that_was_named() -> None:
    base, other = replica(1), near(replica(1), 3, 7)
    payload, data = payload_of(near(base, 10), [base])
    assert reason_of(payload, data, None) == "unknown-base"
    assert reason_of(payload, data, other) == "unknown-base"
    lying = msgspec.structs.replace(payload, base=other.hash)
    assert reason_of(lying, data, other) == "wrong-base"


def test_a_patch_is_no_dense_snapshot_and_the_other_way_round() -> None:
    base = replica(1)
    patch, patch_data = payload_of(near(base, 10), [base])
    dense, dense_data = payload_of(near(base, 10), [])
    assert reason_of(msgspec.structs.replace(patch, base=b""), patch_data) == "malformed-payload"
    assert reason_of(msgspec.structs.replace(dense, base=base.hash), dense_data, base) == "malformed-payload"


def test_nothing_else_escapes_for_two_thousand_mutations() -> None:
    numbers = random.Random(2026)
    base = replica(1)
    originals = [payload_of(near(base, 80), [base]), payload_of(near(base, 80), []), payload_of(base, [base])]
    refused = 0
    for index in range(2000):
        payload, data = originals[index % len(originals)]
        mutated = bytearray(data)
        for _ in range(numbers.choice([1, 1, 2, 8])):
            at = numbers.randrange(len(mutated))
            match numbers.randrange(5):
                case 0:
                    mutated[at] ^= 1 << numbers.randrange(8)
                case 1:
                    mutated[at] = numbers.choice([0, 1, 0x7F, 0x80, 0xFF])
                case 2:
                    del mutated[at : at + numbers.randrange(1, 20)]
                    mutated = mutated or bytearray(1)
                case 3:
                    mutated[at:at] = numbers.randbytes(numbers.randrange(1, 20))
                case _:
                    mutated[at : at + 8] = b"\xff" * 8
        if bytes(mutated) == data:
            continue
        try:
            decoded = decode_payload(LAYOUT, payload, bytes(mutated), base if payload.base else None)
        except PayloadInvalid:
            refused += 1
        else:  # bits that mean nothing to the decoder: the result is what was promised
            assert decoded.hash == payload.snapshot == hash_bits(LAYOUT, decoded.bits)
    assert refused > 1800


def test_a_payloads_fields_are_bounded_on_the_wire() -> None:
    good = Payload(bytes(32), b"", bytes(32), 5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Payload) == good
    for changes in ({"snapshot": b"x"}, {"blob": bytes(33)}, {"base": bytes(33)}, {"size_bytes": -1}):
        bad = msgspec.msgpack.encode(msgspec.structs.replace(good, **changes))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(bad, type=Payload)


# -------------------------------------------------------------------------------------------------------------- library


def test_a_snapshot_is_a_copy_that_nobody_can_change() -> None:
    bits: NDArray[np.uint16] = np.zeros(LAYOUT.size, np.uint16)
    snapshot = take_snapshot(LAYOUT, bits)
    bits[0] = 1
    assert snapshot.bits[0] == 0
    assert snapshot.hash == hash_bits(LAYOUT, snapshot.bits) != hash_bits(LAYOUT, bits)
    with pytest.raises(ValueError, match="read-only"):
        snapshot.bits[0] = 1


def test_the_library_keeps_the_newest_and_what_is_permanent() -> None:
    library = SnapshotLibrary(LAYOUT, capacity=2)
    genesis, *others = (replica(seed) for seed in range(5))
    library.add(genesis, permanent=True)
    for snapshot in others:
        library.add(snapshot)
    assert library.names() == (others[3].hash, others[2].hash, genesis.hash)
    library.add(others[2])
    library.add(others[0])
    assert library.names() == (others[0].hash, others[2].hash, genesis.hash)
    assert library.get(others[3].hash) is None
    assert [snapshot.hash for snapshot in library.common([bytes(32), genesis.hash, others[0].hash])] == [
        genesis.hash,
        others[0].hash,
    ]


def test_a_have_list_is_bounded() -> None:
    library = SnapshotLibrary(LAYOUT, capacity=MAX_HAVES + 5)
    for seed in range(MAX_HAVES + 3):
        library.add(replica(seed))
    assert len(library.names()) == MAX_HAVES
