"""Log files: where tracebacks and details go, so that the terminal has only lines meant for people."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path

MAX_LOG_BYTES = 5_000_000
KEPT_LOG_FILES = 20

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
_LOGGERS = ("swarmtrain", "swarm_peer", "swarm_compression")


def state_folder() -> Path:
    """Returns the default folder for identity and logs: XDG's state folder, or ``~/.local/state``."""
    configured = os.environ.get("XDG_STATE_HOME", "")
    root = Path(configured) if os.path.isabs(configured) else Path("~/.local/state").expanduser()
    return root / "swarmtrain"


def open_log(state: Path, command: str, *, verbosity: int = 0) -> Path | None:
    """Sends this process's log records to a new file under ``state/logs`` and returns its path.

    The file rotates at 5 MB, once; of older runs' files the newest twenty stay. With ``verbosity`` 1 or 2 the
    records (info, debug) go to stderr too. Where no file can be opened, returns None: logging never stops a run.
    """
    root = logging.getLogger()
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
    if verbosity:
        talk = logging.StreamHandler(sys.stderr)
        talk.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(talk)
    folder = state / "logs"
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{command}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8", delay=True
        )
        _drop_old_files(folder)
        _check_writable(folder)
    except OSError:
        root.addHandler(logging.NullHandler())
        return None
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.addHandler(handler)
    return path


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise PermissionError(folder)


def _drop_old_files(folder: Path) -> None:
    files = sorted(folder.glob("*.log*"), key=lambda path: path.name)
    for path in files[:-KEPT_LOG_FILES]:
        with contextlib.suppress(OSError):  # another process may be doing the same
            path.unlink()
