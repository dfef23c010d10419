"""``swarmtrain create``: a run file becomes a signed manifest and the blobs that it names."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import click
from swarm_peer.blobs import BlobStore
from swarm_peer.identity import Identity

from swarmtrain import __version__
from swarmtrain.documents import python_validation_text
from swarmtrain.door import door_file, write_door
from swarmtrain.errors import ExitCode, RunFileError, UserError
from swarmtrain.export import state_digest
from swarmtrain.genesis_file import encode_genesis
from swarmtrain.invite import Invite, parse_entry_point
from swarmtrain.manifest import (
    MAX_VALIDATION_BYTES,
    GenesisSection,
    Manifest,
    ModelSection,
    SignedManifest,
    ValidationSection,
    WeightsSection,
    differences,
    mismatch,
    sign_manifest,
)
from swarmtrain.naming import fingerprint
from swarmtrain.options import CreateOptions
from swarmtrain.pretrained import load_export
from swarmtrain.run_package import SUFFIX, blobs_folder, write_manifest_file
from swarmtrain.runfile import RunFile, load_run_file
from swarmtrain.tokenizer import VOCAB_SIZE

_SPARE_DISK_BYTES = 50_000_000


def run_create(options: CreateOptions) -> None:
    """Signs the run, writes its files and says how to go on: results on stdout, talk on stderr."""
    identity = Identity.load_or_create(options.identity or options.state / "identity.pem")
    run_file = load_run_file(options.run_file)
    manifest_file = options.out / (run_file.name + SUFFIX)
    signed = make_run(run_file, identity, manifest_file)
    peers = tuple(map(parse_entry_point, options.peers))
    invite = Invite(signed.manifest.name, fingerprint(signed.creator), signed.run_id, peers)
    if options.json:
        report = {
            "name": signed.manifest.name,
            "run_id": signed.run_id.hex(),
            "fingerprint": invite.fingerprint,
            "invite": str(invite),
            "manifest": str(manifest_file),
            "blobs": str(blobs_folder(manifest_file)),
        }
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"run id  {signed.run_id.hex()}")
    click.echo(f"invite  {invite}")
    _explain(signed, manifest_file, invite)


def make_run(run_file: RunFile, identity: Identity, manifest_file: Path) -> SignedManifest:
    """Makes the signed manifest of ``run_file`` and writes it and its blobs to ``manifest_file`` and beside it.

    Raises:
        UserError: with one line, where a text or folder that the run file names cannot be used.
    """
    blobs = blobs_folder(manifest_file)
    validation = _validation_text(run_file)
    model, genesis = _model_and_genesis(run_file, blobs)
    if model.vocab_size < VOCAB_SIZE:
        raise UserError(
            f"the model has {model.vocab_size} tokens, and the byte tokenizer needs {VOCAB_SIZE}", ExitCode.INCOMPATIBLE
        )
    if len(validation) <= model.context_length:
        raise UserError(
            f"the validation text has {len(validation)} bytes, and the model's context_length is "
            f"{model.context_length}; give a longer text in [validation]",
            ExitCode.USAGE,
        )
    manifest = Manifest(
        name=run_file.name,
        creator=identity.public_key.hex(),
        created_by=f"swarmtrain {__version__}",
        model=model,
        tokenizer=run_file.tokenizer,
        data=run_file.data,
        validation=ValidationSection(blob=_store(blobs, validation), size_bytes=len(validation)),
        optimizer=run_file.optimizer,
        round=run_file.round,
        mixer=run_file.mixer,
        genesis=genesis,
        admission=run_file.admission,
    )
    signed = sign_manifest(manifest, identity)
    write_manifest_file(manifest_file, signed)
    if manifest.admission.mode == "invite":
        write_door(manifest_file, signed, identity)
    return signed


def _validation_text(run_file: RunFile) -> bytes:
    path = run_file.validation_text
    if path is None:
        return python_validation_text()[:MAX_VALIDATION_BYTES]
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_VALIDATION_BYTES + 1)
    except OSError as error:
        raise RunFileError(f"{run_file.path}: [validation] text: {path}: {error.strerror or error}") from None
    if len(text) > MAX_VALIDATION_BYTES:
        raise RunFileError(
            f"{run_file.path}: [validation] text: {path} is larger than {MAX_VALIDATION_BYTES} bytes; "
            "every peer fetches and evaluates it, so choose a part"
        )
    return text


def _model_and_genesis(run_file: RunFile, blobs: Path) -> tuple[ModelSection, GenesisSection]:
    """Returns the model, from the run file or the genesis folder, and what the manifest says of its weights."""
    if run_file.genesis_weights is None:
        return run_file.model or ModelSection(), GenesisSection(seed=run_file.genesis_seed or 0)
    state, config = load_export(run_file.genesis_weights)
    model = ModelSection(**asdict(config))
    if run_file.model is not None:
        for field, wanted, found in differences(run_file.model, model):
            raise mismatch(f"{run_file.path}: [model] {field}", wanted, found, where=str(run_file.genesis_weights))
    data = encode_genesis(state)
    _check_disk(blobs, len(data))
    digest = state_digest(state).hex()
    return model, GenesisSection(weights=WeightsSection(blob=_store(blobs, data), size_bytes=len(data), digest=digest))


def _store(folder: Path, data: bytes) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return BlobStore(1 << 62, folder).put(data).hex()
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None


def _check_disk(folder: Path, size_bytes: int) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < size_bytes + _SPARE_DISK_BYTES:
        raise UserError(
            f"not enough disk: the weights take {size_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free in {folder}",
            ExitCode.NO_ROOM,
        )


def _explain(signed: SignedManifest, manifest_file: Path, invite: Invite) -> None:
    blobs = blobs_folder(manifest_file)
    lines = [
        f"Signed {signed.label} as {manifest_file} (keep {blobs} beside it).",
        "Next, on a machine that the others can reach:",
        f"  swarmtrain bootstrap {manifest_file}",
    ]
    mode = signed.manifest.admission.mode
    if mode == "invite":
        door = door_file(manifest_file)
        lines.insert(1, f"{door} lets that machine take part: take it there too, and show it to nobody.")
        lines += [
            "You join with the line that it prints. For each other peer, make an invite:",
            f"  swarmtrain invite {manifest_file} --peer HOST:PORT",
        ]
    elif invite.peers:
        lines += ["Then everyone joins with:", f"  swarmtrain join '{invite}'"]
    else:
        lines.append("It prints the line with which everyone joins.")
    for line in lines:
        click.echo(line, err=True)
