"""Is hivemind here, in the tested version, on a platform that its daemon runs on? Found out without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

from swarmtrain.errors import ExitCode, UserError

HIVEMIND_VERSION = "1.1.12"
REMEDY = "pip install 'swarmtrain[hivemind]'"


def require_hivemind() -> None:
    """Raises UserError, with the remedy, where the bridge cannot work."""
    problem = find_problem(sys.platform, sys.version_info[:2])
    if problem is not None:
        raise UserError(f"--dht hivemind: {problem}; or leave out --dht and give --peer HOST:PORT", ExitCode.USAGE)


def find_problem(system: str, python: tuple[int, int]) -> str | None:
    """What is in the way, with what to do about it, or None."""
    if system not in ("linux", "darwin"):
        return f"hivemind has no build for {system}; use Linux, macOS or WSL"
    if python >= (3, 14):
        return f"hivemind {HIVEMIND_VERSION} is not known to work with Python {python[0]}.{python[1]}; use 3.11 to 3.13"
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        return f"hivemind is not installed; {REMEDY}"
    try:
        version = importlib.metadata.version("hivemind")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if version != HIVEMIND_VERSION:
        return f"hivemind {version} is installed, {HIVEMIND_VERSION} is needed; {REMEDY}"
    daemon = Path(next(iter(spec.submodule_search_locations))) / "hivemind_cli" / "p2pd"
    if not (daemon.is_file() and os.access(daemon, os.X_OK)):
        return (
            f"hivemind's daemon {daemon} is missing or may not be run (there may be no build for "
            f"{platform.machine()}, or a virus scanner took it); reinstall hivemind {HIVEMIND_VERSION}"
        )
    return None
