"""How much of the link and of the machine's sockets a node may use: from what the user said to limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm_peer.endpoint_limits import EndpointLimits
from swarm_peer.tcp import AcceptLimits

from swarmtrain.errors import ExitCode, UserError

MAX_CONNECTIONS = 1024
# Beside connections: files, logs, the trainer's pipes, worker threads, and some air.
_OTHER_FILES = 48
_KNOCKING = 32
_REFUSING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Rates in bytes per second; None is no limit. `max_connections` None: as many as the open files allow."""

    up: float | Literal["auto"] | None = "auto"
    down: float | None = None
    max_connections: int | None = None


def endpoint_limits(limits: LinkLimits, open_files: int) -> tuple[EndpointLimits, AcceptLimits]:
    """Divides the connections. A quarter is kept for dialling, so that being popular never cuts a peer off.

    Raises UserError when more connections are asked for than the process may open files.
    """
    # The last tenth is for connections that are just saying goodbye.
    possible = (open_files - _OTHER_FILES - _KNOCKING - _REFUSING) * 10 // 11
    wanted = limits.max_connections
    if possible < 8 or (wanted is not None and wanted > possible):
        needed = (wanted or 8) * 11 // 10 + 1 + _OTHER_FILES + _KNOCKING + _REFUSING
        raise UserError(
            f"{wanted or 8} connections need {needed} open files and this process may have {open_files}; "
            f"raise it (ulimit -n {needed})" + (f" or use --max-connections {possible}" if possible >= 8 else ""),
            ExitCode.USAGE,
        )
    total = wanted or min(possible, MAX_CONNECTIONS)
    endpoint = EndpointLimits(
        max_connections=total,
        max_inbound=min(512, total - max(1, total // 4)),
        max_refusing=_REFUSING,
        upload_bytes_per_s=limits.up,
        download_bytes_per_s=limits.down,
    )
    return endpoint, AcceptLimits(max_unauthenticated=min(_KNOCKING, max(4, total // 4)))


def open_files_limit() -> int:
    """How many files this process may have open."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 4096
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
