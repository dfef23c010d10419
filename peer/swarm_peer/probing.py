"""What a peer measures with another one: its clock, and what the link between them carries. Short and bounded.

A download is a streamed reply, an upload a few requests whose bodies are thrown away. Whoever serves gives each peer
little and one at a time, so that this is no way to waste somebody's link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import trio

from swarm_peer.addresses import Address, Contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import PeerError, Refusal
from swarm_peer.identity import PeerId
from swarm_peer.rpc import Method, PartSender, Priority
from swarm_peer.storage import RateLimiter

PROBE_BYTES: Final = 8 * 1024 * 1024
PROBE_S: Final = 5.0
_PIECE_BYTES: Final = 256 * 1024
_IN_FLIGHT: Final = 4
_MAX_AT_ONCE: Final = 2


class Look(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What do you see of me, and what is your time?"""


class Sight(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where the asker's direct connection comes from (empty: there is none), and the time of day, Unix milliseconds."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:%-]{0,253}\Z")]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    unix_ms: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class Download(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """So many bytes, please."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=PROBE_BYTES)]


class Received(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to a piece of an upload."""


LOOK: Final = Method("probe.look", Look, Sight, 64, 512, priority=Priority.CONTROL)
DOWNLOAD: Final = Method("probe.download", Download, bytes, 64, PROBE_BYTES, priority=Priority.BULK)
UPLOAD: Final = Method("probe.upload", bytes, Received, _PIECE_BYTES, 64, priority=Priority.BULK)


@dataclass(frozen=True, slots=True)
class Speed:
    """What went through, and in how many seconds."""

    size_bytes: int
    seconds: float

    @property
    def bits_per_s(self) -> float:
        return 8 * self.size_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Glance:
    """How a peer sees us. `clock_ahead_s`: by how much its clock is ahead of ours, give or take half of `rtt_s`."""

    observed: Address | None
    rtt_s: float
    clock_ahead_s: float


class ProbeServer:
    """Answers probes: 40 MB up and down per peer and ten minutes, two peers at a time."""

    def __init__(self, endpoint: Endpoint, *, wall_clock: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._wall_clock = wall_clock
        self._looks = RateLimiter(rate_per_s=1.0, burst=20.0)
        self._bytes = RateLimiter(rate_per_s=5 * PROBE_BYTES / 600, burst=5.0 * PROBE_BYTES)
        self._at_work = 0
        endpoint.handle(LOOK, self._on_look)
        endpoint.handle(UPLOAD, self._on_upload)
        endpoint.handle_stream(DOWNLOAD, self._on_download)

    async def _on_look(self, remote: PeerId, request: Look) -> Sight:
        if not self._looks.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")
        seen = self._endpoint.seen_at(remote)
        unix_ms = round(self._wall_clock() * 1000)
        return Sight(seen.host, seen.port, unix_ms) if seen else Sight("", 0, unix_ms)

    async def _on_upload(self, remote: PeerId, request: bytes) -> Received:
        self._ration(remote, len(request))
        return Received()

    async def _on_download(self, remote: PeerId, request: Download, sender: PartSender) -> None:
        self._ration(remote, request.size_bytes)
        if self._at_work >= _MAX_AT_ONCE:
            raise Refusal("busy")
        self._at_work += 1
        try:
            left = request.size_bytes
            while left:
                piece = bytes(min(left, _PIECE_BYTES))
                await sender.send(piece)
                left -= len(piece)
        finally:
            self._at_work -= 1

    def _ration(self, remote: PeerId, size_bytes: int) -> None:
        if not self._bytes.allow(remote, trio.current_time(), size_bytes):
            raise Refusal("rate-limited")


async def look(endpoint: Endpoint, peer: Contact, *, wall_clock: Callable[[], float], tries: int = 3) -> Glance:
    """Compares clocks, and asks how the peer sees us; the quickest of some answers counts. Raises as `Caller.call`."""
    best: Glance | None = None
    for _ in range(tries):
        began, ours = trio.current_time(), wall_clock()
        sight = await endpoint.call(peer, LOOK, Look(), deadline_s=10.0)
        rtt_s = trio.current_time() - began
        if best is None or rtt_s < best.rtt_s:
            observed = Address(sight.host, sight.port) if sight.host else None
            best = Glance(observed, rtt_s, sight.unix_ms / 1000 - (ours + rtt_s / 2))
    assert best is not None
    return best


async def measure_download(endpoint: Endpoint, peer: Contact, *, size_bytes: int = PROBE_BYTES) -> Speed:
    """Takes bytes for at most `PROBE_S`. Raises as `Caller.call`."""
    got, began = 0, trio.current_time()
    async with endpoint.stream(peer, DOWNLOAD, Download(size_bytes), deadline_s=4 * PROBE_S) as parts:
        async for part in parts:
            if not got:
                began = trio.current_time()  # the first byte has paid for the round trip
            got += len(part)
            if trio.current_time() - began >= PROBE_S:
                break
    return Speed(got, trio.current_time() - began)


async def measure_upload(endpoint: Endpoint, peer: Contact, *, size_bytes: int = PROBE_BYTES) -> Speed:
    """Sends bytes for at most `PROBE_S`, a few requests at a time. Raises as `Caller.call`."""
    left, done, began = size_bytes, 0, trio.current_time()
    failures: list[PeerError] = []

    async def send() -> None:
        nonlocal left, done
        while left > 0 and trio.current_time() - began < PROBE_S:
            piece = bytes(min(left, _PIECE_BYTES))
            left -= len(piece)
            try:
                await endpoint.call(peer, UPLOAD, piece, deadline_s=4 * PROBE_S)
            except PeerError as error:
                failures.append(error)
                return
            done += len(piece)

    async with trio.open_nursery() as nursery:
        for _ in range(_IN_FLIGHT):
            nursery.start_soon(send)
    if failures and not done:
        raise failures[0]
    return Speed(done, trio.current_time() - began)
