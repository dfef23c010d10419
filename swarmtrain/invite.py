"""Invite links: ``swarm://NAME@FPR/RUNID?peer=PEERID@HOST:PORT&peer=…``, one line that names a run and a way in.

A link comes from a chat or a web page, so it is read as strictly as a message of a stranger. It holds no secret,
unless it has a ``ticket=…``: that part admits whoever redeems it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from swarm_peer.addresses import Address, parse_contact
from swarm_peer.certificates import Ticket, parse_ticket, ticket_text
from swarm_peer.identity import PeerId

from swarmtrain.errors import InviteError, one_line
from swarmtrain.naming import RunReference, parse_run_reference

SCHEME = "swarm://"
MAX_INVITE_CHARS = 8192
MAX_INVITE_PEERS = 16

EntryPoint = tuple[PeerId | None, Address]

_FORM = "swarm://NAME@FINGERPRINT/RUNID?peer=PEERID@HOST:PORT"


@dataclass(frozen=True, slots=True)
class Invite:
    """A run, named for good, and the peers to begin with (at most 16)."""

    name: str
    fingerprint: str
    run_id: bytes
    peers: tuple[EntryPoint, ...] = ()
    ticket: Ticket | None = None

    @property
    def reference(self) -> RunReference:
        """The run that is meant."""
        return RunReference(self.name, self.fingerprint, self.run_id)

    def __str__(self) -> str:
        parts = ["peer=" + quote(contact_text(*peer), safe="@:[].-_%") for peer in self.peers]
        if self.ticket is not None:
            parts.append("ticket=" + ticket_text(self.ticket))
        query = "&".join(parts)
        return f"{SCHEME}{self.name}@{self.fingerprint}/{self.run_id.hex()}" + (f"?{query}" if query else "")


@dataclass(frozen=True, slots=True)
class Target:
    """What a user asks for: a run and the entry points to look for it."""

    reference: RunReference
    peers: tuple[EntryPoint, ...]
    ticket: Ticket | None = None


def contact_text(peer_id: PeerId | None, address: Address) -> str:
    """Returns ``[PEERID@]HOST:PORT``, the form that ``--peer`` takes."""
    return str(address) if peer_id is None else f"{peer_id.hex()}@{address}"


def parse_invite(text: str) -> Invite:
    """Reads an invite link.

    Raises:
        InviteError: with one line that says what is wrong with it.
    """
    text = text.strip()
    if len(text) > MAX_INVITE_CHARS:
        raise InviteError(f"invite link: {len(text)} characters, more than {MAX_INVITE_CHARS}")
    if not text.startswith(SCHEME):
        raise InviteError(f"not an invite link: {one_line(text, 60)!r} (a link looks like {_FORM})")
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise InviteError("invite link: has characters that no link has; copy it again, in quotes")
    target, _, query = text.removeprefix(SCHEME).partition("?")
    label, slash, run_id = target.partition("/")
    if not slash or "@" not in label:
        raise InviteError(f"invite link: {one_line(target, 60)!r} is not NAME@FINGERPRINT/RUNID")
    reference = parse_run_reference(label)
    try:
        identifier = parse_run_reference(run_id).run_id
    except InviteError:
        identifier = None
    if identifier is None:
        raise InviteError("invite link: the run id is not 64 hex digits; was the link cut off?")
    if reference.name is None or reference.fingerprint is None:
        raise InviteError(f"invite link: {one_line(label, 60)!r} is not NAME@FINGERPRINT")
    peers, ticket = _parse_query(query)
    if ticket is not None and ticket.chain[-1].run_id != identifier:
        raise InviteError("invite link: its ticket is for another run; copy the whole link again")
    return Invite(reference.name, reference.fingerprint, identifier, peers, ticket)


def parse_entry_point(text: str) -> EntryPoint:
    """Reads ``[PEERID@]HOST:PORT`` as given to ``--peer``. Raises :class:`InviteError`."""
    try:
        peer_id, address = parse_contact(text)
    except ValueError as error:
        raise InviteError(one_line(str(error))) from None
    if address.port == 0:
        raise InviteError(f"{one_line(text, 80)!r}: port 0 cannot be dialled; use the port that the peer printed")
    return peer_id, address


def resolve_target(run: str | None, invite: str | None, peers: Sequence[str]) -> Target:
    """Merges what ``--run-id``, an invite link and ``--peer`` say. Peers given by hand come first.

    Raises:
        InviteError: neither or both of run and invite are given, or one cannot be read.
    """
    if (run is None) == (invite is None):
        raise InviteError("give either an invite link or --run-id NAME with --peer HOST:PORT")
    entries = [parse_entry_point(peer) for peer in peers]
    ticket: Ticket | None = None
    if invite is not None:
        link = parse_invite(invite)
        entries += [peer for peer in link.peers if peer not in entries]
        reference = link.reference
        ticket = link.ticket
    else:
        reference = parse_run_reference(run or "")
    return Target(reference, tuple(entries), ticket)


def _parse_query(query: str) -> tuple[tuple[EntryPoint, ...], Ticket | None]:
    peers: list[EntryPoint] = []
    ticket: Ticket | None = None
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key == "ticket" and equals and ticket is None:
            try:
                ticket = parse_ticket(unquote(value))
            except ValueError:
                # The text is a secret, so the message does not show it.
                raise InviteError("invite link: its ticket cannot be read; was the link cut off?") from None
            continue
        if key != "peer" or not equals:
            shown = key if key == "ticket" else part
            raise InviteError(f"invite link: {one_line(shown, 60)!r} is not peer=PEERID@HOST:PORT")
        peers.append(parse_entry_point(unquote(value)))
        if len(peers) > MAX_INVITE_PEERS:
            raise InviteError(f"invite link: more than {MAX_INVITE_PEERS} peers")
    return tuple(dict.fromkeys(peers)), ticket
