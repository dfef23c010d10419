"""`swarmtrain join`: find the run, check everything, then be a training peer of it until it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import trio
from swarm_peer.certificates import REVOKED
from swarm_peer.errors import Refusal
from swarm_peer.identity import Identity

from swarmtrain.admission import enter_run, not_admitted, save_certificate
from swarmtrain.data import TokenFile, prepare_tokens
from swarmtrain.documents import file_documents, python_documents
from swarmtrain.errors import ExitCode, Incompatible, ManifestError, UserError
from swarmtrain.events import EventLog
from swarmtrain.genesis import genesis_state
from swarmtrain.genesis_file import load_genesis
from swarmtrain.hivemind_bridge.rendezvous import Rendezvous, check_rendezvous, enter_swarm, open_rendezvous
from swarmtrain.invite import Target
from swarmtrain.link_limits import LinkLimits
from swarmtrain.local_network import LAN_GROUP
from swarmtrain.manifest import Manifest, require_equal
from swarmtrain.model_config import ModelConfig, parameter_count, parameter_specs
from swarmtrain.node import Node, NodeConfig, open_node
from swarmtrain.options import JoinOptions
from swarmtrain.own_run import own_run
from swarmtrain.progress import Progress
from swarmtrain.relaying import relaying_line
from swarmtrain.run_lookup import LocatedRun, fetch_genesis_file, locate_run, run_payload
from swarmtrain.saved_peers import SavedPeers
from swarmtrain.snapshots import DENSE_BYTES_PER_WEIGHT
from swarmtrain.tokenizer import ByteTokenizer
from swarmtrain.training_peer import Result, TrainingJob, TrainingPeer
from swarmtrain.way_in import target_with_saved
from swarmtrain.workspace import Workspace, acquire_identity, check_room, open_workspace

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("swarmtrain.join")

PYTHON_TEXT_BYTES = 2_000_000
TYPICAL_UPLINK_BITS_PER_S = 20e6


def run_join(options: JoinOptions) -> int:
    """Joins a run and stays until its end.  Returns the exit code; raises UserError."""
    initial_peers = check_rendezvous(options.dht, options.initial_peers)
    target = target_with_saved(options.run, options.invite, options.peers, options.state)
    with Progress() as progress, acquire_identity(options.state, options.identity, progress.say) as identity:
        result, exit_code = trio.run(_join, options, target, initial_peers, identity, progress)
    if result is not None and result.merge is not None:
        _print_result(options, result)
    return exit_code


async def _join(
    options: JoinOptions, target: Target, initial_peers: tuple[str, ...], identity: Identity, progress: Progress
) -> tuple[Result | None, int]:
    limits = LinkLimits(up=options.limit_up, down=options.limit_down, max_connections=options.max_connections)
    config = NodeConfig(
        limits=limits,
        relay_bytes_per_s=options.relay_limit,
        listen=None if options.relay_only else options.listen,
        announce=options.announce,
        interface=options.interface,
        entries=target.peers,
        connect_timeout_s=options.connect_timeout,
        lan=LAN_GROUP if options.lan else None,
        portmap=options.portmap,
    )
    async with (
        open_node(identity, config) as node,
        open_rendezvous(node, initial_peers, progress.say) as rendezvous,
    ):
        where = f"listens on {', '.join(map(str, node.addresses))}" if node.addresses else "only dials others"
        progress.say(where)
        run = await _find_run(node, rendezvous, target, options, progress.say)
        if node.mapping is not None:
            node.mapping.on_notice = progress.say
        if rendezvous is not None:
            rendezvous.announce(run_payload(node, run))
        if node.local is not None:
            node.local.care_about(run.signed.run_id)
        manifest = run.signed.manifest
        out = options.out or Path("runs") / manifest.name
        weights = parameter_count(manifest.model.config())
        check_room(out, weights)
        gate = await enter_run(node, run, target, folder=out)
        node.relaying.belong_to(gate)
        await _settle(node, options, progress.say)
        _introduce(run, weights, progress.say)
        tokens = await trio.to_thread.run_sync(_prepare_data, manifest, options)
        with open_workspace(out, run.signed, resume=options.resume) as workspace, EventLog(workspace.events) as events:
            workspace.validation.write_bytes(run.validation)
            save_certificate(gate, workspace.root)
            genesis = await _make_genesis(node, run, workspace, progress)
            job = TrainingJob(
                workspace=workspace,
                token_file=str(tokens.path),
                token_dtype=tokens.tokens.dtype.str,
                device=options.device,
                threads=options.threads or default_threads(),
                checkpoint_interval_s=options.checkpoint_s,
                linger_s=options.linger_s,
                resume=options.resume,
                genesis=genesis,
            )
            peer = TrainingPeer(node, gate, run, job, events)
            peer.account.on_notice = progress.say
            if rendezvous is not None:
                peer.bridge_state = lambda: rendezvous.state
            peer.on_transfer = lambda done, total: progress.show_transfer("weights", done, total)
            peer.account.on_status = lambda status: progress.show_training(status, len(peer.members.candidates()))
            saved = SavedPeers(
                options.state,
                run_id=run.signed.run_id,
                name=manifest.name,
                creator=run.signed.creator,
                own_id=identity.peer_id,
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(saved.keep, peer.members.contacts)
                nursery.start_soon(node.relaying.keep_settled)
                ended = await _run_until_signal(peer, progress)
                nursery.cancel_scope.cancel()
            if peer.is_expelled:
                denial = Refusal(REVOKED, "this peer was revoked by the run's creator while it trained")
                raise not_admitted(run.signed, identity.peer_id, denial)
            return ended


async def _run_until_signal(peer: TrainingPeer, progress: Progress) -> tuple[Result | None, int]:
    """First Ctrl-C: goodbye and checkpoint.  Second: stop at once."""
    exit_code = int(ExitCode.OK)
    result: Result | None = None
    async with trio.open_nursery() as nursery:

        async def obey_signals() -> None:
            nonlocal exit_code
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    if exit_code:
                        progress.say("stopped at once")
                        nursery.cancel_scope.cancel()
                        return
                    exit_code = 128 + number
                    progress.say("leaving: saving a checkpoint and saying goodbye; once more stops at once")
                    peer.stop()

        nursery.start_soon(obey_signals)
        result = await peer.run()
        nursery.cancel_scope.cancel()
    return result, exit_code


# ------------------------------------------------------------------------------------------------------ preparation


async def _find_run(
    node: Node, rendezvous: Rendezvous | None, target: Target, options: JoinOptions, say: Callable[[str], None]
) -> LocatedRun:
    """Finds the run by way of others or, to be resumed while nobody answers, in this peer's own folder."""
    if node.local is not None and target.reference.run_id is not None:
        node.local.care_about(target.reference.run_id)
    try:
        await enter_swarm(node, rendezvous, target, say)
        return await locate_run(node, target.reference)
    except UserError as error:
        if error.exit_code not in (ExitCode.NO_RUN, ExitCode.NO_PEER):
            raise
        failure = error
    name = target.reference.name
    folder = options.out or (Path("runs") / name if name else None)
    if options.resume and folder is not None:
        run = await trio.to_thread.run_sync(own_run, folder, target.reference, node.blobs)
        if run is not None:
            say(f"{failure.message}")
            say(f"training goes on alone from {folder}; the others are looked for all the time")
            return run
    raise failure


