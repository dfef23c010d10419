"""What a fuzz target is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder of strangers' bytes.

    `decode` takes any bytes and raises nothing but `errors`; that its answer makes sense it asserts itself. `seeds`
    makes valid encodings by name, from which mutants and the corpus come. What one input may cost is bounded:
    Python lines run by `base_lines` and `lines_per_byte`, memory in use at once by `base_bytes` and `bytes_per_byte`.
    """

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], Mapping[str, bytes]]
    base_lines: int = 2000
    lines_per_byte: float = 20
    base_bytes: int = 64 * 1024
    bytes_per_byte: float = 64

    def __call__(self, data: bytes) -> None:
        """Decodes one input; whatever it raises is a defect."""
        try:
            self.decode(data)
        except self.errors:
            return
