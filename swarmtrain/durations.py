"""Spans of time as people type them: ``30m``, ``12h``, ``7d``."""

from __future__ import annotations

import re

_UNITS = {"m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,6})([mhd])")
_LONGEST_S = 10 * 366 * 86400


def parse_duration(text: str) -> int:
    """Returns seconds. Raises ``ValueError`` with one line that states the accepted form."""
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"{text!r}: write a span of time like 30m, 12h or 7d, at most ten years")
    return seconds
