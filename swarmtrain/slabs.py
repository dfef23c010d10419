"""Shared memory between a peer's node and its trainer: a few slots, each holding one BF16 snapshot.

The memory is an anonymous file handed to the trainer as a file descriptor, so it has no name that could clash, and
nothing is left behind when either process is killed.

Ownership of a slot passes with control messages and never overlaps: the trainer fills a free own slot and passes it
on with `RoundClosed` or `Finished`; the node gives it back with `Release`.  `PARTNER_SLOT` belongs to the node until
`Mix` or `Adopt` lends it to the trainer, whose `Mixed` or `Adopted` gives it back.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# One snapshot pinned by an exchange in flight, one newest, one being written.
OWN_SLOTS = (0, 1, 2)
PARTNER_SLOT = 3
SLOT_COUNT = 4

_BYTES_PER_WEIGHT = 2


class Slabs:
    """The mapped slots; `fd` is inheritable by the trainer."""

    def __init__(self, fd: int, weights: int) -> None:
        """Maps an existing file of the right size; `weights` is the number of weights in one slot."""
        self.fd = fd
        self._map = mmap.mmap(fd, max(1, weights * _BYTES_PER_WEIGHT) * SLOT_COUNT)
        self._slots = np.frombuffer(self._map, dtype=np.uint16)[: weights * SLOT_COUNT].reshape(SLOT_COUNT, weights)

    @classmethod
    def create(cls, weights: int) -> Slabs:
        """Makes the memory.  Raises OSError when there is not enough room for it."""
        memory = Path("/dev/shm")
        with tempfile.TemporaryFile(dir=memory if memory.is_dir() else None) as file:
            fd = os.dup(file.fileno())
        size_bytes = max(1, weights * _BYTES_PER_WEIGHT) * SLOT_COUNT
        try:
            if hasattr(os, "posix_fallocate"):
                # A sparse file would kill the process by SIGBUS at first touch if memory runs out; this fails now.
                os.posix_fallocate(fd, 0, size_bytes)
            else:
                os.ftruncate(fd, size_bytes)
            return cls(fd, weights)
        except OSError:
            os.close(fd)
            raise

    def slot(self, index: int) -> NDArray[np.uint16]:
        """Returns a writable view, shape (weights,), of one slot."""
        view: NDArray[np.uint16] = self._slots[index]
        return view

    def close(self) -> None:
        """Closes the descriptor; the mapping goes when the last view of it does."""
        os.close(self.fd)
