"""Files that are either whole or not there: temporary name, fsync, rename, fsync of the folder.

After a crash at any instant a reader finds the old file or the new one, never a part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

# Files with this ending were left by a crash: nothing reads them, the next save removes them.
TEMPORARY_SUFFIX = ".part"


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes `pieces` to `path`, replacing it at the end; raises `OSError` and leaves no part behind."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut; does nothing where the file system cannot."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse to sync a folder
        return
    finally:
        os.close(descriptor)
