"""A run as a bootstrap peer serves it: its gate, its place in the run, and the redemption of invites.

Beside ``NAME.run`` it keeps ``NAME.redeemed`` (which invites were used, by whom) and ``NAME.revoked``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import click
import trio
from swarm_peer.admission import Admission, Redemptions, decode_redemptions
from swarm_peer.errors import Refusal
from swarm_peer.gated import Gate
from swarm_peer.redeeming import Redeemer

from swarmtrain.admission import charter_of, keep_revocations
from swarmtrain.door import certificate_of_door, door_file
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.node import Node
from swarmtrain.private_file import read_private, write_private
from swarmtrain.run_lookup import LocatedRun

MAX_REDEEMED_BYTES: Final = 1 << 26


def open_served_run(node: Node, manifest_file: Path, run: LocatedRun) -> Gate | None:
    """Opens the gate of a run, and redeems its invites.

    Returns None, after a line on stderr, where this peer may not take part: it then serves the manifest alone.
    """
    charter = charter_of(run.signed)
    admission = Admission(charter, node.identity.peer_id)
    if admission.needs_introduction and node.identity.public_key != charter.creator:
        admission.chain = certificate_of_door(manifest_file, run.signed, node.identity.peer_id)
    gate = Gate(node.endpoint, admission, rng=random.Random(node.identity.peer_id))
    if gate.is_open:
        return gate
    keep_revocations(gate, manifest_file.with_suffix(".revoked"))
    if (weights := run.signed.manifest.genesis.weights) is not None:
        node.blobs.door.reserve(gate, bytes.fromhex(weights.blob))
    try:
        admission.require_self(0.0)
    except Refusal as denial:
        remedy = (
            f"put {door_file(manifest_file).name} beside it"
            if admission.needs_introduction
            else f"start it as a listed peer, or list its id {node.identity.peer_id.hex()}"
        )
        click.echo(
            f"{run.signed.label}: this peer may not take part ({denial.code}) and serves the manifest only; {remedy}",
            err=True,
        )
        return None
    gate.on_expelled = lambda: click.echo(f"{run.signed.label}: this peer was revoked by the creator", err=True)
    if admission.needs_introduction:
        _redeem_invites(node, admission, manifest_file.with_suffix(".redeemed"))
    return gate


def _redeem_invites(node: Node, admission: Admission, path: Path) -> None:
    data = read_private(path, MAX_REDEEMED_BYTES)
    try:
        redemptions = decode_redemptions(data) if data is not None else Redemptions()
    except ValueError:
        # Without it, used invites would be good again: that must not happen by itself.
        raise UserError(
            f"{path} is damaged, so this peer does not know which invites were used; restore it from a copy, or move "
            "it away if no invite is open",
            ExitCode.BAD_FOLDER,
        ) from None

    async def save(content: bytes) -> None:
        await trio.to_thread.run_sync(write_private, path, content)

    Redeemer(node.endpoint, node.identity, admission, redemptions, save=save)
