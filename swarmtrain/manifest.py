"""The run's manifest: everything that peers of one run must agree on, signed by the run's creator.

A manifest is canonical JSON: keys sorted, no white space, UTF-8, floats in the shortest form that reads back as
the same number, no NaN. One manifest has exactly one encoding, so the run id, the BLAKE3 hash of the signed
bytes, names its meaning. It comes from a stranger: the size is capped before parsing, unknown fields are
refused, every number has bounds, and the signature is checked before anything is believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
from blake3 import blake3
from swarm_peer.identity import Identity, verify_signature

from swarmtrain.errors import Incompatible, ManifestError, one_line
from swarmtrain.mixing import largest_stable_gamma
from swarmtrain.model_config import ModelConfig
from swarmtrain.naming import NAME_RULE, fingerprint, is_run_name
from swarmtrain.tokenizer import VOCAB_SIZE

PROTOCOL_VERSION = 1
MAX_MANIFEST_BYTES = 64 * 1024
MAX_VALIDATION_BYTES = 64 * 1024
SIGNATURE_DOMAIN = "swarmtrain-manifest-v1"

MAX_LISTED_PEERS = 256

_MAX_SEED = 2**53 - 1  # exact in every JSON reader
_MAX_WEIGHTS_BYTES = 1 << 40
_HEX = frozenset("0123456789abcdef")


class FieldError(ValueError):
    """A field with an impossible value. ``field`` is its dotted name; the message names field and value."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {one_line(repr(value), 80)}: must be {rule}")
        self.field = field


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ModelSection(_Section, frozen=True, kw_only=True):
    """The model's sizes; the fields and their bounds are those of :class:`ModelConfig`."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    context_length: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> ModelConfig:
        """Returns the model's configuration; ``ValueError`` where the sizes do not fit together."""
        return ModelConfig(**msgspec.structs.asdict(self))


class TokenizerSection(_Section, frozen=True, kw_only=True):
    """How text becomes tokens. ``bytes``: one token per byte, no vocabulary file."""

    kind: Literal["bytes"] = "bytes"


class DataSection(_Section, frozen=True, kw_only=True):
    """What is trained on.

    ``python``: the text that ships with each peer's own Python. ``own``: what each peer names with
    ``--data``. ``named``: one data set, equal for all, named by the BLAKE3 hash of its content.
    """

    kind: Literal["python", "own", "named"] = "python"
    content_hash: str | None = None  # 64 hex digits, for "named" only

    def __post_init__(self) -> None:
        if self.kind == "named":
            _hex("data.content_hash", self.content_hash)
        elif self.content_hash is not None:
            raise FieldError("data.content_hash", self.content_hash, f"left out with data.kind = {self.kind!r}")


class ValidationSection(_Section, frozen=True, kw_only=True):
    """The run's own validation text: a blob that travels beside the manifest."""

    blob: str  # content id, 64 hex digits
    size_bytes: int

    def __post_init__(self) -> None:
        _hex("validation.blob", self.blob)
        _whole("validation.size_bytes", self.size_bytes, 1, MAX_VALIDATION_BYTES)


class OptimizerSection(_Section, frozen=True, kw_only=True):
    """AdamW, its schedule, and what one inner step is. ``total_steps`` counts inner steps."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    batch_size: int = 8
    grad_accumulation: int = 1
    total_steps: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        _number("optimizer.learning_rate", self.learning_rate, 1e-12, 10.0)
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise FieldError("optimizer.betas", self.betas, "two numbers from 0 to below 1")
        _number("optimizer.weight_decay", self.weight_decay, 0.0, 10.0)
        _number("optimizer.grad_clip", self.grad_clip, 1e-6, 1e6)
        _whole("optimizer.total_steps", self.total_steps, 1, 10**9)
        _whole("optimizer.warmup_steps", self.warmup_steps, 0, self.total_steps)
        _number("optimizer.min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)
        _whole("optimizer.batch_size", self.batch_size, 1, 1 << 16)
        _whole("optimizer.grad_accumulation", self.grad_accumulation, 1, 1 << 16)
        _whole("optimizer.seed", self.seed, 0, _MAX_SEED)


class RoundSection(_Section, frozen=True, kw_only=True):
    """A round's length, either in inner steps or in seconds; exactly one of the two is set."""

    inner_steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.inner_steps is None) == (self.seconds is None):
            given = {"inner_steps": self.inner_steps, "seconds": self.seconds}
            raise FieldError("round", given, "given in inner_steps or in seconds, not in both")
        if self.inner_steps is not None:
            _whole("round.inner_steps", self.inner_steps, 1, 10**6)
        if self.seconds is not None:
            _number("round.seconds", self.seconds, 0.1, 86400.0)