async def _settle(node: Node, options: JoinOptions, say: Callable[[str], None]) -> None:
    """Finds out how others reach this peer, and says so."""
    can_be_reached = await node.relaying.settle()
    if node.relaying.reach.kind != "unknown":
        say(node.relaying.reach.line)
    if not can_be_reached:
        say("no public peer relays for this one yet: it meets those that it can dial")
    elif options.announce and options.relay_limit:
        say(relaying_line(options.relay_limit))


def _introduce(run: LocatedRun, weights: int, say: Callable[[str], None]) -> None:
    manifest = run.signed.manifest
    say(f"run {run.signed.label}: {weights / 1e6:.2f}M weights, {manifest.optimizer.total_steps} steps")
    size = DENSE_BYTES_PER_WEIGHT * weights
    seconds = 8 * size / TYPICAL_UPLINK_BITS_PER_S
    say(f"an exchange moves up to {size / 1e6:.1f} MB each way, about {seconds:.1f} s on a 20 Mbit/s link")


def _prepare_data(manifest: Manifest, options: JoinOptions) -> TokenFile:
    """Tokenises this peer's text.  Raises UserError when the run needs other data."""
    kind = manifest.data.kind
    if kind == "python":
        if options.data:
            raise UserError("this run trains on the text that ships with Python; leave out --data", ExitCode.USAGE)
        return prepare_tokens(lambda: python_documents(PYTHON_TEXT_BYTES), ByteTokenizer(), options.state / "tokens")
    if not options.data:
        which = "your own text" if kind == "own" else f"the data set with hash {manifest.data.content_hash}"
        raise UserError(f"this run trains on {which}: name it with --data PATH", ExitCode.USAGE)
    tokens = prepare_tokens(lambda: file_documents(options.data), ByteTokenizer(), options.state / "tokens")
    if kind == "named":
        require_equal("data.content_hash", manifest.data.content_hash, tokens.digest.hex(), where="--data")
    return tokens


async def _make_genesis(node: Node, run: LocatedRun, workspace: Workspace, progress: Progress) -> NDArray[np.float32]:
    """Returns the flat genesis: from the manifest's seed, or fetched and checked against its hash."""
    genesis = run.signed.manifest.genesis
    config = run.signed.manifest.model.config()
    if genesis.weights is None:
        state = await trio.to_thread.run_sync(genesis_state, config, genesis.seed or 0)
        return _flat(state, config)
    path = workspace.root / "genesis.safetensors"
    digest = bytes.fromhex(genesis.weights.digest)
    if path.exists():
        with contextlib.suppress(ManifestError, Incompatible, OSError):  # then it is fetched anew
            return _flat(await trio.to_thread.run_sync(load_genesis, path, config, digest), config)
    data = await fetch_genesis_file(
        node, run, run.holders, lambda done, total: progress.show_transfer("genesis", done, total)
    )
    await trio.to_thread.run_sync(path.write_bytes, data)
    return _flat(await trio.to_thread.run_sync(load_genesis, path, config, digest), config)


def _flat(state: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> NDArray[np.float32]:
    return np.concatenate([state[name].reshape(-1) for name, _ in parameter_specs(config)])


def default_threads() -> int:
    """Returns the cores for torch: one less than this process may use, for the node and the desktop."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def _print_result(options: JoinOptions, result: Result) -> None:
    assert result.merge is not None
    out = options.out
    if options.json:
        click.echo(
            json.dumps(
                {
                    "step": result.step,
                    "validation_loss": result.validation_loss,
                    "merged_validation_loss": result.merged_validation_loss,
                    "replicas": result.merge.replicas,
                    "spread": result.merge.spread,
                    "model": str(out / "model") if out else None,
                }
            )
        )
        return
    click.echo(
        f"merged {result.merge.replicas} replicas: validation loss {result.merged_validation_loss:.4f} "
        f"(own replica {result.validation_loss:.4f}), spread {result.merge.spread:.2%}"
    )
