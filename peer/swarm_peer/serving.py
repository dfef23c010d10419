"""The requests that one side of a connection answers: one task each, bounded in number, memory and time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import trio

from swarm_peer.errors import ProtocolError, Refusal
from swarm_peer.identity import PeerId
from swarm_peer.mux import Mux
from swarm_peer.mux_events import ResetCode
from swarm_peer.pacing import CreditBudget, DownloadLimit, MemoryBudget, UploadLimit
from swarm_peer.rpc import (
    Handler,
    Method,
    Priority,
    ReplyHeader,
    RequestHeader,
    StreamHandler,
    decode_body,
    encode_body,
)

logger = logging.getLogger("swarm_peer")

# A reply this small is left to the connection; for a larger one the handler's task waits, so that the deadline
# also bounds how long its bytes are kept for a slow reader.
_SMALL_REPLY_BYTES = 64 * 1024
_MAX_PART_BACKLOG_BYTES = 512 * 1024


class Registered(NamedTuple):
    """A method and who answers it."""

    method: Method[Any, Any]
    handler: Handler[Any, Any] | None
    stream_handler: StreamHandler[Any] | None


@dataclass(slots=True)
class Shared:
    """What all connections of an endpoint have in common."""

    budget: MemoryBudget
    upload: UploadLimit = field(default_factory=UploadLimit)
    download: DownloadLimit = field(default_factory=DownloadLimit)
    credit: CreditBudget = field(default_factory=CreditBudget)
    handlers: dict[str, Registered] = field(default_factory=dict)
    drops: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Serving:
    """A request being answered."""

    header: RequestHeader
    registered: Registered
    scope: trio.CancelScope
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    complete: trio.Event = field(default_factory=trio.Event)
    progressed: trio.Event = field(default_factory=trio.Event)
    is_headed: bool = False
    budgeted: int = 0


class Requests:
    """The requests of one connection. `stir` wakes its writer."""

    def __init__(
        self,
        mux: Mux,
        shared: Shared,
        *,
        remote: PeerId,
        memory_bytes: int,
        stir: Callable[[], None],
    ) -> None:
        self._mux = mux
        self._shared = shared
        self._remote = remote
        self._memory_left = memory_bytes
        self._stir = stir
        self._serving: dict[int, Serving] = {}

    def find(self, stream_id: int) -> Serving | None:
        """The request of a stream, if it is being answered."""
        return self._serving.get(stream_id)

    def on_open(self, stream_id: int, header: RequestHeader, nursery: trio.Nursery) -> None:
        """A request begins. What it announces is checked before a byte of it is kept."""
        shared = self._shared
        registered = shared.handlers.get(header.method)
        if registered is None:
            self._refuse(stream_id, Refusal("unknown-method", header.method))
            return
        limit = registered.method.max_request_bytes
        if header.body_bytes > limit:
            shared.drops["oversized-request"] += 1
            self._refuse(stream_id, Refusal("oversized-request", f"at most {limit} bytes are taken"))
            return
        # Handlers whose stream was reset may still be cleaning up: they count, too.
        if (
            len(self._serving) >= 2 * self._mux.limits.max_streams
            or header.body_bytes > self._memory_left
            or not shared.budget.take(header.body_bytes)
        ):
            shared.drops["busy"] += 1
            self._refuse(stream_id, Refusal("busy", "too many requests under way"))
            return
        self._memory_left -= header.body_bytes
        scope = trio.CancelScope(deadline=trio.current_time() + header.deadline_ms / 1000)
        serving = self._serving[stream_id] = Serving(header, registered, scope, budgeted=header.body_bytes)
        nursery.start_soon(self._serve, stream_id, serving)

    def on_bytes(self, stream_id: int, serving: Serving, data: bytes) -> None:
        """Bytes of the request."""
        serving.size += len(data)
        if serving.size > serving.header.body_bytes:
            raise ProtocolError("body-overrun")
        serving.pieces.append(data)
        self._mux.grant(stream_id, len(data), trio.current_time())

    def on_end(self, serving: Serving) -> None:
        """The request ends."""
        if serving.size < serving.header.body_bytes:
            raise ProtocolError("body-underrun")
        serving.complete.set()

    async def _serve(self, stream_id: int, serving: Serving) -> None:
        try:
            with serving.scope:
                await serving.complete.wait()
                await self._answer(stream_id, serving)
            if serving.scope.cancelled_caught:
                self._mux.reset(stream_id, ResetCode.DEADLINE)  # does nothing if the caller reset it
        except Exception as error:
            refusal = _as_refusal(error)
            if refusal is None:
                self._shared.drops["handler-crash"] += 1
                logger.error("the handler of %s failed", serving.header.method, exc_info=error)
                refusal = Refusal("internal", "the handler failed; its log says why")
            if serving.is_headed:
                self._mux.reset(stream_id, ResetCode.FAILED)
            else:
                self._refuse(stream_id, refusal)
        finally:
            del self._serving[stream_id]
            self._memory_left += serving.header.body_bytes
            self._shared.budget.give_back(serving.budgeted)
            self._stir()

    async def _answer(self, stream_id: int, serving: Serving) -> None:
        method, handler, stream_handler = serving.registered
        try:
            request = decode_body(method.request, b"".join(serving.pieces))
        except ProtocolError as error:
            self._shared.drops[error.reason] += 1
            raise Refusal("malformed-request", error.detail) from None
        serving.pieces.clear()
        if handler is not None:
            body = encode_body(method.reply, await handler(self._remote, request))
            self._reserve_reply(serving, len(body))
            self._send_head(stream_id, serving, len(body))
            self._mux.send(stream_id, body, fin=True)
            self._stir()
            if len(body) <= _SMALL_REPLY_BYTES:
                return
        else:
            assert stream_handler is not None
            sender = _Sender(self, stream_id, serving)
            await stream_handler(self._remote, request, sender)
            self._send_head(stream_id, serving, -1)
            self._mux.send(stream_id, b"", fin=True)
            self._stir()
        while self._mux.is_sending(stream_id):
            await _progress(serving)

    def _reserve_reply(self, serving: Serving, size: int) -> None:
        limit = serving.registered.method.max_reply_bytes
        if size > limit:
            raise ValueError(f"reply of {size} bytes, {limit} are allowed")
        if not self._shared.budget.take(size):
            self._shared.drops["busy"] += 1
            raise Refusal("busy", "too many replies wait to be read")
        serving.budgeted += size

    async def send_part(self, stream_id: int, serving: Serving, part: bytes) -> None:
        """Sends a part of a streamed reply; waits while the caller is slow."""
        self._send_head(stream_id, serving, -1)
        self._mux.send(stream_id, part, fin=False)
        self._stir()
        await trio.lowlevel.checkpoint()
        while self._mux.output_bytes(stream_id) > _MAX_PART_BACKLOG_BYTES:
            await _progress(serving)

    def _send_head(self, stream_id: int, serving: Serving, body_bytes: int) -> None:
        if not serving.is_headed:
            serving.is_headed = True
            head = msgspec.msgpack.encode(ReplyHeader("", "", body_bytes))
            self._mux.answer(stream_id, head, serving.registered.method.priority)

    def _refuse(self, stream_id: int, refusal: Refusal) -> None:
        head = msgspec.msgpack.encode(ReplyHeader(refusal.code, refusal.detail, 0))
        self._mux.answer(stream_id, head, Priority.CONTROL)
        self._mux.send(stream_id, b"", fin=True)


class _Sender:
    """What a streaming handler writes to."""

    def __init__(self, requests: Requests, stream_id: int, serving: Serving) -> None:
        self._requests = requests
        self._stream_id = stream_id
        self._serving = serving
        self._left = serving.registered.method.max_reply_bytes

    async def send(self, part: bytes | bytearray | memoryview) -> None:
        """As `PartSender.send`."""
        self._left -= len(part)
        if self._left < 0:
            raise ValueError("the streamed reply is larger than its method allows")
        await self._requests.send_part(self._stream_id, self._serving, bytes(part))


async def _progress(serving: Serving) -> None:
    serving.progressed = trio.Event()
    await serving.progressed.wait()


def _as_refusal(error: Exception) -> Refusal | None:
    """The refusal that a handler raised, also from within a nursery of its own."""
    if isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        return _as_refusal(error.exceptions[0])
    return error if isinstance(error, Refusal) else None
