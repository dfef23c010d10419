"""``NAME.door``: what lets whoever serves a run by invitation take part in it.

``create`` writes it beside ``NAME.run``: a ticket that needs no redeemer, as there is nobody yet to redeem one. Who
has the file can be a member, so it is private; its id can be revoked like a peer's.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Final

import msgspec
from swarm_peer.certificates import MAX_CHAIN_BYTES, Chain, Ticket, claim, issue_ticket
from swarm_peer.identity import Identity

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.manifest import SignedManifest
from swarmtrain.private_file import read_private, write_private

DOOR_LIFETIME_S: Final = 10 * 365 * 86400


def door_file(manifest_file: Path) -> Path:
    """Returns the door that belongs to a ``NAME.run`` file."""
    return manifest_file.with_suffix(".door")


def write_door(manifest_file: Path, signed: SignedManifest, creator: Identity) -> None:
    """Writes the door of a run, unless there is one already.  Raises UserError."""
    path = door_file(manifest_file)
    held = read_door(manifest_file)
    if held is not None and held.chain[-1].run_id == signed.run_id:
        return
    not_after = int(time.time()) + DOOR_LIFETIME_S
    ticket = issue_ticket(creator, (), signed.run_id, secrets.token_bytes(32), not_after=not_after)
    write_private(path, msgspec.msgpack.encode(ticket))


def read_door(manifest_file: Path) -> Ticket | None:
    """Reads the door beside ``NAME.run``, None if there is none.  Raises UserError."""
    path = door_file(manifest_file)
    data = read_private(path, MAX_CHAIN_BYTES)
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=Ticket)
    except (msgspec.MsgspecError, RecursionError):
        raise UserError(
            f"{path} is damaged; move it away and sign the run again: swarmtrain create", ExitCode.BAD_FOLDER
        ) from None


def certificate_of_door(manifest_file: Path, signed: SignedManifest, peer_id: bytes) -> Chain:
    """Returns the chain by which the peer that has the door takes part; () without a door of this run."""
    ticket = read_door(manifest_file)
    if ticket is None or ticket.chain[-1].run_id != signed.run_id:
        return ()
    return claim(ticket, peer_id)