class MixerSection(_Section, frozen=True, kw_only=True):
    """The outer step and the mix. ``gamma`` belongs to the ``noloco`` mixer alone."""

    kind: Literal["matched", "noloco"] = "matched"
    alpha: float = 0.5
    beta: float = 0.7
    gamma: float | None = None
    staleness_cutoff: int = 4  # rounds; a staler partner is not mixed with

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha < 1.0:
            raise FieldError("mixer.alpha", self.alpha, "a number from 0 to below 1 (at 1 the momentum never fades)")
        _number("mixer.beta", self.beta, 1e-6, 2.0)
        _whole("mixer.staleness_cutoff", self.staleness_cutoff, 1, 1000)
        if self.kind == "matched":
            if self.gamma is not None:
                raise FieldError("mixer.gamma", self.gamma, "left out with mixer.kind = 'matched'")
        elif self.gamma is None:
            raise FieldError("mixer.gamma", None, "given with mixer.kind = 'noloco' (0.7 goes with alpha 0.5)")
        else:
            limit = largest_stable_gamma(self.alpha)
            if not 0.0 < self.gamma < limit:
                raise FieldError(
                    "mixer.gamma",
                    self.gamma,
                    f"above 0 and below 2(1 - alpha^2) = {limit:g} at alpha = {self.alpha:g}; "
                    "at or above it the replicas of a pair diverge",
                )


class WeightsSection(_Section, frozen=True, kw_only=True):
    """Initial weights that the creator's peer serves as one blob."""

    blob: str  # content id, 64 hex digits
    size_bytes: int
    digest: str  # the state hash of the weights after loading, 64 hex digits

    def __post_init__(self) -> None:
        _hex("genesis.weights.blob", self.blob)
        _hex("genesis.weights.digest", self.digest)
        _whole("genesis.weights.size_bytes", self.size_bytes, 1, _MAX_WEIGHTS_BYTES)


class GenesisSection(_Section, frozen=True, kw_only=True):
    """Where the initial weights come from: a seed, or the creator's weights. Exactly one is set."""

    seed: int | None = None
    weights: WeightsSection | None = None

    def __post_init__(self) -> None:
        if (self.seed is None) == (self.weights is None):
            raise FieldError("genesis", {"seed": self.seed}, "a seed or weights: one of the two, not both")
        if self.seed is not None:
            _whole("genesis.seed", self.seed, 0, _MAX_SEED)


class AdmissionSection(_Section, frozen=True, kw_only=True):
    """Who may take part: whom a member has invited, the peers on a list, or everybody."""

    mode: Literal["invite", "allowlist", "open"] = "invite"
    peers: tuple[str, ...] = ()  # peer ids, 64 hex digits, for "allowlist" only

    def __post_init__(self) -> None:
        if self.mode != "allowlist":
            if self.peers:
                raise FieldError("admission.peers", self.peers, f"left out with admission.mode = {self.mode!r}")
        elif not 0 < len(self.peers) <= MAX_LISTED_PEERS:
            raise FieldError("admission.peers", self.peers, f"1 to {MAX_LISTED_PEERS} peer ids")
        for peer in self.peers:
            _hex("admission.peers", peer)


class Manifest(_Section, frozen=True, kw_only=True):
    """What peers of one run agree on. Every field is checked; ``ValueError`` names field and value."""

    name: str
    creator: str  # Ed25519 public key, 64 hex digits
    created_by: str  # the swarmtrain version that made it, for people
    protocol_version: int = PROTOCOL_VERSION
    model: ModelSection
    tokenizer: TokenizerSection
    data: DataSection
    validation: ValidationSection
    optimizer: OptimizerSection
    round: RoundSection
    mixer: MixerSection
    genesis: GenesisSection
    admission: AdmissionSection = AdmissionSection()

    def __post_init__(self) -> None:
        if not is_run_name(self.name):
            raise FieldError("name", self.name, NAME_RULE)
        _hex("creator", self.creator)
        if not (0 < len(self.created_by) <= 64 and self.created_by.isprintable()):
            raise FieldError("created_by", self.created_by, "1 to 64 printable characters")
        if self.model.vocab_size < VOCAB_SIZE:
            raise FieldError("model.vocab_size", self.model.vocab_size, f"at least {VOCAB_SIZE} (byte tokenizer)")


