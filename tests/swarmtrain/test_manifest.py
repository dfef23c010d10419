"""The signed manifest: one encoding, every field checked, nothing believed without the signature."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_peer.identity import Identity

from swarmtrain.errors import ExitCode, Incompatible, ManifestError
from swarmtrain.manifest import (
    MAX_MANIFEST_BYTES,
    PROTOCOL_VERSION,
    SIGNATURE_DOMAIN,
    AdmissionSection,
    DataSection,
    GenesisSection,
    Manifest,
    MixerSection,
    ModelSection,
    OptimizerSection,
    RoundSection,
    TokenizerSection,
    ValidationSection,
    WeightsSection,
    decode_manifest,
    differences,
    require_equal,
    sign_manifest,
)
from swarmtrain.naming import fingerprint, parse_run_reference

CREATOR = Identity.from_seed(bytes(range(32)))
HASH = "ab" * 32


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "name": "reading-group",
        "creator": CREATOR.public_key.hex(),
        "created_by": "swarmtrain test",
        "model": ModelSection(),
        "tokenizer": TokenizerSection(),
        "data": DataSection(),
        "validation": ValidationSection(blob=HASH, size_bytes=1000),
        "optimizer": OptimizerSection(),
        "round": RoundSection(inner_steps=20),
        "mixer": MixerSection(),
        "genesis": GenesisSection(seed=7),
    }
    return Manifest(**(fields | changes))


def signed_json(body: dict[str, Any]) -> bytes:
    """What an honest signer of an arbitrary document would send."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    signature = CREATOR.sign(SIGNATURE_DOMAIN, text).hex().encode()
    return b'{"manifest":' + text + b',"signature":"' + signature + b'"}'


def body_of(encoded: bytes) -> dict[str, Any]:
    body = json.loads(encoded)["manifest"]
    assert isinstance(body, dict)
    return body


def test_round_trip_and_names() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    read = decode_manifest(signed.encode())
    assert read == signed
    assert read.run_id == signed.run_id
    assert len(read.run_id) == 32
    assert read.creator == CREATOR.public_key
    assert read.label == f"reading-group@{fingerprint(CREATOR.public_key)}"


def test_the_encoding_is_canonical_json() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    again = json.dumps(json.loads(signed.signed_bytes), sort_keys=True, separators=(",", ":"))
    assert json.loads(again) == json.loads(signed.signed_bytes)
    assert list(json.loads(signed.signed_bytes)) == sorted(json.loads(signed.signed_bytes))
    assert b" " not in signed.signed_bytes.replace(b"swarmtrain test", b"")


def test_equal_manifests_have_one_run_id_and_a_changed_field_another() -> None:
    assert sign_manifest(manifest(), CREATOR).run_id == sign_manifest(manifest(), CREATOR).run_id
    changed = manifest(optimizer=OptimizerSection(learning_rate=2e-3))
    assert sign_manifest(changed, CREATOR).run_id != sign_manifest(manifest(), CREATOR).run_id


@given(st.floats(1e-12, 10.0), st.floats(0.0, 1.0, exclude_max=True), st.floats(0.1, 86400.0))
@settings(max_examples=50, deadline=None)
def test_floats_survive_exactly(learning_rate: float, alpha: float, seconds: float) -> None:
    given_manifest = manifest(
        optimizer=OptimizerSection(learning_rate=learning_rate),
        mixer=MixerSection(alpha=alpha),
        round=RoundSection(seconds=seconds),
    )
    assert decode_manifest(sign_manifest(given_manifest, CREATOR).encode()).manifest == given_manifest


def test_another_protocol_version_names_both() -> None:
    body = body_of(sign_manifest(manifest(), CREATOR).encode()) | {"protocol_version": 99, "field_of_the_future": 1}
    with pytest.raises(ManifestError, match=rf"the run has 99, this swarmtrain speaks {PROTOCOL_VERSION}"):
        decode_manifest(signed_json(body))


@pytest.mark.parametrize("size", [MAX_MANIFEST_BYTES + 1, MAX_MANIFEST_BYTES * 10])
def test_oversized_is_refused_before_parsing(size: int) -> None:
    with pytest.raises(ManifestError, match="more than the 65536 allowed"):
        decode_manifest(b"{" * size)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ManifestError):
        decode_manifest(b'{"manifest":' + b"[" * 60_000)


def test_an_altered_manifest_fails_its_signature() -> None:
    encoded = sign_manifest(manifest(), CREATOR).encode()
    with pytest.raises(ManifestError, match="signature is not the creator's"):
        decode_manifest(encoded.replace(b'"batch_size":8', b'"batch_size":9'))


def test_a_signature_for_another_purpose_does_not_count() -> None:
    body = sign_manifest(manifest(), CREATOR).signed_bytes
    other = CREATOR.sign("swarmtrain-something-else", body).hex().encode()
    with pytest.raises(ManifestError, match="signature is not the creator's"):
        decode_manifest(b'{"manifest":' + body + b',"signature":"' + other + b'"}')


def test_only_the_named_creator_can_sign() -> None:
    with pytest.raises(ManifestError, match="names another key"):
        sign_manifest(manifest(), Identity.from_seed(bytes(32)))


