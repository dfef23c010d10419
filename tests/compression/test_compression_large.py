"""Tensors of more than 2^31 elements, without the memory for them: pages that nobody touches cost nothing."""

from __future__ import annotations

import itertools

import numpy as np
import swarm_compression as sc
from swarm_compression.container import (
    MAX_SECTION_ELEMENTS,
    Action,
    Codec,
    Header,
    Table,
    layout_tag,
    read_header,
    write_section,
)
from swarm_compression.limits import DEFAULT_LIMITS
from swarm_compression.patch import apply_sections
from swarm_compression.spans import SLICE_ELEMENTS, slices
from swarm_compression.sparse import Effort, Kind, Pending, compare, write_patch_section
from swarm_compression.wire import Reader

BELOW = 2**31
TAIL = 70_001


def test_changes_beyond_two_to_the_31_arrive() -> None:
    layout = sc.Layout([sc.TensorSpec("w", "f8_e4m3", (BELOW + TAIL,))])
    kind = layout[0].kind
    rng = np.random.default_rng(0)
    new = np.where(rng.random(TAIL) < 0.01, rng.integers(1, 256, TAIL), 0).astype(np.uint8)
    new[-1] = 7
    pending = Pending(kind)
    pending.add(compare(new, np.zeros(TAIL, np.uint8)))
    unchanged = write_section(Kind.SPARSE, MAX_SECTION_ELEMENTS, 0, b"")
    data = unchanged * (BELOW // MAX_SECTION_ELEMENTS) + write_patch_section(pending, Effort(1)) + b"\0"
    target = np.zeros(BELOW + TAIL, np.uint8)
    apply_sections(Reader(data), layout, Table((Action.CODED,), {}, {0: b"1234"}), [target], DEFAULT_LIMITS)
    assert target[BELOW:].tobytes() == new.tobytes()
    assert not target[BELOW - 4096 : BELOW].any()
    assert not target[:4096].any()


def test_slices_cover_a_large_tensor_exactly() -> None:
    elements = 2**33 + 5
    layout = sc.Layout([sc.TensorSpec("small", "bf16", (3,)), sc.TensorSpec("w", "bf16", (elements,))])
    spans = [span for span in slices(layout, [0, 1]) if span.tensor == 1]
    assert spans[0].start == 0
    assert all(left.stop == right.start for left, right in itertools.pairwise(spans))
    assert spans[-1].stop == elements
    assert max(span.elements for span in spans) == SLICE_ELEMENTS


def test_a_header_states_sizes_above_32_bits() -> None:
    layout = sc.Layout([sc.TensorSpec("w", "bf16", (2**33 + 5,))])
    header = Header(Codec.PATCH, 1, layout.size_bytes, layout_tag(layout), bytes(32), b"b" * 32)
    assert read_header(Reader(header.encode())).state_bytes == 2**34 + 10
