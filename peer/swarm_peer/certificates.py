"""Certificates, invitations and revocations: what proves that a peer may take part in a run.

A run is open to everyone, to a list of peer ids, or to whoever was invited. An invited peer shows a chain of
certificates that begins with the run's creator; each is signed by the subject of the one before. Two kinds:

- A member certificate names a peer that may take part; with `may_invite` it may issue further ones.
- A ticket names a key pair that travels in an invite link. It takes part in nothing. It certifies one member, and
  where it names a `redeemer`, that certificate counts only with the redeemer's signature beside it. The redeemer
  signs for as many peers as the ticket allows, so a link that has been used up, and leaked later, admits nobody;
  the secret itself is never sent to anyone.

Lifetimes are wall-clock seconds, because they outlast processes. A member certificate is believed for `SKEW_S`
beyond its end, so a clock that is wrong by a day does no harm; `redeem_by` of a ticket is judged by the redeemer
alone. Signatures cover fixed byte layouts, each with a domain of its own.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec

from swarm_peer.addresses import PeerIdBytes
from swarm_peer.errors import Refusal
from swarm_peer.identity import Identity, peer_id_of, short, verify_signature
from swarm_peer.records import Key, Seq

CERTIFICATE_DOMAIN: Final = "swarmtrain-admission-v1"
WITNESS_DOMAIN: Final = "swarmtrain-admission-witness-v1"
REVOCATION_DOMAIN: Final = "swarmtrain-revocation-v1"

SKEW_S: Final = 24 * 3600
REDEEM_SKEW_S: Final = 3600  # inviter and redeemer may be two machines
MAX_DEPTH: Final = 4  # members from the creator on, each invited by the one before
MAX_CERTIFICATES: Final = 2 * MAX_DEPTH  # a ticket before each member
MAX_USES: Final = 1000
MAX_REVOKED: Final = 1024
MAX_CHAIN_BYTES: Final = 4096
TIME_CAP = 2**40

NOT_INTRODUCED: Final = "not-introduced"
NO_INVITE: Final = "no-invite"
EXPIRED: Final = "invite-expired"
USED: Final = "invite-used"
REVOKED: Final = "revoked"
NOT_LISTED: Final = "not-listed"
BAD_CERTIFICATE: Final = "bad-certificate"
# Why a peer is kept out; `not-introduced` is not among them, it asks for the certificates.
DENIALS: Final = frozenset({NO_INVITE, EXPIRED, USED, REVOKED, NOT_LISTED, BAD_CERTIFICATE})

_CERTIFICATE = struct.Struct("!32s32s32sQBBB32sQH")
_REVOCATIONS = struct.Struct("!32sQH")

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Upto32 = Annotated[bytes, msgspec.Meta(max_length=32)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Time = Annotated[int, msgspec.Meta(ge=0, le=TIME_CAP)]


class AdmissionMode(StrEnum):
    """Whom a run admits."""

    INVITE = "invite"
    ALLOWLIST = "allowlist"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Charter:
    """What the signed manifest says about admission. `creator` is a public key, `listed` are peer ids."""

    run_id: bytes
    creator: bytes
    mode: AdmissionMode
    listed: frozenset[bytes] = frozenset()


class Certificate(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One link of a chain. Times are seconds since 1970; `redeemer` to `uses` are for tickets, else empty."""

    run_id: Key
    subject: PeerIdBytes
    issuer: Bytes32  # public key
    not_after: Time
    is_ticket: bool
    may_invite: bool
    redeemer: Upto32
    redeem_by: Time
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)]
    signature: Signature
    witness_key: Upto32 = b""
    witness: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    def signed_bytes(self) -> bytes:
        """What `signature` covers."""
        return _CERTIFICATE.pack(
            self.run_id,
            self.subject,
            self.issuer,
            self.not_after,
            self.is_ticket,
            self.may_invite,
            len(self.redeemer),
            self.redeemer,
            self.redeem_by,
            self.uses,
        )


Chain = tuple[Certificate, ...]
WireChain = Annotated[Chain, msgspec.Meta(max_length=MAX_CERTIFICATES)]


