"""How this peer gets into a run: its certificate from disk, from an invite link, or because it is the creator's.

What is believed and why stands in `swarm_peer.certificates`; here are files, the order of attempts, and what a user
is told who is not admitted.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Final

import trio
from swarm_peer.addresses import Contact
from swarm_peer.admission import Admission
from swarm_peer.certificates import (
    BAD_CERTIFICATE,
    DENIALS,
    EXPIRED,
    MAX_CHAIN_BYTES,
    NO_INVITE,
    NOT_LISTED,
    REVOKED,
    USED,
    AdmissionMode,
    Chain,
    Charter,
    decode_chain,
    decode_revocations,
    encode_chain,
    encode_revocations,
    issue,
    verify_chain,
)
from swarm_peer.errors import PeerError, Refusal
from swarm_peer.gated import Gate
from swarm_peer.identity import Identity, short
from swarm_peer.redeeming import redeem

from swarmtrain.errors import ExitCode, NotAdmitted, UserError
from swarmtrain.invite import Target
from swarmtrain.manifest import SignedManifest
from swarmtrain.node import Node
from swarmtrain.private_file import read_private, write_private
from swarmtrain.run_lookup import LocatedRun

logger = logging.getLogger("swarmtrain.admission")

CERTIFICATE_NAME: Final = "certificate"
REVOCATIONS_NAME: Final = "revocations"
MAX_REVOCATIONS_BYTES: Final = 64 * 1024
# How long the creator's key admits a process that only looks.
VISIT_S: Final = 24 * 3600
_ASKED: Final = 8
_ASK_DEADLINE_S: Final = 15.0

_REMEDIES: Final = {
    NO_INVITE: "ask a member for an invite link of your own (`swarmtrain invite`) and join with it",
    EXPIRED: "ask for a new invite link",
    USED: "an invite admits only as many peers as it was made for; ask for another",
    REVOKED: "only the run's creator can say why",
    NOT_LISTED: "the list is part of the run, and its creator would have to sign a new one",
    BAD_CERTIFICATE: "ask for a new invite link",
}


def charter_of(signed: SignedManifest) -> Charter:
    """Returns what the manifest says about admission."""
    section = signed.manifest.admission
    listed = frozenset(map(bytes.fromhex, section.peers))
    return Charter(signed.run_id, signed.creator, AdmissionMode(section.mode), listed)


def not_admitted(signed: SignedManifest, peer_id: bytes, denial: Refusal) -> NotAdmitted:
    """Returns the one line for whoever is not admitted: the run, the reason, the remedy."""
    remedy = _REMEDIES.get(denial.code, _REMEDIES[BAD_CERTIFICATE])
    who = peer_id.hex() if denial.code == NOT_LISTED else short(peer_id)
    return NotAdmitted(f"run {signed.label} does not admit this peer ({who}): {denial.code}, {denial.detail}; {remedy}")


async def enter_run(
    node: Node, run: LocatedRun, target: Target, *, folder: Path | None = None, creator: Identity | None = None
) -> Gate:
    """Gets this peer into the run, and returns the gate through which it takes part.

    `folder` may hold the certificate of an earlier start; `creator` is a key at hand that may be the creator's.
    Raises UserError: not admitted, or the invite cannot be redeemed because nobody answers.
    """
    charter = charter_of(run.signed)
    own_id = node.identity.peer_id
    admission = Admission(charter, own_id)
    if admission.needs_introduction:
        admission.chain = await _find_chain(node, run, target, charter, folder, creator)
    gate = open_gate(node, admission, folder)
    node.blobs.door.publish(run.manifest_blob, bytes.fromhex(run.signed.manifest.validation.blob))
    if gate.is_open:
        return gate
    node.blobs.door.reserve(gate)
    try:
        # Whether it has expired, the others say: our own clock may be the wrong one.
        admission.require_self(0.0)
    except Refusal as denial:
        raise not_admitted(run.signed, own_id, denial) from None
    await _ask_members(gate, run)
    return gate


def open_gate(node: Node, admission: Admission, folder: Path | None) -> Gate:
    """Makes the gate of a run; the list of revocations is kept in `folder`, if there is one."""
    gate = Gate(node.endpoint, admission, rng=random.Random(node.identity.peer_id))
    if folder is not None and not gate.is_open:
        keep_revocations(gate, folder / REVOCATIONS_NAME)
    return gate


def keep_revocations(gate: Gate, path: Path) -> None:
    """Loads the list of revocations from `path`, and writes each newer one there."""
    data = read_private(path, MAX_REVOCATIONS_BYTES)
    if data is not None:
        try:
            gate.take_news(decode_revocations(data))
        except ValueError as error:
            logger.warning("%s is not read: %s", path, error)

    def save(_: object) -> None:
        held = gate.admission.revocations
        if held is not None and path.parent.is_dir():
            try:
                write_private(path, encode_revocations(held))
            except UserError as error:
                logger.warning("the list of revocations is not saved: %s", error.message)

    gate.on_news = save


def save_certificate(gate: Gate, folder: Path) -> None:
    """Keeps our certificate for the next start, which then needs no invite."""
    if gate.admission.chain:
        write_private(folder / CERTIFICATE_NAME, encode_chain(gate.admission.chain))


def load_certificate(path: Path) -> Chain:
    """Reads a chain from disk, () if there is none or it cannot be read."""
    data = read_private(path, MAX_CHAIN_BYTES)
    try:
        return decode_chain(data) if data is not None else ()
    except ValueError as error:
        logger.warning("%s is not read: %s", path, error)
        return ()


async def _find_chain(
    node: Node, run: LocatedRun, target: Target, charter: Charter, folder: Path | None, creator: Identity | None
) -> Chain:
    own_id = node.identity.peer_id
    if node.identity.public_key == charter.creator:
        return ()
    kept = load_certificate(folder / CERTIFICATE_NAME) if folder is not None else ()
    if kept:
        try:
            verify_chain(charter, kept, own_id, time.time() if target.ticket else 0.0, frozenset())
            return kept
        except Refusal as error:
            logger.warning("the certificate in %s is not used: %s", folder, error)
    if creator is not None and creator.public_key == charter.creator:
        return (issue(creator, charter.run_id, own_id, not_after=int(time.time()) + VISIT_S),)
    if target.ticket is not None:
        return await _redeem(node, run, target, charter)
    return ()


async def _redeem(node: Node, run: LocatedRun, target: Target, charter: Charter) -> Chain:
    assert target.ticket is not None
    redeemer = target.ticket.chain[-1].redeemer
    addresses = tuple(address for peer_id, address in target.peers if peer_id == redeemer)[:8]
    known = next((holder.addresses for holder in run.holders if holder.peer_id == redeemer), ())
    contact = Contact(redeemer or bytes(32), addresses or known)
    try:
        return await redeem(node.endpoint, contact, charter, target.ticket)
    except Refusal as denial:
        if denial.code in DENIALS:
            raise not_admitted(run.signed, node.identity.peer_id, denial) from None
        raise UserError(
            f"the invite cannot be redeemed now: {denial}; try again in a while", ExitCode.REFUSED
        ) from None
    except PeerError as error:
        raise UserError(
            f"the invite is redeemed at peer {short(redeemer)}, which cannot be reached: {error}; "
            "try again when it runs, or ask for another invite",
            ExitCode.NO_PEER,
        ) from None


async def _ask_members(gate: Gate, run: LocatedRun) -> None:
    """Lets some of those that announce the run say whether they know us as a member.

    One that does is enough: anybody can announce a run, and say no.  Raises NotAdmitted if some refuse and none agrees.
    """
    denials: list[Refusal] = []
    agreed = False

    async def ask(holder: Contact) -> None:
        nonlocal agreed
        try:
            await gate.introduce(holder, deadline_s=_ASK_DEADLINE_S)
        except Refusal as error:
            if error.code in DENIALS:
                denials.append(error)
        except PeerError as error:
            logger.info("%s", error)
        else:
            agreed = True
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for holder in run.holders[:_ASKED]:
            if holder.peer_id != gate.peer_id:
                nursery.start_soon(ask, holder)
    if denials and not agreed:
        raise not_admitted(run.signed, gate.peer_id, denials[0])
