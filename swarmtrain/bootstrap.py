"""`swarmtrain bootstrap`: a long-running DHT peer that serves manifests and what they name, and trains nothing."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import click
import trio
from swarm_peer.gated import Gate
from swarm_peer.identity import Identity, short
from swarm_peer.membership import Membership, MembershipParams
from swarm_peer.records import PeerState

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.hivemind_bridge.rendezvous import check_rendezvous, open_rendezvous
from swarmtrain.invite import Invite, contact_text, parse_entry_point
from swarmtrain.link_limits import LinkLimits
from swarmtrain.local_network import LAN_GROUP
from swarmtrain.manifest import SignedManifest
from swarmtrain.naming import fingerprint
from swarmtrain.node import Node, NodeConfig, open_node
from swarmtrain.options import BootstrapOptions
from swarmtrain.relaying import relaying_line
from swarmtrain.run_lookup import LocatedRun, announce, run_payload
from swarmtrain.run_package import blobs_folder, read_manifest_file
from swarmtrain.served_run import open_served_run
from swarmtrain.status import Status
from swarmtrain.way_in import find_way_in
from swarmtrain.workspace import acquire_identity, duplicate_line

PUBLISH_INTERVAL_S = 10.0


def run_bootstrap(options: BootstrapOptions) -> int:
    """Serves until Ctrl-C.  Returns the exit code; raises UserError."""
    initial_peers = check_rendezvous(options.dht, options.initial_peers)
    manifests = {path: read_manifest_file(path) for path in options.manifests}
    key = options.identity or options.state / "bootstrap.pem"
    with acquire_identity(options.state, key, lambda line: click.echo(line, err=True)) as identity:
        return trio.run(_serve, options, manifests, initial_peers, identity)


async def _serve(
    options: BootstrapOptions,
    manifests: dict[Path, SignedManifest],
    initial_peers: tuple[str, ...],
    identity: Identity,
) -> int:
    entries = tuple(map(parse_entry_point, options.peers))
    limits = LinkLimits(up=options.limit_up, down=options.limit_down, max_connections=options.max_connections)
    config = NodeConfig(
        listen=options.listen,
        announce=options.announce,
        interface=options.interface,
        entries=entries,
        connect_timeout_s=options.connect_timeout,
        limits=limits,
        lan=LAN_GROUP if options.lan else None,
        portmap=options.portmap,
        relay_bytes_per_s=options.relay_limit,
    )
    async with (
        open_node(identity, config) as node,
        open_rendezvous(node, initial_peers, lambda line: click.echo(line, err=True)) as rendezvous,
    ):
        if not node.addresses:
            raise UserError(
                "this machine has no address that others can reach; name one with --announce HOST:PORT", ExitCode.USAGE
            )
        if entries and not await find_way_in(node, entries, lambda line: click.echo(line, err=True)):
            click.echo("no other peer reached; this one serves alone and goes on trying", err=True)
        runs = [await trio.to_thread.run_sync(_offer, node, path, signed) for path, signed in manifests.items()]
        gates = [open_served_run(node, path, run) for path, run in zip(manifests, runs, strict=True)]
        async with trio.open_nursery() as nursery:
            _introduce(node, dict(zip(manifests, runs, strict=True)), as_json=options.json)
            if node.mapping is not None:
                node.mapping.on_notice = lambda line: click.echo(line, err=True)
            if options.relay_limit:
                click.echo(relaying_line(options.relay_limit), err=True)
            closed = [gate for gate in gates if gate is not None and not gate.is_open]
            if gates and len(closed) == len(gates):
                node.relaying.serve_only(lambda peer: any(gate.has(peer) for gate in closed))
            for run, gate in zip(runs, gates, strict=True):
                if node.local is not None:
                    node.local.care_about(run.signed.run_id)
                nursery.start_soon(announce, node, run)
                if rendezvous is not None:
                    rendezvous.announce(run_payload(node, run))
                if gate is not None:
                    nursery.start_soon(_watch_run, node, gate, run)
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    click.echo("bootstrap peer leaves", err=True)
                    nursery.cancel_scope.cancel()
                    return 128 + number
    return int(ExitCode.OK)


def _offer(node: Node, path: Path, signed: SignedManifest) -> LocatedRun:
    """Puts the manifest and the blobs that it names on offer."""
    manifest = signed.manifest
    validation = _read_blob(path, manifest.validation.blob, "validation text")
    node.blobs.put(validation)
    if manifest.genesis.weights is not None:
        node.blobs.put(_read_blob(path, manifest.genesis.weights.blob, "genesis weights"))
    return LocatedRun(signed, node.blobs.put(signed.encode()), (node.contact,), validation)


def _read_blob(path: Path, name: str, what: str) -> bytes:
    from swarm_peer.blobs import BlobId, BlobStore

    folder = blobs_folder(path)
    data = BlobStore(1 << 62, folder).get(BlobId(bytes.fromhex(name)))
    if data is None:
        raise UserError(
            f"{folder} lacks the run's {what}; keep the folder beside {path.name} as `swarmtrain create` wrote it",
            ExitCode.BAD_FOLDER,
        )
    return data


async def _watch_run(node: Node, gate: Gate, run: LocatedRun) -> None:
    """Is a member of the run, so that peers meet here and monitors can ask."""
    membership = Membership(
        gate,
        node.identity,
        run.signed.run_id,
        discovery=node.discovery,
        rng=random.Random(node.identity.peer_id),
        addresses=node.addresses,
        params=MembershipParams(rpc_deadline_s=node.answer_deadline_s),
        vouch=None if gate.is_open else gate.vouch,
    )
    gate.on_out = membership.forget
    node.relaying.on_addresses(membership.move)
    membership.on_duplicate = lambda: click.echo(duplicate_line(node.identity), err=True)
    membership.publish(PeerState.WATCHING, Status().encode())
    async with trio.open_nursery() as nursery:
        await nursery.start(membership.run)
        nursery.start_soon(gate.run, lambda: [member.contact for member in membership.live()])
        try:
            while True:
                await trio.sleep(PUBLISH_INTERVAL_S)
                stats = node.endpoint.stats
                status = Status(bytes_sent=stats.bytes_sent, bytes_received=stats.bytes_received)
                membership.publish(PeerState.WATCHING, status.encode())
        finally:
            with trio.move_on_after(2.0, shield=True):
                await membership.goodbye()


def _introduce(node: Node, runs: dict[Path, LocatedRun], *, as_json: bool) -> None:
    peer = contact_text(node.identity.peer_id, node.addresses[0])
    entries = tuple((node.identity.peer_id, address) for address in node.addresses)
    invites = [
        Invite(run.signed.manifest.name, fingerprint(run.signed.creator), run.signed.run_id, entries)
        for run in runs.values()
    ]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "peer": peer,
                    "runs": [
                        {"name": invite.name, "run_id": invite.run_id.hex(), "invite": str(invite)}
                        for invite in invites
                    ],
                }
            )
        )
        return
    addresses = ", ".join(map(str, node.addresses))
    click.echo(f"bootstrap peer {short(node.identity.peer_id)} listens on {addresses}; Ctrl-C ends it", err=True)
    if not runs:
        click.echo("It serves no run yet: swarmtrain bootstrap NAME.run", err=True)
        click.echo(f"--peer {peer}")
        return
    for (path, run), invite in zip(runs.items(), invites, strict=True):
        mode = run.signed.manifest.admission.mode
        who = {"open": "Everyone joins", "allowlist": "The peers on its list join", "invite": "Its creator joins"}[mode]
        click.echo(f"{run.signed.label}: {who} with one of these lines:", err=True)
        click.echo(f"swarmtrain join '{invite}'")
        click.echo(f"swarmtrain join --run-id {invite.name} --peer {peer}")
        if mode == "invite":
            click.echo("Its creator makes an invite for each other peer:", err=True)
            click.echo(f"swarmtrain invite {path} --peer {peer}")
