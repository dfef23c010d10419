"""Every decoder of strangers' bytes against a hundred thousand mutants each: nothing escapes, nothing grows.

`python -m fuzz` runs the same targets guided by coverage; docs/fuzzing.md says how.
"""

from __future__ import annotations

import os
import random
import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest

from fuzz.mutator import mutate
from fuzz.target import Target
from fuzz.targets import TARGETS, read_corpus

MUTANTS = 100_000  # of each target
# More for a long run; docs/fuzzing.md has the figures of one.
FACTOR = float(os.environ.get("FUZZ_FACTOR", "1"))
# Counting lines and allocations takes longer than decoding, so only each of so many mutants is measured.
MEASURED = 500

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


@every_target
def test_mutants_are_of_valid_encodings(target: Target) -> None:
    """A seed that its decoder refuses would make mutants that all fail at the same early check."""
    seeds = target.seeds()
    assert seeds
    for data in seeds.values():
        target.decode(data)
    assert read_corpus(target.name), "python -m fuzz.targets writes it"


@every_target
def test_mutants_never_escape(target: Target) -> None:
    rng = random.Random(f"mutants of {target.name}")
    seeds = sorted({*target.seeds().values(), *read_corpus(target.name)})
    sample = []
    # Small ones more often: they cost less, and in them a change more often hits something that matters.
    weights = [1 / len(seed) for seed in seeds]
    for number, seed in enumerate(rng.choices(seeds, weights, k=int(FACTOR * MUTANTS))):
        data = mutate(seed, rng, seeds)
        try:
            target(data)
        except Exception as error:
            pytest.fail(f"{type(error).__name__} escaped from {target.name} with {data.hex()}: {error}")
        if number % MEASURED == 0:
            sample.append(data)
    for data in sample:
        lines = count_lines(target, data)
        assert lines <= target.base_lines + target.lines_per_byte * len(data), data.hex()
    tracemalloc.start()
    try:
        for data in sample:
            size = measure_bytes(target, data)
            assert size <= target.base_bytes + target.bytes_per_byte * len(data), data.hex()
    finally:
        tracemalloc.stop()


# What these targets have found, and what was mended then.
_CERTIFICATE = (
    "300506032b6570301a3118301606035504030c0f737761726d747261696e20706565723020170d3730303130313030303030305a180f39"
    "393939313233313030303030305a301a3118301606035504030c0f737761726d747261696e2070656572302a300506032b657003210079"
    "b5562e8fe654f94078b112e8a98ba7901f853ae695bed7e0e3910bad049664a335303330120603551d130101ff040830060101ff020100"
    "301d0603551d0e041604144e1cf1bb1520cd0d9a99ee1f4ae7521647dd6a53300506032b6570034100e9fa98c9df54e6ff53297d176c96"
    "1541cf0adecf56c28080c57f448706e21c57eb3d749e86081fc318e71548cb8ced2b4077d5be310a3023959cf76b0827460f"
)
FOUND = {
    "X.509 version 128 escaped": (
        "preamble",
        "53575431011d308201193081cca00302017f020101" + _CERTIFICATE,
    ),
    "serial number zero printed a warning": ("preamble", "53575431011d308201193081cca003020102020100" + _CERTIFICATE),
    "a lone surrogate in a tensor's name raised UnicodeEncodeError": (
        "tensor-header",
        b'{"\\ud800":{"dtype":"U8","shape":[152],"data_offsets":[0,152]}}'.hex(),
    ),
}


@pytest.mark.parametrize(("name", "data"), FOUND.values(), ids=list(FOUND))
def test_what_was_found_stays_mended(name: str, data: str) -> None:
    with pytest.raises(TARGETS[name].errors):
        TARGETS[name].decode(bytes.fromhex(data))


def count_lines(target: Target, data: bytes) -> int:
    """Returns how many lines of Python the target runs for one input: its work, whatever the machine's speed."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(before)
    return lines


def measure_bytes(target: Target, data: bytes) -> int:
    """Returns the most memory that the target holds at once for one input."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    target(data)
    return tracemalloc.get_traced_memory()[1] - before