def test_a_second_encoding_of_the_same_manifest_is_refused() -> None:
    encoded = sign_manifest(manifest(), CREATOR).encode()
    body = json.loads(encoded)["manifest"]
    spaced = json.dumps(body, sort_keys=True).encode()
    signature = CREATOR.sign(SIGNATURE_DOMAIN, spaced).hex().encode()
    for variant in (
        b'{"manifest":' + spaced + b',"signature":"' + signature + b'"}',
        encoded + b"\n",
        encoded.replace(b',"signature"', b', "signature"'),
    ):
        with pytest.raises(ManifestError, match="canonical"):
            decode_manifest(variant)


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("name", "Has Spaces", "name"),
        ("name", "a" * 64, "name"),
        ("extra", 1, "extra"),
        ("creator", "00", "creator"),
        ("created_by", "\x1b[31m", "created_by"),
        ("model.hidden_size", 0, "hidden_size"),
        ("model.hidden_size", "128", "hidden_size"),
        ("model.num_layers", 10**9, "num_layers"),
        ("model.vocab_size", 100, "vocab_size"),
        ("tokenizer.kind", "bpe", "bpe"),
        ("data.kind", "named", "content_hash"),
        ("data.content_hash", HASH, "content_hash"),
        ("validation.size_bytes", 65537, "65537"),
        ("validation.blob", "xyz", "blob"),
        ("optimizer.learning_rate", -1.0, "-1.0"),
        ("optimizer.betas", [0.9], "betas"),
        ("optimizer.betas", [0.9, 1.5], "1.5"),
        ("optimizer.warmup_steps", 10**6, "1000000"),
        ("optimizer.total_steps", 0, "total_steps"),
        ("round.seconds", 5.0, "round"),
        ("mixer.alpha", 1.0, "alpha"),
        ("mixer.gamma", 0.7, "gamma"),
        ("mixer.kind", "average", "average"),
        ("genesis.weights", {"blob": HASH, "digest": HASH, "size_bytes": 1}, "genesis"),
        ("genesis.seed", -1, "-1"),
    ],
)
def test_each_bad_field_is_named(path: str, value: object, names: str) -> None:
    body = body_of(sign_manifest(manifest(), CREATOR).encode())
    section, _, key = path.rpartition(".")
    (body[section] if section else body)[key] = value
    with pytest.raises(ManifestError) as caught:
        decode_manifest(signed_json(body))
    assert names in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.exit_code == ExitCode.INCOMPATIBLE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_never_enter(value: float) -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        OptimizerSection(learning_rate=value)
    with pytest.raises(ValueError, match="alpha"):
        MixerSection(alpha=value)


def test_a_diverging_gamma_is_refused_with_the_reason() -> None:
    MixerSection(kind="noloco", alpha=0.5, gamma=1.49)
    with pytest.raises(ValueError, match=r"gamma = 1\.5: .*below 2\(1 - alpha\^2\) = 1\.5.*diverge"):
        MixerSection(kind="noloco", alpha=0.5, gamma=1.5)
    with pytest.raises(ValueError, match="diverge"):
        MixerSection(kind="noloco", alpha=0.9, gamma=0.7)
    with pytest.raises(ValueError, match="gamma"):
        MixerSection(kind="noloco")


def test_genesis_is_a_seed_or_weights() -> None:
    weights = WeightsSection(blob=HASH, size_bytes=10, digest=HASH)
    signed = sign_manifest(manifest(genesis=GenesisSection(weights=weights)), CREATOR)
    assert decode_manifest(signed.encode()).manifest.genesis.weights == weights
    with pytest.raises(ValueError, match="genesis"):
        GenesisSection()


def test_a_mismatch_names_field_and_both_values() -> None:
    require_equal("data.content_hash", HASH, HASH)
    with pytest.raises(Incompatible, match=r"model\.hidden_size: the run has 128, the checkpoint has 64"):
        require_equal("model.hidden_size", 128, 64, where="the checkpoint")


def test_differences_are_found_by_dotted_name() -> None:
    other = manifest(model=ModelSection(num_layers=2), genesis=GenesisSection(seed=8))
    assert list(differences(manifest(), other)) == [("model.num_layers", 4, 2), ("genesis.seed", 7, 8)]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_input_escapes_as_another_error(data: st.DataObject) -> None:
    encoded = bytearray(sign_manifest(manifest(), CREATOR).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(encoded) - 1))
        stop = data.draw(st.integers(start, min(len(encoded), start + 40)))
        encoded[start:stop] = data.draw(st.binary(max_size=12))
        if not encoded:
            return
    message = ""
    try:
        decode_manifest(bytes(encoded))
    except ManifestError as error:
        message = error.message
    assert message == "" or message.isprintable()


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=100, deadline=None)
def test_no_json_escapes_as_another_error(document: object) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(msgspec.json.encode({"manifest": document, "signature": "00" * 64}))


def test_run_references() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    facts = ("reading-group", signed.creator, signed.run_id)
    for text in ("reading-group", signed.label, signed.run_id.hex()):
        reference = parse_run_reference(text)
        assert reference.matches(*facts)
        assert str(reference) == text
    assert not parse_run_reference("reading-group@00000000").matches(*facts)
    assert not parse_run_reference("another").matches(*facts)


def test_a_manifest_that_does_not_say_who_may_join_is_refused_in_words() -> None:
    body = body_of(sign_manifest(manifest(), CREATOR).encode())
    del body["admission"]
    with pytest.raises(ManifestError, match="does not say who may join"):
        decode_manifest(signed_json(body))


@pytest.mark.parametrize(
    "fields", [{"mode": "allowlist"}, {"mode": "open", "peers": ("00" * 32,)}, {"mode": "allowlist", "peers": ("00",)}]
)
def test_a_list_goes_with_its_mode_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"admission\.peers"):
        AdmissionSection(**fields)
