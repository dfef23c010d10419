"""A seeded mutator of byte strings, shared by the fuzz tests of the codecs."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest


def _mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(7):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                del out[at:]
            case 5 if len(out) > 8:
                start = rng.randrange(len(out) - 8)
                out[at : at + 8] = out[start : start + 8]
            case _:
                out[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 0xFFFF, 2**31, 2**32 - 1)))
    return bytes(out)


@pytest.fixture
def mutate() -> Callable[[bytes, random.Random], bytes]:
    """Returns the function that damages bytes in one to sixteen places."""
    return _mutate
