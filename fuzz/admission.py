"""Targets: what decides who may take part. Whatever is believed must be what the right key signed, to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from swarm_peer.certificates import (
    AdmissionMode,
    Chain,
    Charter,
    Revocations,
    Ticket,
    claim,
    decode_chain,
    decode_revocations,
    encode_chain,
    encode_revocations,
    issue,
    issue_ticket,
    parse_ticket,
    revoke,
    ticket_text,
    verify_chain,
    verify_revocations,
    witness,
)
from swarm_peer.errors import ProtocolError, Refusal
from swarm_peer.gated import ChainsReply, ChainsRequest, Hello, News
from swarm_peer.identity import Identity
from swarm_peer.redeeming import Claim
from swarm_peer.rpc import Method

from fuzz.connection import IDENTITY, RUN_ID, both_ways, decode_message, encode_messages
from fuzz.target import Target

CREATOR = Identity.from_seed(bytes(range(32)))
_MEMBER = Identity.from_seed(bytes(range(2, 34)))
_CHARTER = Charter(RUN_ID, CREATOR.public_key, AdmissionMode.INVITE)
_NOW_S = 1_800_000_000
_END_S = _NOW_S + 1000


class NotBelieved(Exception):
    """The verifier's answer to what is well-formed and not signed."""


@cache
def ticket() -> Ticket:
    """An invitation for three, to be redeemed at the creator's."""
    return issue_ticket(
        CREATOR,
        (),
        RUN_ID,
        bytes(range(5, 37)),
        not_after=_END_S,
        redeemer=CREATOR.peer_id,
        redeem_by=_NOW_S + 100,
        uses=3,
    )


@cache
def _chains() -> dict[str, Chain]:
    invited = issue(CREATOR, RUN_ID, _MEMBER.peer_id, not_after=_END_S, may_invite=True)
    return {
        "member": (issue(CREATOR, RUN_ID, IDENTITY.peer_id, not_after=_END_S),),
        "by-a-member": (invited, issue(_MEMBER, RUN_ID, IDENTITY.peer_id, not_after=_END_S)),
        "redeemed": witness(CREATOR, claim(ticket(), IDENTITY.peer_id)),
    }


def _decode_chain(data: bytes) -> Chain:
    try:
        chain = decode_chain(data)
    except ValueError as error:
        raise NotBelieved(str(error)) from None
    verify_chain(_CHARTER, chain, IDENTITY.peer_id, _NOW_S, frozenset())
    signed = {(link.issuer, link.signed_bytes()) for known in _chains().values() for link in known}
    assert {(link.issuer, link.signed_bytes()) for link in chain} <= signed, "a certificate that nobody signed"
    return chain


def _chain_seeds() -> dict[str, bytes]:
    return {name: encode_chain(chain) for name, chain in _chains().items()}


def _decode_ticket(data: bytes) -> Ticket:
    try:
        found = parse_ticket(data.decode("latin-1"))
    except ValueError as error:
        raise NotBelieved(str(error)) from None
    assert parse_ticket(ticket_text(found)) == found
    return found


def _decode_revocations(data: bytes) -> Revocations:
    try:
        revocations = decode_revocations(data)
    except ValueError as error:
        raise NotBelieved(str(error)) from None
    if not verify_revocations(_CHARTER, revocations):
        raise NotBelieved
    assert msgspec.structs.replace(revocations, signature=bytes(64)) in [
        msgspec.structs.replace(known, signature=bytes(64)) for known in _revocations()
    ]
    return revocations


@cache
def _revocations() -> tuple[Revocations, Revocations]:
    return revoke(CREATOR, RUN_ID, 1, []), revoke(CREATOR, RUN_ID, 7, [_MEMBER.peer_id, IDENTITY.peer_id])


def _revocation_seeds() -> dict[str, bytes]:
    none, two = map(encode_revocations, _revocations())
    return {"none": none, "two": two}


@cache
def _methods() -> list[tuple[Method[Any, Any], bool]]:
    # The product names them by run; the types and the caps are these.
    return both_ways(
        [
            Method("admission.hello", Hello, Hello, 8192, 8192),
            Method("admission.news", News, News),
            Method("admission.chains", ChainsRequest, ChainsReply, 2048, 160 * 1024),
            Method("admission.redeem", Claim, Claim, 8192, 8192),
        ]
    )


def _message_seeds() -> dict[str, bytes]:
    chains = tuple(_chains().values())
    return encode_messages(
        _methods(),
        [
            Hello(chains[0], 7),
            News(7, _revocations()[1]),
            ChainsRequest((IDENTITY.peer_id,)),
            ChainsReply(((), chains[0])),
            Claim(chains[2]),
        ],
    )


TARGETS = [
    Target("certificates", _decode_chain, (NotBelieved, Refusal), _chain_seeds),
    Target("ticket", _decode_ticket, (NotBelieved,), lambda: {"three": ticket_text(ticket()).encode()}),
    Target("revocations", _decode_revocations, (NotBelieved,), _revocation_seeds),
    Target("admission-messages", lambda data: decode_message(_methods(), data), (ProtocolError,), _message_seeds),
]
