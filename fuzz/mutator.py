"""A seeded mutator of byte strings: the same seed gives the same mutants, on every machine.

It knows what lengths, MessagePack and JSON look like, because random bits alone seldom get past a strict decoder.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

_ROUNDS = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 16)
_BYTES = (0x00, 0x01, 0x7F, 0x80, 0x81, 0xC0, 0xC1, 0xFE, 0xFF)
_LENGTHS = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
_WIDTHS = (1, 2, 2, 4, 4, 8)
# Nesting without end, lengths without content, and what text parsers stumble over.
_FRAGMENTS = (
    b"\x91" * 64,
    b"\x81\xa0" * 64,
    b"\x91" * 3000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xc7\x08\xff\x00\x00\x00\x00\x00\x00\x00\x00",
    b"[" * 3000,
    b'{"":' * 64,
    b'"\\ud800":0,',
    b"9" * 40,
    b"1e999",
    b"-1",
    b"-0.0",
    b"null",
    b"%00",
    b"%ff%fe",
    b"\xed\xa0\x80",
    b"\xe2\x80\xae",
    b"\x1b[2J",
    b"::",
    b"@",
    b"/",
)


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Returns `data` damaged in one to sixteen places; `others` are valid encodings to splice with."""
    out = bytearray(data)
    draw = rng.random
    for _ in range(_ROUNDS[int(draw() * len(_ROUNDS))]):
        size = len(out)
        at = int(draw() * size)
        choice = int(draw() * 16)
        if choice < 3 and size:
            out[at] ^= 1 << int(draw() * 8)
        elif choice < 5 and size:
            out[at] = _BYTES[int(draw() * len(_BYTES))]
        elif choice == 5:
            del out[at : at + 1 + int(draw() * 8)]
        elif choice == 6:
            out[at:at] = rng.randbytes(1 + int(draw() * 8))
        elif choice == 7:
            del out[at:]
        elif choice == 8:  # repeats or moves a part
            start = int(draw() * size)
            length = 1 + int(draw() * 32)
            stop = at + length if draw() < 0.5 else at
            out[at:stop] = out[start : start + length]
        elif choice == 9 and others:
            other = others[int(draw() * len(others))]
            out[at:] = other[int(draw() * len(other)) :]
        elif choice == 10:
            out[at:at] = _FRAGMENTS[int(draw() * len(_FRAGMENTS))]
        elif choice == 11:
            fragment = _FRAGMENTS[int(draw() * len(_FRAGMENTS))]
            out[at : at + len(fragment)] = fragment
        else:
            _tamper(out, at, draw())
    return bytes(out)


def _tamper(out: bytearray, at: int, chance: float) -> None:
    """Takes the bytes at `at` for a length, and states another: an extreme one, or one that is off by little."""
    number = int(chance * 4096)
    draws = number >> 2
    width = _WIDTHS[draws % len(_WIDTHS)]
    order: Literal["big", "little"] = "big" if number & 1 else "little"
    if number & 2:
        value = int.from_bytes(out[at : at + width], order) + draws % 7 - 3
    else:
        value = _LENGTHS[draws // len(_WIDTHS) % len(_LENGTHS)]
    out[at : at + width] = (value % 256**width).to_bytes(width, order)
