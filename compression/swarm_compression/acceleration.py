"""Whether the compiled loops of `kernels` are in use. Without them NumPy makes the same bytes, more slowly.

numba is an optional dependency that takes a second to import and several to compile for, the first time; it is only
asked for when a state is large enough to win that back.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import numpy as np

# Compiled loops save about five nanoseconds per element, against some seconds for starting numba.
WORTHWHILE_ELEMENTS = 1 << 24
_log = logging.getLogger(__name__)
_kernels: ModuleType | None = None
_tried = False


def kernels() -> ModuleType | None:
    """Return the compiled loops if they are in use."""
    return _kernels


def prepare(elements: int) -> None:
    """Start numba, where it is installed, if a state of so many elements is to be worked on."""
    if elements >= WORTHWHILE_ELEMENTS and not _tried:
        use_compiled()


def use_compiled(enabled: bool = True) -> bool:
    """Take the compiled loops into use, or out of it; return whether they are. Without numba they never are."""
    global _kernels, _tried
    _tried = True
    _kernels = _load() if enabled else None
    return _kernels is not None


def _load() -> ModuleType | None:
    vector = importlib.import_module("swarm_compression.vector")
    if not vector.HAS_NUMBA:
        return None
    module = importlib.import_module("swarm_compression.kernels")
    try:
        _try_out(module)
    except Exception as error:  # numba's own: whatever a version of it cannot compile, NumPy does
        _log.warning("numba cannot compile the codec's loops, NumPy is used: %s", error)
        return None
    return module


def _try_out(module: ModuleType) -> None:
    """Compile a loop that uses every kind of instruction and compare what it finds."""
    old = np.arange(200, dtype=np.uint16)
    new = old.copy()
    new[[3, 64, 199]] ^= 1
    positions = np.empty(200, np.int64)
    found = module.find_changes(new, old, positions)
    if positions[:found].tolist() != [3, 64, 199]:
        raise ValueError("a compiled comparison is wrong")
