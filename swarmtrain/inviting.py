"""`swarmtrain invite` makes invite links, `swarmtrain revoke` puts peers out: what needs a key, and little network."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.admission import Admission
from swarm_peer.certificates import (
    MAX_REVOKED,
    Chain,
    Revocations,
    decode_revocations,
    encode_revocations,
    issue,
    issue_ticket,
    revoke,
)
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import PeerError, RecordInvalid
from swarm_peer.gated import Gate
from swarm_peer.identity import Identity, PeerId, short
from swarm_peer.membership import list_members
from swarm_peer.tcp import TlsTransport

from swarmtrain.admission import (
    CERTIFICATE_NAME,
    MAX_REVOCATIONS_BYTES,
    REVOCATIONS_NAME,
    VISIT_S,
    charter_of,
    load_certificate,
)
from swarmtrain.durations import parse_duration
from swarmtrain.errors import ExitCode, InviteError, UserError, one_line
from swarmtrain.invite import EntryPoint, Invite, parse_entry_point
from swarmtrain.manifest import SignedManifest
from swarmtrain.naming import fingerprint
from swarmtrain.options import InviteOptions, RevokeOptions
from swarmtrain.private_file import read_private, write_private
from swarmtrain.run_package import read_manifest_file
from swarmtrain.workspace import MAX_PEERS_OF_ONE_USER, Workspace, read_identity

LISTED_DEADLINE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Package:
    """A run on disk: ``NAME.run``, or the folder of a peer that takes part."""

    signed: SignedManifest
    chain: Chain
    revocations: Path


def run_invite(options: InviteOptions) -> None:
    """Prints an invite link on stdout.  Raises UserError."""
    package = _read_package(options.run)
    signed = package.signed
    mode = signed.manifest.admission.mode
    if mode != "invite":
        how = "everybody may join it" if mode == "open" else "it admits the peers on its list"
        raise UserError(f"run {signed.label} takes no invites: {how}", ExitCode.USAGE)
    issuer = _issuer(package, options.state, options.identity)
    entries = _entry_points(options.peers, options.connect_timeout)
    redeemer = next(peer_id for peer_id, _ in entries if peer_id is not None)
    now = int(time.time())
    ticket = issue_ticket(
        issuer,
        package.chain if issuer.public_key != signed.creator else (),
        signed.run_id,
        secrets.token_bytes(32),
        not_after=now + parse_duration(options.member_for),
        may_invite=options.may_invite,
        redeemer=redeemer,
        redeem_by=now + parse_duration(options.expires),
        uses=options.uses,
    )
    link = Invite(signed.manifest.name, fingerprint(signed.creator), signed.run_id, tuple(entries), ticket)
    click.echo(str(link))
    whom = "one peer" if options.uses == 1 else f"{options.uses} peers"
    click.echo(
        f"It admits {whom} within {options.expires}, while peer {short(redeemer)} runs. Send it in private: until it "
        f"is used, whoever has it can join.\nTo take it back: swarmtrain revoke {options.run} "
        f"{ticket.chain[-1].subject.hex()} --peer …",
        err=True,
    )


def run_revoke(options: RevokeOptions) -> None:
    """Puts peers out of a run.  Raises UserError."""
    package = _read_package(options.run)
    if package.signed.manifest.admission.mode == "open":
        raise UserError(
            f"run {package.signed.label} is open: whoever is put out comes back with a new key", ExitCode.USAGE
        )
    creator = _key_of(package.signed.creator, options.state, options.identity)
    if creator is None:
        raise UserError(
            f"only the creator of {package.signed.label} can revoke, and its key is not here; name it with --identity",
            ExitCode.BAD_FOLDER,
        )
    trio.run(_revoke, options, package, creator)


async def _revoke(options: RevokeOptions, package: _Package, creator: Identity) -> None:
    charter = charter_of(package.signed)
    # A key of its own, so that the creator's own peer may run meanwhile.
    visitor = Identity.generate()
    chain = (issue(creator, charter.run_id, visitor.peer_id, not_after=int(time.time()) + VISIT_S),)
    endpoint = Endpoint(visitor, TlsTransport(visitor))
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, [])
        gate = Gate(endpoint, Admission(charter, visitor.peer_id, chain), rng=random.Random())
        held = read_private(package.revocations, MAX_REVOCATIONS_BYTES)
        if held is not None:
            gate.take_news(_decode_list(held, package.revocations))
        contacts = await _identify(endpoint, [parse_entry_point(peer) for peer in options.peers])
        await gate.spread(contacts)  # and learn what they have
        ids = [await _whole_id(text, gate, contacts) for text in options.peer_ids]
        out = gate.admission.revoked | frozenset(ids)
        if len(out) > MAX_REVOKED:
            raise UserError(f"a run's list has room for {MAX_REVOKED} revoked peers", ExitCode.USAGE)
        revocations = revoke(creator, charter.run_id, gate.admission.seq + 1, out)
        write_private(package.revocations, encode_revocations(revocations))
        gate.take_news(revocations)
        told = await gate.spread(contacts)
        nursery.cancel_scope.cancel()
    if not told:
        raise UserError(
            f"no peer could be told; the list is kept in {package.revocations}, so run the command again later",
            ExitCode.NO_PEER,
        )
    for peer_id in ids:
        click.echo(peer_id.hex())
    click.echo(f"list {revocations.seq} with {len(out)} ids was given to {told} peers, who pass it on", err=True)


def _decode_list(data: bytes, path: Path) -> Revocations:
    try:
        return decode_revocations(data)
    except ValueError:
        raise UserError(f"{path} is damaged; move it away", ExitCode.BAD_FOLDER) from None


async def _whole_id(text: str, gate: Gate, contacts: Sequence[Contact]) -> bytes:
    """Reads a peer id of 64 digits, or its beginning, if one member's id begins so."""
    if len(text) == 64:
        return bytes.fromhex(text)
    found: set[bytes] = set()
    for contact in contacts:
        try:
            members = await list_members(gate, contact, gate.admission.charter.run_id, deadline_s=LISTED_DEADLINE_S)
        except (PeerError, RecordInvalid):
            continue
        found |= {m.contact.peer_id for m in members if m.contact.peer_id.hex().startswith(text)}
    if len(found) != 1:
        which = "no member's" if not found else f"{len(found)} members'"
        raise UserError(f"{text}: {which} id begins so; give all 64 digits", ExitCode.USAGE)
    return found.pop()


