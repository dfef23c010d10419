"""What a connection's state machine says and is told: its bounds, its events, and the reasons on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class ResetCode(IntEnum):
    """Why a stream was ended early. Other values on the wire are taken as CANCELLED."""

    CANCELLED = 1
    DEADLINE = 2
    OVERSIZED = 3
    ANSWERED = 4  # the answer is complete; the rest of the request was not needed
    FAILED = 5  # the handler failed in the middle of its answer


class ByeCode(IntEnum):
    """Why a connection is being closed. Other values on the wire are taken as SHUTDOWN."""

    SHUTDOWN = 0
    IDLE = 1
    FULL = 2
    BANNED = 3
    DUPLICATE = 4
    VIOLATION = 5


@dataclass(frozen=True, slots=True)
class MuxLimits:
    """Bounds of one connection."""

    max_streams: int = 64
    window_bytes: int = 1024 * 1024
    keepalive_interval_s: float = 15.0  # below the shortest common NAT timeout of TCP mappings
    keepalive_timeout_s: float = 45.0
    max_short_frames: int = 2048
    resets_per_s: float = 100.0  # opening and resetting in a loop is an attack (CVE-2023-44487)
    reset_burst: int = 1000


class Opened(NamedTuple):
    """The remote opened a stream."""

    stream_id: int
    header: bytes


class Headed(NamedTuple):
    """The remote answers a stream of ours."""

    stream_id: int
    header: bytes


class Received(NamedTuple):
    """Bytes of a body. They count against the window until `grant`."""

    stream_id: int
    data: bytes


class Ended(NamedTuple):
    """The remote has sent all of its body."""

    stream_id: int


class WasReset(NamedTuple):
    """The remote ended the stream early."""

    stream_id: int
    code: int


class SaidBye(NamedTuple):
    """The remote will open no more streams, and closes."""

    code: int


Event = Opened | Headed | Received | Ended | WasReset | SaidBye
