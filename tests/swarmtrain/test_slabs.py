"""The slots that node and trainer share: one memory in two processes, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swarmtrain.slabs import OWN_SLOTS, PARTNER_SLOT, SLOT_COUNT, Slabs

CHILD = """
import sys
import numpy as np
from swarmtrain.slabs import Slabs, PARTNER_SLOT
slabs = Slabs(int(sys.argv[1]), int(sys.argv[2]))
assert (slabs.slot(PARTNER_SLOT) == 7).all(), slabs.slot(PARTNER_SLOT)
slabs.slot(0)[:] = np.arange(slabs.slot(0).size, dtype=np.uint16)
"""


def run_child(slabs: Slabs, code: str, weights: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(slabs.fd), str(weights)],
        pass_fds=(slabs.fd,),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def names_in_shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def test_own_slots_and_the_partners_do_not_overlap() -> None:
    assert sorted((*OWN_SLOTS, PARTNER_SLOT)) == list(range(SLOT_COUNT))
    slabs = Slabs.create(1000)
    for index in range(SLOT_COUNT):
        slabs.slot(index)[:] = index + 1
    for index in range(SLOT_COUNT):
        assert slabs.slot(index).shape == (1000,)
        assert slabs.slot(index).dtype == np.uint16
        assert (slabs.slot(index) == index + 1).all()
    slabs.close()


def test_new_slots_are_zero() -> None:
    slabs = Slabs.create(100)
    assert not any(slabs.slot(index).any() for index in range(SLOT_COUNT))
    slabs.close()


@pytest.mark.parametrize("weights", [1, 5, 2049, 100_000])
def test_a_child_process_maps_the_same_memory(weights: int) -> None:
    slabs = Slabs.create(weights)
    slabs.slot(PARTNER_SLOT)[:] = 7
    child = run_child(slabs, CHILD, weights)
    assert child.returncode == 0, child.stderr
    np.testing.assert_array_equal(slabs.slot(0), np.arange(weights, dtype=np.uint32).astype(np.uint16))
    assert not slabs.slot(1).any()
    slabs.close()


def test_views_outlive_close() -> None:
    slabs = Slabs.create(10)
    view = slabs.slot(1)
    slabs.close()
    view[:] = 3
    assert (view == 3).all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(slabs.fd)


def test_nothing_has_a_name_even_while_a_child_is_killed() -> None:
    before = names_in_shared_memory()
    slabs = Slabs.create(1000)
    assert names_in_shared_memory() <= before
    child = run_child(slabs, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1000)
    assert child.returncode == -9
    slabs.slot(0)[:] = 1  # the survivor goes on
    slabs.close()
    assert names_in_shared_memory() <= before


def test_too_little_room_is_an_error_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # noqa: PT011  # which errno depends on the file system
        Slabs.create(1 << 46)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_too_short_is_refused() -> None:
    slabs = Slabs.create(10)
    with pytest.raises(ValueError, match="size"):
        Slabs(slabs.fd, 1_000_000)
    slabs.close()