# ---------------------------------------------------------------------------------------------------------- the parts


def _read_package(path: Path) -> _Package:
    if path.is_dir():
        workspace = Workspace(path)
        if not workspace.manifest.exists():
            raise UserError(f"{path} is no peer's folder; name NAME.run or the --out folder of a join", ExitCode.USAGE)
        signed = read_manifest_file(workspace.manifest)
        return _Package(signed, load_certificate(path / CERTIFICATE_NAME), path / REVOCATIONS_NAME)
    return _Package(read_manifest_file(path), (), path.with_suffix(".revoked"))


def _issuer(package: _Package, state: Path, explicit: Path | None) -> Identity:
    """Returns the key that may invite: the creator's, or that of a member who was let."""
    creator = _key_of(package.signed.creator, state, explicit)
    if creator is not None:
        return creator
    label = package.signed.label
    if not package.chain:
        raise UserError(
            f"only members can invite to {label}: name the --out folder of your peer, or the creator's key with "
            "--identity",
            ExitCode.NOT_ADMITTED,
        )
    if not package.chain[-1].may_invite:
        raise UserError(
            f"this peer may not invite to {label}: its own invite was made without --may-invite", ExitCode.NOT_ADMITTED
        )
    subject = package.chain[-1].subject
    for path in _key_files(state, explicit):
        identity = read_identity(path)
        if identity is not None and identity.peer_id == subject:
            return identity
    raise UserError(f"the key of peer {short(subject)} is not here; name it with --identity", ExitCode.BAD_FOLDER)


def _key_of(public_key: bytes, state: Path, explicit: Path | None) -> Identity | None:
    for path in _key_files(state, explicit):
        identity = read_identity(path)
        if identity is not None and identity.public_key == public_key:
            return identity
    return None


def _key_files(state: Path, explicit: Path | None) -> list[Path]:
    return [explicit] if explicit is not None else sorted(state.glob("identity*.pem"))[:MAX_PEERS_OF_ONE_USER]


def _entry_points(peers: Sequence[str], connect_timeout_s: float) -> list[EntryPoint]:
    """Returns the entry points, the first with its peer id: it is where the invite is redeemed."""
    entries = [parse_entry_point(peer) for peer in peers]
    if not entries:
        raise InviteError("name the peer where the invite is to be redeemed: --peer with what its bootstrap printed")
    peer_id, address = entries[0]
    if peer_id is None:
        peer_id = trio.run(_identify_alone, address, connect_timeout_s)
    return [(peer_id, address), *entries[1:]]


async def _identify_alone(address: Address, connect_timeout_s: float) -> PeerId:
    identity = Identity.generate()
    endpoint = Endpoint(identity, TlsTransport(identity))
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, [])
        try:
            return await endpoint.identify(address, deadline_s=connect_timeout_s)
        except PeerError as error:
            raise UserError(
                f"{one_line(str(error))}; or name the peer as PEERID@HOST:PORT, then it need not run now",
                ExitCode.NO_PEER,
            ) from None
        finally:
            nursery.cancel_scope.cancel()
    raise AssertionError


async def _identify(endpoint: Endpoint, entries: Sequence[EntryPoint]) -> list[Contact]:
    contacts = []
    for peer_id, address in entries:
        try:
            contacts.append(Contact(peer_id or await endpoint.identify(address), (address,)))
        except PeerError as error:
            click.echo(str(error), err=True)
    if not contacts:
        raise UserError("no peer to tell; name some with --peer", ExitCode.NO_PEER)
    return contacts
