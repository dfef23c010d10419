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
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, **values: object) -> None:
        """Writes one event with the time of day; a full disk costs the event, never the run."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        try:
            if self._file.tell() < MAX_EVENT_LOG_BYTES:
                self._file.write(json.dumps({"time": round(time.time(), 3), "event": event, **clean}) + "\n")
                self._file.flush()
        except (OSError, ValueError) as error:
            logger.warning("event not written: %s", error)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
