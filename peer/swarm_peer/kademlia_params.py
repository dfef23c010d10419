"""The times and limits of the DHT's driver."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from swarm_peer.lookup import LookupParams
from swarm_peer.routing import RoutingParams
from swarm_peer.storage import StorageLimits


@dataclass(frozen=True, slots=True)
class KademliaParams:
    """Times and limits of the driver. Records live `record_ttl_s` and are renewed every `republish_s` ± 10 %."""

    routing: RoutingParams = field(default_factory=RoutingParams)
    lookup: LookupParams = field(default_factory=LookupParams)
    storage: StorageLimits = field(default_factory=StorageLimits)
    record_ttl_s: int = 1200
    republish_s: float = 300.0
    refresh_s: float = 600.0
    check_s: float = 15.0
    rpc_deadline_s: float = 4.0
    lookup_deadline_s: float = 20.0
    retry_s: tuple[float, float] = (1.0, 60.0)  # back-off: first and longest wait
    connect_deadline_s: float = 10.0  # for one entry: the dial, and the first answer
    requests_per_s: float = 20.0
    stores_per_s: float = 2.0
    burst_s: float = 20.0  # how many seconds' worth of requests may come at once

    def backoff_s(self, attempt: int, rng: random.Random) -> float:
        """How long to wait after `attempt` failures: doubling, bounded, ± 20 %."""
        first, longest = self.retry_s
        return min(longest, first * float(2 ** min(attempt, 16))) * rng.uniform(0.8, 1.2)