class Revocations(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The creator's list of peers and tickets that are out, ids ascending. A higher `seq` replaces a lower."""

    run_id: Key
    seq: Seq
    revoked: Annotated[tuple[PeerIdBytes, ...], msgspec.Meta(max_length=MAX_REVOKED)]
    signature: Signature

    def signed_bytes(self) -> bytes:
        """What `signature` covers."""
        return _REVOCATIONS.pack(self.run_id, self.seq, len(self.revoked)) + b"".join(self.revoked)


class Ticket(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The secret part of an invite link: a key's seed and the chain that ends with that key's certificate."""

    seed: Bytes32
    chain: Annotated[Chain, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATES)]


# Issuing.


def issue(
    issuer: Identity,
    run_id: bytes,
    subject: bytes,
    *,
    not_after: int,
    may_invite: bool = False,
    is_ticket: bool = False,
    redeemer: bytes = b"",
    redeem_by: int = 0,
    uses: int = 0,
) -> Certificate:
    """Signs one certificate. Whether others believe it is for `verify_chain` to say."""
    unsigned = Certificate(
        run_id,
        subject,
        issuer.public_key,
        not_after,
        is_ticket,
        may_invite,
        redeemer,
        redeem_by,
        uses,
        bytes(64),
    )
    signature = issuer.sign(CERTIFICATE_DOMAIN, unsigned.signed_bytes())
    return msgspec.structs.replace(unsigned, signature=signature)


def issue_ticket(
    issuer: Identity,
    chain: Chain,
    run_id: bytes,
    seed: bytes,
    *,
    not_after: int,
    may_invite: bool = False,
    redeemer: bytes = b"",
    redeem_by: int = 0,
    uses: int = 0,
) -> Ticket:
    """Makes a ticket. `chain` is the issuer's own, `seed` 32 secret random bytes.

    With a `redeemer`, it admits `uses` peers until `redeem_by`; without, it admits whoever has it.
    """
    if chain:
        not_after = min(not_after, chain[-1].not_after)
    subject = Identity.from_seed(seed).peer_id
    last = issue(
        issuer,
        run_id,
        subject,
        not_after=not_after,
        may_invite=may_invite,
        is_ticket=True,
        redeemer=redeemer,
        redeem_by=redeem_by,
        uses=uses,
    )
    return Ticket(seed, (*chain, last))


def claim(ticket: Ticket, subject: bytes) -> Chain:
    """The chain of a new member, as the ticket's key certifies it; complete if the ticket names no redeemer."""
    last = ticket.chain[-1]
    member = issue(
        Identity.from_seed(ticket.seed), last.run_id, subject, not_after=last.not_after, may_invite=last.may_invite
    )
    return (*ticket.chain, member)


def witness(redeemer: Identity, chain: Chain) -> Chain:
    """The chain with the redeemer's signature beside its last certificate."""
    last = chain[-1]
    signature = redeemer.sign(WITNESS_DOMAIN, last.signed_bytes() + last.signature)
    return (*chain[:-1], msgspec.structs.replace(last, witness_key=redeemer.public_key, witness=signature))


def revoke(creator: Identity, run_id: bytes, seq: int, peer_ids: Iterable[bytes]) -> Revocations:
    """Signs a list. Raises `ValueError` for more than 1024 ids."""
    revoked = tuple(sorted(set(peer_ids)))
    if len(revoked) > MAX_REVOKED:
        raise ValueError(f"{len(revoked)} revoked ids, {MAX_REVOKED} are allowed")
    unsigned = Revocations(run_id, seq, revoked, bytes(64))
    return msgspec.structs.replace(unsigned, signature=creator.sign(REVOCATION_DOMAIN, unsigned.signed_bytes()))


# Believing.


def verify_chain(charter: Charter, chain: Chain, subject: bytes, now: float, revoked: frozenset[bytes]) -> None:
    """Checks that `chain` makes `subject` a member. Raises `Refusal` with one of `DENIALS`."""
    if subject == peer_id_of(charter.creator):
        return
    if not chain:
        raise Refusal(NO_INVITE, "this run is by invitation, and no invitation was shown")
    if chain[-1].subject != subject or chain[-1].is_ticket:
        raise Refusal(BAD_CERTIFICATE, "the certificate is another peer's")
    verify_links(charter, chain, is_witnessed=True)
    check_standing(chain, now, revoked)


def verify_links(charter: Charter, chain: Chain, *, is_witnessed: bool) -> None:
    """Structure first, as it costs nothing; then signatures. `is_witnessed`: the last one must be, too."""
    if len(chain) > MAX_CERTIFICATES or sum(not link.is_ticket for link in chain) > MAX_DEPTH:
        raise Refusal(BAD_CERTIFICATE, f"more than {MAX_DEPTH} members invited one another")
    if chain[0].issuer != charter.creator:
        raise Refusal(BAD_CERTIFICATE, "the chain does not begin with the run's creator")
    parent: Certificate | None = None
    for link in chain:
        if link.run_id != charter.run_id:
            raise Refusal(BAD_CERTIFICATE, "the certificate is another run's")
        if parent is not None:
            _check_step(parent, link)
        parent = link
    parent = None
    for number, link in enumerate(chain, 1):
        if not verify_signature(link.issuer, CERTIFICATE_DOMAIN, link.signed_bytes(), link.signature):
            raise Refusal(BAD_CERTIFICATE, "a signature is wrong")
        if parent is not None and parent.redeemer and (is_witnessed or number < len(chain)):
            _check_witness(parent.redeemer, link)
        parent = link


def _check_step(parent: Certificate, link: Certificate) -> None:
    if peer_id_of(link.issuer) != parent.subject:
        raise Refusal(BAD_CERTIFICATE, "a certificate is not signed by the one before")
    if link.not_after > parent.not_after:
        raise Refusal(BAD_CERTIFICATE, "a certificate outlives the one before")
    if parent.is_ticket:
        if link.is_ticket or (link.may_invite and not parent.may_invite):
            raise Refusal(BAD_CERTIFICATE, "a ticket gave more than it has")
    elif not parent.may_invite:
        raise Refusal(BAD_CERTIFICATE, f"peer {short(parent.subject)} may not invite")


def _check_witness(redeemer: bytes, link: Certificate) -> None:
    if len(link.witness_key) != 32 or peer_id_of(link.witness_key) != redeemer:
        raise Refusal(BAD_CERTIFICATE, "the invitation was not redeemed where it should be")
    if not verify_signature(link.witness_key, WITNESS_DOMAIN, link.signed_bytes() + link.signature, link.witness):
        raise Refusal(BAD_CERTIFICATE, "the redeemer's signature is wrong")


def check_standing(chain: Chain, now: float, revoked: frozenset[bytes]) -> None:
    out = [link.subject for link in chain if link.subject in revoked]
    if out:
        whose = "this peer" if out[0] == chain[-1].subject else f"{short(out[0])}, which invited it,"
        raise Refusal(REVOKED, f"{whose} was revoked by the run's creator")
    if now > chain[-1].not_after + SKEW_S:
        raise Refusal(EXPIRED, "the certificate has expired")


def verify_revocations(charter: Charter, revocations: Revocations) -> bool:
    """Whether the list is this run's, in order, and signed by its creator."""
    ids = revocations.revoked
    return (
        revocations.run_id == charter.run_id
        and all(a < b for a, b in itertools.pairwise(ids))
        and verify_signature(charter.creator, REVOCATION_DOMAIN, revocations.signed_bytes(), revocations.signature)
    )


# Bytes and text.

T = TypeVar("T")


def encode_chain(chain: Chain) -> bytes:
    """The bytes of a chain, for a file."""
    return msgspec.msgpack.encode(chain)


def decode_chain(data: bytes) -> Chain:
    """A stranger's chain, typed and bounded, not verified. Raises `ValueError`."""
    return decode_typed(data, WireChain, MAX_CHAIN_BYTES)


def ticket_text(ticket: Ticket) -> str:
    """The ticket as it stands in a link."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(ticket)).rstrip(b"=").decode("ascii")


def parse_ticket(text: str) -> Ticket:
    """A ticket from a link, typed and bounded, not verified. Raises `ValueError`."""
    if len(text) > 2 * MAX_CHAIN_BYTES or not text.isascii():
        raise ValueError("too long or not ASCII")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    ticket = decode_typed(data, Ticket, MAX_CHAIN_BYTES)
    if not ticket.chain[-1].is_ticket or ticket.chain[-1].subject != Identity.from_seed(ticket.seed).peer_id:
        raise ValueError("its key and its certificate do not belong together")
    return ticket


def encode_revocations(revocations: Revocations) -> bytes:
    """The bytes of a list, for a file."""
    return msgspec.msgpack.encode(revocations)


def decode_revocations(data: bytes) -> Revocations:
    """A list from a file, typed and bounded, not verified. Raises `ValueError`."""
    return decode_typed(data, Revocations, 64 * 1024)


def decode_typed(data: bytes, kind: type[T], cap_bytes: int) -> T:
    if len(data) > cap_bytes:
        raise ValueError(f"{len(data)} bytes, more than {cap_bytes}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
