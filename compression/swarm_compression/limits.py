"""What a decoder will at most allocate for bytes that a stranger sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps that are checked before anything is allocated.

    `max_state_bytes` and `max_tensors` bound the layout, `max_input_bytes` the encoded form, and
    `max_section_symbols` the coded symbols of one section: a decoder's working memory is about 24 bytes per
    symbol and four bytes per element (a dozen with a history) of the largest tensor slice that a section covers at
    once.
    """

    max_input_bytes: int = 1 << 40
    max_state_bytes: int = 1 << 42
    max_tensors: int = 1 << 20
    max_section_symbols: int = 1 << 22


DEFAULT_LIMITS = Limits()
