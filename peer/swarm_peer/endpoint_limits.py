"""What an endpoint may use at most, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from swarm_peer.connection import ConnectionLimits


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Bounds of one endpoint. `max_inbound_per_host` does not hold for loopback; beyond `max_outbound`, and for a
    dial beyond `max_connections` in all, quiet connections are closed. `max_refusing` are told why at one time.
    `served_memory_bytes` is for all requests and replies being served. Above `upload_bytes_per_s` bulk waits;
    somewhat below the uplink it keeps all other calls quick, and "auto" finds that rate. `download_bytes_per_s`
    bounds the bulk that this endpoint asks for."""

    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    dial_deadline_s: float = 10.0
    max_connections: int = 1024
    max_inbound: int = 512
    max_refusing: int = 64
    max_inbound_per_host: int = 16
    max_outbound: int = 512
    max_connections_per_peer: int = 4
    violation_ban_s: float = 3600.0
    violation_host_ban_s: float = 600.0
    served_memory_bytes: int = 256 * 1024 * 1024
    upload_bytes_per_s: float | Literal["auto"] | None = None
    download_bytes_per_s: float | None = None


@dataclass(slots=True)
class EndpointStats:
    """Counters since the start, at the moment of reading. Bytes are those of the socket, TLS and framing
    included. `dropped` counts everything refused or cut off, by reason."""

    bytes_sent: int = 0
    bytes_received: int = 0
    connections: int = 0
    calls: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
