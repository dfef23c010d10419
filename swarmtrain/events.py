"""The event log: one JSON line per event, the floor of all metrics.  Nothing here reads it back."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from types import TracebackType

logger = logging.getLogger("swarmtrain.events")

MAX_EVENT_LOG_BYTES = 64 << 20


class EventLog:
    """Appends events to a file, and stops at a size cap rather than fill a disk over months."""

    def __init__(self, path: Path) -> None:
        """Opens the file for appending.  Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk has refused must not wait in memory and fail again on closing.
        self._file = path.open("ab", buffering=0)
        self._torn = False  # the last line is incomplete

    def write(self, event: str, **values: object) -> None:
        """Writes one event with the time of day; a full disk costs the event, never the run."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        try:
            line = json.dumps({"time": round(time.time(), 3), "event": event, **clean}, allow_nan=False)
            if self._file.tell() < MAX_EVENT_LOG_BYTES:
                data = ("\n" * self._torn + line + "\n").encode()
                self._torn = self._file.write(data) < len(data)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("event not written: %s", error)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
