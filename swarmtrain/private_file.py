"""Small files that only their owner may read: certificates, tickets, lists."""

from __future__ import annotations

import os
from pathlib import Path

from swarmtrain.durable import TEMPORARY_SUFFIX, sync_folder
from swarmtrain.errors import ExitCode, UserError


def write_private(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, mode 0600, whole or not at all.  Raises UserError."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None
    sync_folder(path.parent)


def read_private(path: Path, max_bytes: int) -> bytes | None:
    """Reads a file of at most `max_bytes`; None if there is none.  Raises UserError, also for a larger one."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", ExitCode.BAD_FOLDER) from None
    if len(data) > max_bytes:
        raise UserError(f"{path} is larger than {max_bytes} bytes; move it away", ExitCode.BAD_FOLDER)
    return data
