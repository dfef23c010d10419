"""From what a user typed to a verified run: manifest, validation text, genesis.

Everything here comes from strangers; nothing is believed before its hash and signature are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_peer.addresses import Contact
from swarm_peer.discovery import FoundRun
from swarm_peer.errors import PeerError
from swarm_peer.records import RunPayload

from swarmtrain.errors import ExitCode, Incompatible, ManifestError, UserError
from swarmtrain.manifest import MAX_MANIFEST_BYTES, SignedManifest, decode_manifest
from swarmtrain.naming import RunReference, fingerprint
from swarmtrain.node import Node

SMALL_BLOB_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class LocatedRun:
    """A verified run, who announces it, and the blob of its manifest."""

    signed: SignedManifest
    manifest_blob: bytes
    holders: tuple[Contact, ...]
    validation: bytes


async def locate_run(node: Node, reference: RunReference) -> LocatedRun:
    """Finds the one run that `reference` means and fetches its manifest and validation text.

    Raises UserError: unknown (with the runs that exist), ambiguous (with the names to choose from), unreachable.
    """
    found = await node.discovery.find_runs(reference.name)
    matching = [run for run in found if _matches(reference, run)]
    run_ids = {run.payload.run_id for run in matching}
    if not run_ids:
        raise await _unknown_run(node, reference)
    if len(run_ids) > 1:
        names = sorted({f"{run.payload.name}@{fingerprint(run.payload.creator)}" for run in matching})
        choose = names if len(names) > 1 else sorted(run_id.hex() for run_id in run_ids)
        raise UserError(
            f"several runs are called {reference}: choose one of {', '.join(choose)} with --run-id", ExitCode.NO_RUN
        )
    holders = tuple(run.announcer for run in matching)
    signed = await _fetch_manifest(node, matching)
    validation = await _fetch_validation(node, signed, holders)
    return LocatedRun(signed, matching[0].payload.manifest_blob, holders, validation)


async def announce(node: Node, run: LocatedRun) -> None:
    """Makes this peer one of those that serve the run's manifest."""
    await node.discovery.announce_run(run_payload(node, run))


def run_payload(node: Node, run: LocatedRun) -> RunPayload:
    """Returns what this peer announces about a run."""
    return RunPayload(
        run_id=run.signed.run_id,
        name=run.signed.manifest.name,
        creator=run.signed.creator,
        manifest_blob=run.manifest_blob,
        addresses=node.addresses,
    )


async def fetch_genesis_file(
    node: Node, run: LocatedRun, holders: Sequence[Contact], progress: Callable[[int, int], None]
) -> bytes:
    """Fetches the weights that the creator named.  Raises UserError."""
    weights = run.signed.manifest.genesis.weights
    if weights is None:
        raise ValueError("this run starts from a seed")
    # A fiftieth of a megabyte a second is the slowest link on which a run makes sense.
    deadline_s = 120.0 + weights.size_bytes / 20_000
    return await _fetch(node, weights.blob, "genesis weights", holders, weights.size_bytes, deadline_s, progress)


def _matches(reference: RunReference, run: FoundRun) -> bool:
    return reference.matches(run.payload.name, run.payload.creator, run.payload.run_id)


async def _unknown_run(node: Node, reference: RunReference) -> UserError:
    others = {f"{run.payload.name}@{fingerprint(run.payload.creator)}" for run in await node.discovery.find_runs(None)}
    known = ", ".join(sorted(others)[:20]) if others else "none; start one with `swarmtrain bootstrap NAME.run`"
    return UserError(f"no run {reference} is known here; runs that exist: {known}", ExitCode.NO_RUN)


async def _fetch_manifest(node: Node, matching: Sequence[FoundRun]) -> SignedManifest:
    problems: list[str] = []
    for run in matching:
        try:
            data = await node.blobs.fetch_any(
                run.payload.manifest_blob,
                [run.announcer],
                max_size_bytes=MAX_MANIFEST_BYTES,
                deadline_s=SMALL_BLOB_DEADLINE_S,
            )
            signed = decode_manifest(data)
        except PeerError as error:
            problems.append(str(error))
            continue
        except ManifestError as error:
            problems.append(error.message)
            continue
        if signed.run_id == run.payload.run_id:
            return signed
        problems.append(f"peer {run.announcer.peer_id.hex()[:8]} serves another manifest than it announces")
    raise Incompatible(f"the run's manifest cannot be had: {'; '.join(dict.fromkeys(problems))}")


async def _fetch_validation(node: Node, signed: SignedManifest, holders: Sequence[Contact]) -> bytes:
    section = signed.manifest.validation
    return await _fetch(
        node,
        section.blob,
        "validation text",
        holders,
        section.size_bytes,
        SMALL_BLOB_DEADLINE_S,
        lambda done, all_: None,
    )


async def _fetch(
    node: Node,
    blob: str,
    what: str,
    holders: Sequence[Contact],
    size_bytes: int,
    deadline_s: float,
    progress: Callable[[int, int], None],
) -> bytes:
    try:
        data = await node.blobs.fetch_any(
            bytes.fromhex(blob), holders, max_size_bytes=size_bytes, deadline_s=deadline_s, progress=progress
        )
    except PeerError as error:
        raise UserError(f"the run's {what} cannot be had: {error}", ExitCode.NO_PEER) from None
    if len(data) != size_bytes:
        raise Incompatible(f"{what}: the run has {size_bytes} bytes, the peers serve {len(data)}")
    return data
