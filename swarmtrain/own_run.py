"""A run from this peer's own folder: what `--resume` needs when nobody of the run can be reached.

Everything in the folder was verified when it was fetched, and is verified again here: disks forget.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_peer.blobs import BlobId

from swarmtrain.errors import UserError
from swarmtrain.manifest import decode_manifest
from swarmtrain.naming import RunReference
from swarmtrain.node import NodeBlobs
from swarmtrain.run_lookup import LocatedRun
from swarmtrain.workspace import Workspace

logger = logging.getLogger("swarmtrain.own_run")


def own_run(folder: Path, reference: RunReference, blobs: NodeBlobs) -> LocatedRun | None:
    """Returns the run whose folder this is, or None if it is not the one that is meant or lacks a part.

    Manifest and validation text are put on offer, so that this peer can be a way in for others.
    """
    workspace = Workspace(folder)
    try:
        signed = decode_manifest(workspace.manifest.read_bytes())
        validation = workspace.validation.read_bytes()
    except OSError as error:
        logger.info("no run in %s: %s", folder, error)
        return None
    except UserError as error:
        logger.warning("the manifest in %s is not used: %s", folder, error.message)
        return None
    if not reference.matches(signed.manifest.name, signed.creator, signed.run_id):
        return None
    if blobs.put(validation) != BlobId(bytes.fromhex(signed.manifest.validation.blob)):
        logger.warning("the validation text in %s is not the run's", folder)
        return None
    return LocatedRun(signed, blobs.put(signed.encode()), (), validation)
