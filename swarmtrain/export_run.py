"""`swarmtrain export`: takes a model home, merged from the live replicas of a run or read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import trio
from swarm_peer.errors import PeerError
from swarm_peer.identity import Identity, short
from swarm_peer.members import Member
from swarm_peer.membership import list_members
from swarm_peer.records import PeerState
from swarm_peer.rpc import Caller

from swarmtrain import __version__
from swarmtrain.admission import enter_run
from swarmtrain.donor import Joiner, NoDonor
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.export import ExportCard, export_model
from swarmtrain.invite import Target
from swarmtrain.layout import FlatLayout
from swarmtrain.manifest import SignedManifest
from swarmtrain.merge import Merge, WeightedReplica, merge_replicas
from swarmtrain.model_config import parameter_specs
from swarmtrain.node import Node, NodeConfig, open_node
from swarmtrain.options import ExportOptions
from swarmtrain.progress import Progress
from swarmtrain.run_lookup import LocatedRun, locate_run
from swarmtrain.run_package import read_manifest_file
from swarmtrain.snapshots import Payload, PayloadInvalid, SnapshotLibrary
from swarmtrain.status import decode_status
from swarmtrain.way_in import reach_entries, target_with_saved
from swarmtrain.workspace import Workspace, read_identity

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REPLICAS = 32
TRANSFER_DEADLINE_S = 3600.0
MEMBERS_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Take:
    """What goes into the folder, and how the card words it."""

    signed: SignedManifest
    merge: Merge
    how: str
    command: str


def run_export(options: ExportOptions) -> int:
    """Writes the model folder and prints its path.  Returns the exit code; raises UserError."""
    if options.checkpoint is not None:
        take = _from_checkpoint(options.checkpoint)
    else:
        target = target_with_saved(options.run, options.invite, options.peers, options.state)
        with Progress() as progress:
            take = trio.run(_from_swarm, target, options, progress)
    manifest = take.signed.manifest
    out = options.out or Path("exported") / manifest.name
    config = manifest.model.config()
    layout = FlatLayout.of(parameter_specs(config))
    weights = take.merge.weights
    state = {span.name: weights[span.start : span.stop].reshape(span.shape) for span in layout.spans}
    card = ExportCard(
        run_name=manifest.name,
        run_id=take.signed.run_id,
        peers=take.merge.replicas,
        tokens=take.merge.tokens,
        merge=take.how,
        spread=take.merge.spread if take.merge.replicas > 1 else None,
        validation_loss=None,
        command=take.command,
        swarmtrain_version=__version__,
    )
    export_model(out, state, config, card, dtype=options.dtype)
    click.echo(f"merged {take.merge.replicas} replicas, spread {take.merge.spread:.2%}", err=True)
    click.echo(str(out))
    return int(ExitCode.OK)


# ------------------------------------------------------------------------------------------------------- from the swarm


async def _from_swarm(target: Target, options: ExportOptions, progress: Progress) -> _Take:
    config = NodeConfig(listen="[::]:0", entries=target.peers, serve=False, connect_timeout_s=options.connect_timeout)
    async with open_node(Identity.generate(), config) as node:
        await reach_entries(node, target.peers, progress.say)
        run = await locate_run(node, target.reference)
        gate = await enter_run(node, run, target, creator=read_identity(options.state))
        members = await _members(gate, run)
        replicas = await _fetch_replicas(node, gate, run, members, progress)
        if not replicas:
            raise UserError(
                f"no replica of run {run.signed.manifest.name} can be had: none of its {len(members)} known peers "
                "trains or has finished; export a checkpoint with --checkpoint OUT",
                ExitCode.NO_PEER,
            )
        merge = await trio.to_thread.run_sync(merge_replicas, replicas)
        name = run.signed.manifest.name
        return _Take(
            run.signed,
            merge,
            "token-weighted mean of the live replicas",
            f"swarmtrain export --run-id {name} --peer HOST:PORT",
        )


async def _members(caller: Caller, run: LocatedRun) -> list[Member]:
    """Returns the members as told by whoever announces the run."""
    found: dict[bytes, Member] = {}
    for holder in run.holders:
        try:
            members = await list_members(caller, holder, run.signed.run_id, deadline_s=MEMBERS_DEADLINE_S)
        except PeerError:
            continue
        for member in members:
            known = found.get(member.contact.peer_id)
            if known is None or known.seq < member.seq:
                found[member.contact.peer_id] = member
        if any(member.state in (PeerState.TRAINING, PeerState.FINISHED) for member in found.values()):
            break
    return list(found.values())


async def _fetch_replicas(
    node: Node, caller: Caller, run: LocatedRun, members: list[Member], progress: Progress
) -> list[WeightedReplica]:
    layout = FlatLayout.of(parameter_specs(run.signed.manifest.model.config()))
    joiner = Joiner(
        caller,
        run_id=run.signed.run_id,
        library=SnapshotLibrary(layout),
        blobs=node.blobs,
        offload=trio.to_thread.run_sync,
    )
    able = [m for m in members if m.state in (PeerState.TRAINING, PeerState.FINISHED)][:MAX_REPLICAS]
    replicas = []
    for number, member in enumerate(able, 1):

        def show(done: int, total: int, number: int = number) -> None:
            progress.show_transfer(f"replica {number} of {len(able)}", done, total)

        try:
            replicas.append(await _fetch_replica(joiner, member, show))
        except (PeerError, PayloadInvalid, NoDonor) as error:
            progress.say(f"peer {short(member.contact.peer_id)} is left out: {error}")
    return replicas


async def _fetch_replica(joiner: Joiner, member: Member, show: Callable[[int, int], None]) -> WeightedReplica:
    status = decode_status(member.status)
    if status.final is not None:
        final = status.final
        payload = Payload(final.snapshot, b"", final.blob, final.size_bytes)
        snapshot = await joiner.fetch_payload(payload, member.contact, deadline_s=TRANSFER_DEADLINE_S, progress=show)
        return WeightedReplica(snapshot.bits, final.tokens)
    donation = await joiner.fetch([member.contact], deadline_s=TRANSFER_DEADLINE_S, progress=show)
    return WeightedReplica(donation.snapshot.bits, donation.tokens)


# ---------------------------------------------------------------------------------------------------- from a checkpoint


def _from_checkpoint(folder: Path) -> _Take:
    """Reads the newest checkpoint of a peer's --out folder, or of its checkpoints folder."""
    from swarmtrain.checkpoint import load_checkpoint

    workspace = Workspace(folder if (folder / "run.manifest").exists() else folder.parent)
    if not workspace.manifest.exists():
        raise UserError(
            f"{folder} is no peer's folder: it has no {workspace.manifest.name}; name the --out folder of a "
            "`swarmtrain join`",
            ExitCode.BAD_FOLDER,
        )
    signed = read_manifest_file(workspace.manifest)
    tensors, meta = load_checkpoint(workspace.checkpoints)
    size = FlatLayout.of(parameter_specs(signed.manifest.model.config())).size
    theta = tensors.get("replica.theta")
    if theta is None or theta.numel() != size:
        raise UserError(f"{workspace.checkpoints}: the checkpoint does not fit the run's model", ExitCode.BAD_FOLDER)
    weights: NDArray[np.float32] = theta.float().numpy()
    tokens = int(meta["tokens_total"])
    return _Take(
        signed,
        Merge(weights, 0.0, 1, tokens),
        f"one replica's checkpoint at step {meta['step']}",
        f"swarmtrain export --checkpoint {folder.name}",
    )
