from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from swarm_peer.errors import IdentityFileError
from swarm_peer.identity import Identity, peer_id_of, short, verify_signature


def test_peer_id_is_the_hash_of_the_public_key_info() -> None:
    identity = Identity.generate()
    key = Ed25519PublicKey.from_public_bytes(identity.public_key)
    digest = Hash(SHA256())
    digest.update(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    assert identity.peer_id == digest.finalize() == peer_id_of(identity.public_key)
    assert short(identity.peer_id) == identity.peer_id.hex()[:8]


def test_a_seed_gives_the_same_identity_and_generate_a_new_one() -> None:
    assert Identity.from_seed(b"s" * 32).peer_id == Identity.from_seed(b"s" * 32).peer_id
    assert Identity.generate().peer_id != Identity.generate().peer_id


def test_signatures_hold_for_one_domain_and_message_only() -> None:
    identity = Identity.generate()
    signature = identity.sign("record", b"message")
    assert verify_signature(identity.public_key, "record", b"message", signature)
    assert not verify_signature(identity.public_key, "manifest", b"message", signature)
    assert not verify_signature(identity.public_key, "record", b"massage", signature)
    assert not verify_signature(Identity.generate().public_key, "record", b"message", signature)
    # The separator keeps "ab" + "c" apart from "a" + "bc".
    assert not verify_signature(identity.public_key, "recor", b"d\0message", signature)


@pytest.mark.parametrize("key", [b"", b"short", b"\xff" * 32, b"x" * 33])
@pytest.mark.parametrize("signature", [b"", b"x" * 63, b"x" * 64, b"x" * 65])
def test_strange_keys_and_signatures_are_just_false(key: bytes, signature: bytes) -> None:
    assert not verify_signature(key, "record", b"message", signature)


@pytest.mark.parametrize("domain", ["", "nul\0", "größe"])
def test_a_bad_domain_is_our_own_mistake(domain: str) -> None:
    with pytest.raises(ValueError, match="domain"):
        Identity.generate().sign(domain, b"")


def test_key_file_is_created_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    identity = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert os.listdir(path.parent) == ["identity.pem"], "no temporary file is left behind"


def test_many_that_create_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: Identity.load_or_create(path).peer_id, range(32)))
    assert len(ids) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.pem"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityFileError, match=f"chmod 600 {path}"):
        Identity.load_or_create(path)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for number, content in enumerate([b"", b"garbage", b"A" * 100_000, other]):
        path = tmp_path / f"{number}.pem"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(IdentityFileError, match="no unencrypted Ed25519 key"):
            Identity.load_or_create(path)


def test_an_unusable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityFileError, match="cannot read key file"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityFileError, match=r"file/identity\.pem"):
        Identity.load_or_create(tmp_path / "file" / "identity.pem")


def test_the_secret_is_not_in_the_repr() -> None:
    assert repr(Identity.from_seed(b"s" * 32)) == f"<Identity {short(Identity.from_seed(b's' * 32).peer_id)}>"
