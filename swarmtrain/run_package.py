"""A run as files: ``NAME.run``, the signed manifest, and ``NAME.blobs`` beside it, what the manifest names.

``create`` writes them; the bootstrap peer and the creator's own peer serve from them.
"""

from __future__ import annotations

from pathlib import Path

from swarmtrain.durable import write_durably
from swarmtrain.errors import ExitCode, ManifestError, UserError
from swarmtrain.manifest import MAX_MANIFEST_BYTES, SignedManifest, decode_manifest

SUFFIX = ".run"


def blobs_folder(manifest_file: Path) -> Path:
    """Returns the folder of blobs that belongs to a ``NAME.run`` file."""
    return manifest_file.with_suffix(".blobs")


def read_manifest_file(path: Path) -> SignedManifest:
    """Reads and verifies a ``NAME.run`` file.

    Raises:
        UserError: the file cannot be read.
        ManifestError: it holds no valid signed manifest; the message names the file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        hint = "; did you mean its .run file?" if path.suffix != SUFFIX else ""
        raise UserError(f"{path}: {error.strerror or error}{hint}", ExitCode.USAGE) from None
    return decode_manifest_file(path, data)


def decode_manifest_file(path: Path, data: bytes) -> SignedManifest:
    """Verifies the bytes of a ``NAME.run`` file. Raises as :func:`read_manifest_file`."""
    if path.suffix == ".toml":
        raise UserError(f"{path}: a run file is not yet a run; sign it first: swarmtrain create {path}", ExitCode.USAGE)
    try:
        return decode_manifest(data)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error.message}") from None


def write_manifest_file(path: Path, signed: SignedManifest) -> None:
    """Writes ``signed`` to ``path``, whole or not at all.

    Raises:
        UserError: the file exists and is another run's, or cannot be written.
    """
    data = signed.encode()
    try:
        if path.exists() and path.read_bytes() != data:
            raise UserError(
                f"{path} is another run's manifest; move it away, or choose another name or --out folder",
                ExitCode.BAD_FOLDER,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, [data])
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None
