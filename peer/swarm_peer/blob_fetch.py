"""One blob's way here: from each holder over as many connections as pay, all off one queue of chunks.

Each holder has lanes: the connection to it, or up to eight others where the path is long and more of them bring more
(`lane_count`). As soon as others bring something, the first is left to calls: behind bulk that waits for lost packets
they would wait, too. Each lane is asked for its next chunk when what is under way on it is about to end. At the end
idle lanes are asked for what slow ones still owe, and the loser is cancelled.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import trio

from swarm_peer.addresses import Contact
from swarm_peer.blob_store import MAX_CHUNK_BYTES, BlobId, Hash
from swarm_peer.errors import BlobInvalid, ConnectError, DeadlineExpired, Disconnected, PeerError, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.lane_count import MAX_LANES, LaneCount
from swarm_peer.pacing import DownloadLimit
from swarm_peer.partial_blob import LaneRate, PartialBlob, Request
from swarm_peer.rpc import Caller, Method, Priority

logger = logging.getLogger("swarm_peer")

# Below this round trip one connection does; below this size a transfer is over before a second one has its speed.
_NEAR_S = 0.005
_MIN_LANES_BYTES = 2 * 1024 * 1024
_AHEAD_S = 0.1  # asked for ahead of time, beside the round trip
_MIN_AHEAD_BYTES = 32 * 1024
_LOOK_S = 0.1
_MAX_REMEMBERED = 256


class ChunkRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for one chunk of a blob; the reply is its raw bytes."""

    blob_id: Hash
    index: Annotated[int, msgspec.Meta(ge=0, le=2**20)]


CHUNK: Final = Method("blobs.chunk", ChunkRequest, bytes, 64, MAX_CHUNK_BYTES, Priority.BULK)

Result = TypeVar("Result")


class Offload(Protocol):
    """Runs blocking work away from the event loop, as `trio.to_thread.run_sync` does."""

    def __call__(self, sync_fn: Callable[..., Result], /, *args: Any) -> Awaitable[Result]: ...  # noqa: ANN401 - as trio's


@dataclass(frozen=True, slots=True)
class BlobParams:
    """`requests_per_lane`: chunks under way on one connection at most; it is asked for the next one in time before the
    last one ends. `lanes`: connections to one holder at most. `stall_s`: a chunk of which nothing comes for so long,
    or for four times what is to be expected at the rate so far, has stalled; `chunk_deadline_s` bounds all of it.

    A holder is left after `stalls_per_holder` stalls or `failures_per_holder` failures in a row; `pause_s` passes
    before it is asked again. After `hedge_after_s` without a byte an idle lane is asked too for a chunk that is under
    way. `uploads` bounds the chunks that are read at one time for others, `partials` the unfinished blobs that are
    remembered.
    """

    requests_per_lane: int = 12
    lanes: int = MAX_LANES
    stall_s: float = 20.0
    chunk_deadline_s: float = 600.0
    descriptor_deadline_s: float = 10.0
    hedge_after_s: float = 2.0
    stalls_per_holder: int = 2
    failures_per_holder: int = 3
    pause_s: float = 0.5
    uploads: int = 64
    partials: int = 8


class LaneMemory:
    """How many lanes paid the last time, per holder."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[PeerId, int] = OrderedDict()

    def recall(self, peer_id: PeerId) -> int:
        return self._lanes.get(peer_id, 2)

    def note(self, peer_id: PeerId, lanes: int) -> None:
        self._lanes[peer_id] = lanes
        self._lanes.move_to_end(peer_id)
        if len(self._lanes) > _MAX_REMEMBERED:
            self._lanes.popitem(last=False)


@dataclass(slots=True)
class Job:
    """One fetch: what, how far, what went wrong with whom. `corrupt` and `fetched` report to the exchange."""

    blob_id: BlobId
    partial: PartialBlob
    faults: dict[PeerId, str]
    progress: Callable[[int, int], None] | None
    on_corrupt: Callable[[PeerId], None]
    on_fetched: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a fetch works with."""

    endpoint: Caller
    offload: Offload
    params: BlobParams
    download: DownloadLimit
    memory: LaneMemory


