"""Who may pass bytes through a relay next. Clients take turns, each one turn at a time, however many circuits it has.

Whoever has had more than its quota lately shares one place with all others who have. So the relay is never idle while
somebody waits, and nobody is shut out: a quota matters only while others want the same bytes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass, field
from typing import Final

import trio

HOUR_S: Final = 3600.0
_MAX_CLIENTS: Final = 4096
_OVER: Final = "over quota"


class HourlyQuota:
    """How many bytes each client has had, as a bucket that drains in an hour. No I/O; `now` is monotonic seconds.

    Whoever fills its bucket is over its quota until half of it has drained.
    """

    def __init__(self, bytes_per_hour: float) -> None:
        self._quota = bytes_per_hour
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()  # who was charged last comes last

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, client: Hashable, size_bytes: int, now: float) -> None:
        """Counts bytes that a client has had."""
        bucket = self._buckets.pop(client, None) or _Bucket(now)
        bucket.level = self._level(bucket, now) + size_bytes
        bucket.at = now
        bucket.is_over = bucket.is_over or bucket.level >= self._quota
        self._buckets[client] = bucket
        while len(self._buckets) > _MAX_CLIENTS or (self._buckets and self._is_first_empty(now)):
            self._buckets.popitem(last=False)

    def is_over(self, client: Hashable, now: float) -> bool:
        """Whether a client has had more than its quota lately."""
        bucket = self._buckets.get(client)
        if bucket is None or not bucket.is_over:
            return False
        bucket.is_over = self._level(bucket, now) > self._quota / 2
        return bucket.is_over

    def _level(self, bucket: _Bucket, now: float) -> float:
        return max(0.0, bucket.level - (now - bucket.at) * self._quota / HOUR_S)

    def _is_first_empty(self, now: float) -> bool:
        return self._level(next(iter(self._buckets.values())), now) == 0.0


@dataclass(slots=True)
class _Bucket:
    at: float
    level: float = 0.0
    is_over: bool = False


class Turns:
    """A rate shared by many: who waits gets one turn each, in order, so that all get the same."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._order = trio.Lock()

    async def take(self, size_bytes: int) -> None:
        """Waits until so many bytes more may pass."""
        async with self._order:
            await trio.sleep_until(self._free_at)
            self._free_at = max(self._free_at, trio.current_time()) + size_bytes / self._bytes_per_s


class ClientTurns:
    """See the module."""

    def __init__(self, bytes_per_s: float, quota: HourlyQuota) -> None:
        self._turns = Turns(bytes_per_s)
        self._quota = quota
        self._places: dict[Hashable, _Place] = {}

    async def take(self, client: Hashable, size_bytes: int) -> None:
        """Waits until so many bytes more may pass for a client, and counts them."""
        place = _OVER if self._quota.is_over(client, trio.current_time()) else client
        async with self._first_at(place):
            await self._turns.take(size_bytes)
        self._quota.charge(client, size_bytes, trio.current_time())

    @contextlib.asynccontextmanager
    async def _first_at(self, key: Hashable) -> AsyncIterator[None]:
        """Waits for those who came to the same place before."""
        place = self._places.setdefault(key, _Place())
        place.users += 1
        try:
            async with place.order:
                yield
        finally:
            place.users -= 1
            if not place.users:
                del self._places[key]


@dataclass(slots=True)
class _Place:
    users: int = 0
    order: trio.Lock = field(default_factory=trio.Lock)