def tokens_per_step(manifest: Manifest) -> int:
    """Returns the tokens of one inner step of one peer."""
    optimizer = manifest.optimizer
    return optimizer.batch_size * optimizer.grad_accumulation * manifest.model.context_length


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature has been made or verified here."""

    manifest: Manifest
    signed_bytes: bytes  # the manifest's canonical JSON
    signature: bytes  # 64 bytes, Ed25519

    @property
    def run_id(self) -> bytes:
        """The run's id, 32 bytes."""
        return blake3(self.signed_bytes).digest()

    @property
    def creator(self) -> bytes:
        """The creator's public key, 32 bytes."""
        return bytes.fromhex(self.manifest.creator)

    @property
    def label(self) -> str:
        """``NAME@fingerprint``, which tells runs of one name apart."""
        return f"{self.manifest.name}@{fingerprint(self.creator)}"

    def encode(self) -> bytes:
        """Returns the bytes that travel and a ``.run`` file holds; :func:`decode_manifest` reads them."""
        return b'{"manifest":' + self.signed_bytes + b',"signature":"' + self.signature.hex().encode() + b'"}'


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    manifest: msgspec.Raw
    signature: str


class _Version(msgspec.Struct, frozen=True):
    protocol_version: int
    admission: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def sign_manifest(manifest: Manifest, identity: Identity) -> SignedManifest:
    """Signs ``manifest``. Raises :class:`ManifestError` if ``identity`` is not its creator, or for size."""
    if identity.public_key.hex() != manifest.creator:
        raise ManifestError("creator: the manifest names another key than the one that signs it")
    body = _canonical(manifest)
    signed = SignedManifest(manifest, body, identity.sign(SIGNATURE_DOMAIN, body))
    if len(signed.encode()) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: larger than {MAX_MANIFEST_BYTES} bytes")
    return signed


def decode_manifest(data: bytes) -> SignedManifest:
    """Reads and verifies a signed manifest from an untrusted source.

    Raises:
        ManifestError: with one line that names the field: too large, not JSON, another protocol version (both
            are named), an unknown field or impossible value, not in canonical form, or a wrong signature.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: {len(data)} bytes, more than the {MAX_MANIFEST_BYTES} allowed")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.manifest)
        head = msgspec.json.decode(body, type=_Version)
        version = head.protocol_version
        # Before the strict reading: a newer version may have fields that this one does not know.
        if version != PROTOCOL_VERSION:
            raise ManifestError(
                f"protocol_version: the run has {version}, this swarmtrain speaks {PROTOCOL_VERSION}; "
                "all peers of a run need the same one"
            )
        if head.admission is msgspec.UNSET:
            # Who may take part is the creator's to say, so its absence is neither "everybody" nor "nobody".
            raise ManifestError(
                "admission: the run does not say who may join, it was made by an older swarmtrain; "
                "its creator has to sign it again: swarmtrain create"
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, OverflowError) as error:
        raise ManifestError(f"manifest: {one_line(str(error), 300)}") from None
    if len(envelope.signature) != 128 or not _HEX.issuperset(envelope.signature):
        raise ManifestError("manifest: signature must be 128 hex digits")
    signed = SignedManifest(manifest, body, bytes.fromhex(envelope.signature))
    if _canonical(manifest) != body or signed.encode() != data:
        raise ManifestError("manifest: not in canonical form (keys sorted, no white space)")
    if not verify_signature(signed.creator, SIGNATURE_DOMAIN, body, signed.signature):
        raise ManifestError("manifest: the signature is not the creator's; the manifest has been altered")
    return signed


def mismatch(field: str, run: object, here: object, *, where: str = "this peer") -> Incompatible:
    """Returns the error for a field that must be equal and is not: names the field and both values."""
    return Incompatible(f"{field}: the run has {one_line(str(run), 80)}, {where} has {one_line(str(here), 80)}")


def require_equal(field: str, run: object, here: object, *, where: str = "this peer") -> None:
    """Raises :class:`Incompatible`, naming the field and both values, unless they are equal."""
    if run != here:
        raise mismatch(field, run, here, where=where)


Difference = tuple[str, object, object]


def differences(one: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> Iterator[Difference]:
    """Yields (dotted field, value in ``one``, value in ``other``) for every field in which the two differ."""
    for field in one.__struct_fields__:
        a, b = getattr(one, field), getattr(other, field)
        if isinstance(a, msgspec.Struct) and type(a) is type(b):
            yield from differences(a, b, f"{prefix}{field}.")
        elif a != b:
            yield prefix + field, a, b


def _canonical(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted")


def _hex(field: str, value: str | None) -> None:
    if value is None or len(value) != 64 or not _HEX.issuperset(value):
        raise FieldError(field, value, "64 hex digits (0-9, a-f)")


def _whole(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise FieldError(field, value, f"a whole number from {low} to {high}")


def _number(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise FieldError(field, value, f"a number from {low:g} to {high:g}")