async def fetch_chunks(job: Job, holders: Sequence[Contact], tools: Tools) -> None:
    """Works until the blob is complete or every holder is given up; `job.faults` says why."""
    most = max(1, tools.params.lanes // max(1, len(holders)))
    async with trio.open_nursery() as nursery:
        for contact in holders:
            nursery.start_soon(_Holder(job, contact, tools, most).work)


class _Holder:
    """One holder: its lanes, its failures."""

    def __init__(self, job: Job, contact: Contact, tools: Tools, most_lanes: int) -> None:
        self._job = job
        self._partial = job.partial
        self._contact = contact
        self._peer_id = PeerId(contact.peer_id)
        self._tools = tools
        self._params = tools.params
        self._most_lanes = most_lanes
        self._received_bytes = 0
        self._first_answer_s = math.inf
        self._failures = self._stalls = 0
        self._failed_at = self._resume_at = -math.inf
        self._is_left = False
        self._lanes: list[LaneRate] = []
        self._count: LaneCount | None = None

    @property
    def _is_over(self) -> bool:
        return self._partial.is_complete or self._is_left

    @property
    def _wanted_lanes(self) -> int:
        return self._count.wanted if self._count else 1

    @property
    def _rtt_s(self) -> float | None:
        """As the link has it, else the time of the quickest answer."""
        rtt_s = self._tools.endpoint.rtt_s(self._peer_id)
        if rtt_s is None and self._first_answer_s < math.inf:
            return self._first_answer_s
        return rtt_s

    async def work(self) -> None:
        """Keeps requests going on the lanes until nothing is left to do here."""
        async with trio.open_nursery() as nursery:
            while not self._is_over:
                self._adapt_lanes()
                # With more than one, lane 0 only helps out until the others have their speed.
                while len(self._lanes) < self._wanted_lanes + (self._wanted_lanes > 1):
                    lane = LaneRate(self._peer_id, len(self._lanes))
                    self._lanes.append(lane)
                    nursery.start_soon(self._use_lane, lane)
                await self._wait(_LOOK_S if self._count else None)
        if self._count is not None:
            self._tools.memory.note(self._peer_id, self._count.wanted)

    def _adapt_lanes(self) -> None:
        now = trio.current_time()
        left = self._partial.descriptor.size - self._partial.done_bytes
        if self._count is not None:
            self._count.update(self._received_bytes, left, now)
        elif self._most_lanes > 1 and left >= _MIN_LANES_BYTES and (rtt_s := self._rtt_s) is not None:
            if rtt_s >= _NEAR_S:
                start = self._tools.memory.recall(self._peer_id)
                self._count = LaneCount(now, rtt_s, start=start, most=self._most_lanes)
            else:
                self._most_lanes = 1

    async def _wait(self, seconds: float | None = None) -> None:
        """Until something has changed, or an idle lane may look again."""
        with trio.move_on_after(self._params.hedge_after_s / 2 if seconds is None else seconds):
            await self._partial.changed.wait()

    async def _use_lane(self, lane: LaneRate) -> None:
        async with trio.open_nursery() as nursery:
            while not self._is_over:
                now = trio.current_time()
                if now < self._resume_at:
                    await self._wait(self._resume_at - now)
                    continue
                index = None
                if self._is_wanted(lane) and self._has_room(lane):
                    index = self._partial.choose(lane, now, self._params.hedge_after_s)
                if index is None:
                    await self._wait()
                    continue
                request = self._partial.ask(index, lane, now)
                at = self._tools.download.reserve(request.size_bytes, now)
                if at > now:
                    request.moved_at = request.asked_at = at
                    await trio.sleep_until(at)
                nursery.start_soon(self._fetch, request)
            # What the last requests of a lane bring is of no use any more, or nothing they could.
            nursery.cancel_scope.cancel()

    def _is_wanted(self, lane: LaneRate) -> bool:
        if self._wanted_lanes == 1:
            return not lane.number
        if lane.number:
            return lane.number <= self._wanted_lanes
        return not any(other.bytes_per_s for other in self._lanes[1:])

    def _has_room(self, lane: LaneRate) -> bool:
        """Whether it is time to ask for the next chunk: what is under way lasts about a round trip."""
        if lane.requests >= self._params.requests_per_lane:
            return False
        ahead_s = (self._rtt_s or 0.0) + _AHEAD_S
        return not lane.requests or lane.outstanding_bytes < max(lane.bytes_per_s * ahead_s, _MIN_AHEAD_BYTES)

    async def _fetch(self, request: Request) -> None:
        """One request, and what its failure means for the holder."""
        try:
            if await self._bring(request):
                self._stalls = 0
                self._failures = 0
                if self._job.progress:
                    self._job.progress(self._partial.done_bytes, self._partial.descriptor.size)
        except BlobInvalid:
            self._leave("sent a wrong chunk")
            self._job.on_corrupt(self._peer_id)
            logger.warning("peer %s sent a wrong chunk of blob %s", short(self._peer_id), short(self._job.blob_id))
        except DeadlineExpired as error:
            self._note_failure(request, error)
        except PeerError as error:
            is_unusable = isinstance(error, ConnectError | Disconnected) and not request.received_bytes
            if request.lane.number and is_unusable and self._count is not None:
                self._count.give_up_on_more(request.lane.number - 1)
            else:
                self._note_failure(request, error)
        finally:
            self._partial.end(request)

    def _note_failure(self, request: Request, error: PeerError) -> None:
        """Counts, and lets some time pass before the holder is asked again."""
        self._job.faults.setdefault(self._peer_id, str(error))
        code = error.code if isinstance(error, Refusal) else ""
        if code == "unknown-blob":
            self._leave(str(error))
        elif code != "busy" and request.asked_at > self._failed_at:
            # Requests that failed together, with one connection, count as one failure.
            self._failed_at = trio.current_time()
            self._failures += 1
            self._stalls += isinstance(error, DeadlineExpired)
            if self._failures >= self._params.failures_per_holder or self._stalls >= self._params.stalls_per_holder:
                self._leave(str(error))
        self._resume_at = trio.current_time() + self._params.pause_s * max(self._failures, 1)

    def _leave(self, fault: str) -> None:
        self._job.faults[self._peer_id] = fault
        self._is_left = True
        self._partial.stir()

    async def _bring(self, request: Request) -> bool:
        """Gets one chunk into place. False if another lane was faster. Raises `PeerError`."""
        partial = self._partial
        method = dataclasses.replace(CHUNK, max_reply_bytes=request.size_bytes)
        pieces: list[bytes] = []
        with request.scope, trio.CancelScope(deadline=self._stall_at(request)) as progress:
            async with self._tools.endpoint.stream(
                self._contact,
                method,
                ChunkRequest(self._job.blob_id, request.index),
                deadline_s=self._params.chunk_deadline_s,
                lane=request.lane.number,
            ) as parts:
                async for part in parts:
                    now = trio.current_time()
                    if not pieces and request.lane.requests == 1:
                        self._first_answer_s = min(self._first_answer_s, now - request.asked_at)
                    pieces.append(part)
                    self._received_bytes += len(part)
                    partial.arrive(request, len(part), now)
                    progress.deadline = self._stall_at(request)
                    if self._has_room(request.lane):
                        partial.stir()
            progress.deadline = math.inf
            if not await self._tools.offload(partial.take, request.index, b"".join(pieces)):
                raise BlobInvalid(f"wrong chunk from peer {short(self._peer_id)}")
        if progress.cancelled_caught:
            raise DeadlineExpired(f"peer {short(self._peer_id)} stalled: nothing of a chunk came")
        if request.scope.cancelled_caught or request.index in partial.done:
            return False
        partial.finish(request)
        self._job.on_fetched(request.size_bytes)
        return True

    def _stall_at(self, request: Request) -> float:
        expected_s = request.lane.expected_s(0)
        longest_s = 4 * expected_s if expected_s < math.inf else 0.0
        return trio.current_time() + max(self._params.stall_s, min(longest_s, self._params.chunk_deadline_s))
