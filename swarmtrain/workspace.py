"""A peer's own folder for one run: checkpoints, event log, merged model; and the locks that keep it to one process.

OUT/run.manifest      the signed manifest: says whose folder this is
OUT/checkpoints/      two generations
OUT/events.jsonl      one line per event
OUT/model/            the merged model, a Hugging Face folder
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm_peer.errors import IdentityFileError
from swarm_peer.identity import Identity, short

from swarmtrain.container import is_temporary
from swarmtrain.durable import TEMPORARY_SUFFIX, write_durably
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.manifest import SignedManifest

LOCK_NAME = ".lock"
MAX_PEERS_OF_ONE_USER = 64
# FP32 master, slow weights, momentum and two Adam moments; two generations of them; the exported model.
CHECKPOINT_BYTES_PER_WEIGHT = 20
DISK_BYTES_PER_WEIGHT = 2 * CHECKPOINT_BYTES_PER_WEIGHT + 4
# The trainer's FP32 vectors and gradient, its snapshot slots, the node's bases and copies.
MEMORY_BYTES_PER_WEIGHT = 24 + 8 + 20
SPARE_BYTES = 300_000_000


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder of one peer in one run."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "run.manifest"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def genesis(self) -> Path:
        return self.root / "genesis.f32"

    @property
    def validation(self) -> Path:
        return self.root / "validation.txt"

    def has_checkpoint(self) -> bool:
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("checkpoint-*.json"))


@contextmanager
def open_workspace(root: Path, signed: SignedManifest, *, resume: bool) -> Iterator[Workspace]:
    """Prepares and locks the folder.  Raises UserError when it belongs to another run, process or program."""
    workspace = Workspace(root)
    with contextlib.ExitStack() as stack:
        # Only what happens to the folder here is the folder's fault, not what goes wrong while it is in use.
        try:
            _check_folder(workspace, signed, resume=resume)
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(
                _locked(root / LOCK_NAME, f"{root} is in use by another swarmtrain process; choose another --out")
            )
            if not workspace.manifest.exists():
                write_durably(workspace.manifest, [signed.encode()])
        except OSError as error:
            raise UserError(f"{error.filename or root}: {error.strerror or error}", ExitCode.BAD_FOLDER) from error
        yield workspace


def _check_folder(workspace: Workspace, signed: SignedManifest, *, resume: bool) -> None:
    root = workspace.root
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file; name a folder with --out", ExitCode.BAD_FOLDER)
    if workspace.manifest.exists():
        if workspace.manifest.read_bytes() != signed.encode():
            raise UserError(
                f"{root} belongs to another run than {signed.label} ({signed.run_id.hex()[:8]}…); choose another --out",
                ExitCode.BAD_FOLDER,
            )
    elif root.is_dir() and any(not _left_by_a_crash(path) for path in root.iterdir()):
        raise UserError(f"{root} is not empty and holds no run of ours; choose another --out", ExitCode.BAD_FOLDER)
    if workspace.has_checkpoint() and not resume:
        raise UserError(
            f"{root} holds a checkpoint of this run; continue it with --resume, or choose another --out",
            ExitCode.BAD_FOLDER,
        )
    if resume and not workspace.has_checkpoint():
        raise UserError(f"{root} holds no checkpoint to resume; leave out --resume", ExitCode.BAD_FOLDER)


def _left_by_a_crash(path: Path) -> bool:
    """True for what is there before the manifest is complete."""
    return path.name == LOCK_NAME or path.name.endswith(TEMPORARY_SUFFIX)


@contextmanager
def acquire_identity(
    state: Path, explicit: Path | None, say: Callable[[str], None] = lambda line: None
) -> Iterator[Identity]:
    """Loads this process's identity, says which file it is in, and keeps every other process from using it.

    Without `explicit`, the first key file in the state folder that no other process holds: identity.pem,
    identity-2.pem and so on, so that several peers on one machine just work.  Raises UserError.
    """
    paths = [explicit] if explicit else [state / "identity.pem"]
    if not explicit:
        paths += [state / f"identity-{number}.pem" for number in range(2, MAX_PEERS_OF_ONE_USER + 1)]
    for path in paths:
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(path.with_suffix(path.suffix + ".lock"), ""))
                identity = Identity.load_or_create(path)
            except _Held:
                continue
            except IdentityFileError as error:
                raise UserError(str(error), ExitCode.BAD_FOLDER) from None
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None
            say(f"peer {short(identity.peer_id)}, key file {path}")
            if is_temporary(path):
                say(
                    f"warning: {path.parent} lies on no volume: the identity ends with this container, and the next "
                    "one is another peer; mount a volume there"
                )
            yield identity
            return
    raise UserError(
        f"the identity {explicit or state} is in use by another process; every peer needs its own: "
        "give another --identity FILE",
        ExitCode.BAD_FOLDER,
    )


def read_identity(path: Path) -> Identity | None:
    """Returns the user's first key, or that of a key file, None if there is none.  It may be in use: it only signs."""
    path = path / "identity.pem" if path.is_dir() else path
    try:
        return Identity.load_or_create(path) if path.exists() else None
    except IdentityFileError as error:
        raise UserError(str(error), ExitCode.BAD_FOLDER) from None


def duplicate_line(identity: Identity) -> str:
    """What a user is told whose identity is at work in a second process, which can only be on another machine."""
    file = identity.path or "its key file"
    return (
        f"peer {short(identity.peer_id)} runs twice: another machine has a copy of {file}, and the two take each "
        f"other's place. Stop one of them, remove {file} there and start it again: it makes itself a new identity"
    )


def check_room(root: Path, weights: int) -> None:
    """Raises UserError when disk or memory cannot hold a peer of this model size, before anything is transferred."""
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    need, free = weights * DISK_BYTES_PER_WEIGHT + SPARE_BYTES, shutil.disk_usage(existing).free
    if free < need:
        raise UserError(
            f"not enough disk: checkpoints and model of {weights / 1e6:.1f}M weights take {need / 1e9:.1f} GB, "
            f"{existing} has {free / 1e9:.1f} GB free; choose another --out",
            ExitCode.NO_ROOM,
        )
    available = available_memory_bytes()
    need = weights * MEMORY_BYTES_PER_WEIGHT + SPARE_BYTES
    if available is not None and available < need:
        raise UserError(
            f"not enough memory: training {weights / 1e6:.1f}M weights takes about {need / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are available; close other programs or join from a larger machine",
            ExitCode.NO_ROOM,
        )


def available_memory_bytes() -> int | None:
    """Returns the memory that can be had without swapping, or None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


class _Held(UserError):
    """Another process holds the lock."""


@contextmanager
def _locked(path: Path, complaint: str) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _Held(complaint, ExitCode.BAD_FOLDER) from None
        yield
    finally:
        os.close(descriptor)
