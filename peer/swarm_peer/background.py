"""Background work that outlives its errors: supervised tasks, and a bounded queue of small jobs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

logger = logging.getLogger("swarm_peer")

_PAUSE_S = 1.0


async def supervise(task: Callable[[], Awaitable[None]], what: str) -> None:
    """Keeps one background task alive: an error of ours is logged and costs one pause, not the node."""
    while True:
        try:
            await task()
        except Exception:
            logger.exception("%s task failed; it goes on in a second", what)
            await trio.sleep(_PAUSE_S)


class JobQueue:
    """Small jobs that may wait a little and may be lost. At most `jobs` wait; each `work` task does one at a time."""

    def __init__(self, jobs: int) -> None:
        self._send, self._receive = trio.open_memory_channel[Callable[[], Awaitable[None]]](jobs)

    def add(self, job: Callable[..., Awaitable[None]], *arguments: object) -> bool:
        """False if the queue is full: then the job is not done."""
        try:
            self._send.send_nowait(lambda: job(*arguments))
        except trio.WouldBlock:
            return False
        return True

    async def work(self) -> None:
        """Does jobs until cancelled. An error in one ends it, so run this under `supervise`."""
        async for job in self._receive:
            await job()
