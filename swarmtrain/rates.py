"""Data rates as people write them: `17Mbit`, `2MB`, `800kbit`, `1.5MiB`; always per second."""

from __future__ import annotations

import re

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(i?)(bit|byte|b)s?(?:/s|ps)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}
_MIN_BYTES_PER_S = 1000.0
_HINT = "write it as 17Mbit or 2MB (per second)"


def parse_rate(text: str) -> float:
    """Returns bytes per second.  A `B` is bytes, `bit` is bits; raises ValueError, with one line for the user."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no data rate; {_HINT}")
    number, prefix, binary, unit = (str(group) for group in match.groups())
    if unit == "b":
        raise ValueError(f"{text!r} could mean bits or bytes; {_HINT}")
    scale: int = (1024 if binary else 1000) ** _POWERS[prefix.lower()]
    rate = float(number) * scale / (8 if unit.lower() == "bit" else 1)
    if rate < _MIN_BYTES_PER_S:
        raise ValueError(f"{text!r} is less than 8kbit, too slow for anything")
    return rate


def format_rate(bytes_per_s: float) -> str:
    """Returns the rate in bits per second, as links are sold."""
    bits = 8 * bytes_per_s
    scale, prefix = next((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if bits >= s or p == "k")
    return f"{bits / scale:.3g} {prefix}bit/s"
