"""Who a peer is: an Ed25519 key pair, and the peer id that follows from it.

The peer id is the SHA-256 of the public key's SubjectPublicKeyInfo (DER, RFC 8410 section 4). Whoever proves
possession of the key is the peer; there are no names, accounts or authorities. Every signature starts with a
domain string, so that bytes signed for one purpose never verify for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import NewType

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from swarm_peer.errors import IdentityFileError

PeerId = NewType("PeerId", bytes)

PEER_ID_BYTES = 32
PUBLIC_KEY_BYTES = 32
# An Ed25519 SubjectPublicKeyInfo is this constant followed by the 32 bytes of the key (RFC 8410 section 4).
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")
_MAX_KEY_FILE_BYTES = 16 * 1024


class Identity:
    """An Ed25519 key pair. `peer_id` is the public name, `public_key` the 32 raw bytes, `path` its file, if any."""

    __slots__ = ("path", "peer_id", "private_key", "public_key")

    def __init__(self, private_key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self.path = path
        self.private_key = private_key
        self.public_key = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """A fresh random identity, in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte secret seed: for tests and simulations that must repeat exactly."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Reads the key file, or writes a new one (PEM, PKCS #8, mode 0600) if there is none.

        Creation is atomic: of several processes that start at once, all end up with the same key.
        Raises `IdentityFileError`, with the remedy, if the file is unreadable, no Ed25519 key, or readable
        by others than its owner.
        """
        try:
            return cls(_read_key(path), path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise IdentityFileError(
                f"cannot read key file {path}: {error.strerror}; check its owner and mode"
            ) from None
        try:
            _write_key(path, Ed25519PrivateKey.generate())
            return cls(_read_key(path), path)
        except OSError as error:
            raise IdentityFileError(
                f"cannot create key file {path}: {error.strerror}; choose a directory that you can write to"
            ) from None

    def sign(self, domain: str, message: bytes) -> bytes:
        """The 64-byte signature of `domain + NUL + message`. `domain` is ASCII without NUL."""
        return self.private_key.sign(_with_domain(domain, message))

    def __repr__(self) -> str:
        return f"<Identity {short(self.peer_id)}>"


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw 32-byte public key. Raises `ValueError` for another length."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return PeerId(hashlib.sha256(_SPKI_PREFIX + public_key).digest())


def verify_signature(public_key: bytes, domain: str, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is `public_key`'s for `domain` and `message`. A stranger's bytes never raise."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _with_domain(domain, message))
    except (InvalidSignature, ValueError):
        return False
    return True


def short(peer_id: bytes) -> str:
    """The first 8 hex digits of a peer id, for people."""
    return peer_id.hex()[:8]


def _with_domain(domain: str, message: bytes) -> bytes:
    if not domain or not domain.isascii() or "\0" in domain:
        raise ValueError(f"a signature domain is ASCII text without NUL, not {domain!r}")
    return domain.encode("ascii") + b"\0" + message


def _read_key(path: Path) -> Ed25519PrivateKey:
    # The mode is read from the open file, so that nobody can swap it between check and use.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if os.name == "posix" and mode & 0o077:
            raise IdentityFileError(f"key file {path} is open to others (mode {mode:04o}); run: chmod 600 {path}")
        text = file.read(_MAX_KEY_FILE_BYTES + 1)
    try:
        if len(text) > _MAX_KEY_FILE_BYTES:
            raise ValueError("too large")
        key = load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityFileError(
            f"{path} holds no unencrypted Ed25519 key in PEM form; move it away and a new key will be made"
        )
    return key


def _write_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Writes a complete file under a temporary name, then links it in place unless another was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
