"""Walking the coded tensors of a state as one flat run of elements, in slices that fit a CPU cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm_compression.errors import CorruptPatch
from swarm_compression.tensors import DType, Layout

# 2^18 BF16 elements of two states are 1 MiB: the working set of a slice stays in the second-level cache.
SLICE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` to `stop` of tensor `tensor` (an index into the layout)."""

    tensor: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


def slices(layout: Layout, coded: Sequence[int]) -> Iterator[Span]:
    """Yield the coded tensors in order, cut every `SLICE_ELEMENTS`."""
    for tensor in coded:
        elements = layout[tensor].elements
        for start in range(0, elements, SLICE_ELEMENTS):
            yield Span(tensor, start, min(start + SLICE_ELEMENTS, elements))


class Cursor:
    """Hands out the elements of the coded tensors in order, section by section, never beyond the end."""

    def __init__(self, layout: Layout, coded: Sequence[int]) -> None:
        self._layout = layout
        self._coded = [tensor for tensor in coded if layout[tensor].elements]
        self._at = 0
        self._start = 0

    def take(self, elements: int) -> tuple[DType, list[Span]]:
        """Return dtype and spans of the next `elements`; raise CorruptPatch if they are not there in one dtype."""
        if elements == 0 or self.exhausted:
            raise CorruptPatch("section without elements")
        kind = self._layout[self._coded[self._at]].kind
        spans = []
        while elements:
            tensor = self._coded[self._at] if self._at < len(self._coded) else None
            if tensor is None or self._layout[tensor].kind is not kind:
                raise CorruptPatch("section runs past the tensors")
            stop = min(self._start + elements, self._layout[tensor].elements)
            spans.append(Span(tensor, self._start, stop))
            elements -= stop - self._start
            self._start = stop
            if stop == self._layout[tensor].elements:
                self._at, self._start = self._at + 1, 0
        return kind, spans

    @property
    def exhausted(self) -> bool:
        return self._at == len(self._coded)
