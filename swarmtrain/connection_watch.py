"""When to tell a user that this peer is cut off, and that it is back."""

from __future__ import annotations

import math
from typing import Final

# Silence is normal for a while: peers speak up every few seconds, and records live longer in a large swarm.
SAID_AFTER_S: Final = 20.0
_SAID_AGAIN_AFTER_S: Final = (60.0, 300.0, 1800.0)
_THEN_EVERY_S: Final = 1800.0


class ConnectionWatch:
    """Turns the time since others were last heard into lines for the user; says nothing of what does not change."""

    def __init__(self) -> None:
        self._offline_s = 0.0
        self._next_s = SAID_AFTER_S

    @property
    def is_offline(self) -> bool:
        """True once the user has been told."""
        return self._next_s > SAID_AFTER_S

    def look(self, silent_s: float | None) -> str | None:
        """Takes the seconds since the newest sign of life of anybody; None while there has never been one."""
        if silent_s is None:
            return None
        if silent_s < self._next_s and silent_s >= self._offline_s:
            if self.is_offline:
                self._offline_s = silent_s
            return None
        if silent_s >= self._next_s:
            self._offline_s = silent_s
            while self._next_s <= silent_s:
                self._next_s = self._after(self._next_s)
            return f"offline for {silent_s:.0f} s: no peer of the run is heard; training goes on alone"
        was_s, self._offline_s, self._next_s = self._offline_s, 0.0, SAID_AFTER_S
        return f"connected again after {was_s:.0f} s"

    @staticmethod
    def _after(step_s: float) -> float:
        later = [one for one in _SAID_AGAIN_AFTER_S if one > step_s]
        return later[0] if later else math.floor(step_s / _THEN_EVERY_S + 1) * _THEN_EVERY_S
