"""The relay: a public peer that connects two others who cannot dial each other.

    dialer                        relay                          target (keeps a connection to the relay)
    relay.open(target)  ------->        ------- relay.invite(dialer, token) ---->
    new connection, SWR1 token -->      <---------------- new connection, SWR1 token
              <-------------- go        go -------------->
    TLS, end to end  <=================================================>  TLS, end to end

It copies bytes between two raw connections. It sees who talks to whom, when and how much; what they say it cannot
read or change. Every client, which is the host that asked for a circuit, gets the same share of
`RelayLimits.bytes_per_s`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import trio

from swarm_peer.addresses import Address, Contact
from swarm_peer.circuit_table import Circuit, CircuitTable, RelayLimits
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import PeerError, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.raw import RawConnection, RawStream, RawTransport
from swarm_peer.relay_messages import (
    ASK_CALL_BACK,
    CALL_BACK,
    CIRCUIT_MAGIC,
    INVITE,
    OPEN_CIRCUIT,
    RESERVE,
    CallBack,
    CallBackRequest,
    CircuitReply,
    CircuitRequest,
    Go,
    Invitation,
    Nothing,
    ReserveReply,
    encode_go,
)
from swarm_peer.relay_turns import ClientTurns, HourlyQuota, Turns
from swarm_peer.rpc import Method, Q, R
from swarm_peer.storage import RateLimiter

logger = logging.getLogger("swarm_peer")

# A turn is 10 ms of the relay's rate: short enough for whoever waits, long enough to cost little.
_TURN_S = 0.01
_MIN_PIECE_BYTES = 16 * 1024
_MAX_PIECE_BYTES = 256 * 1024
_TARGET_DEADLINE_S = 4.0
_LAST_BYTES_S = 2.0


@dataclass(slots=True)
class RelayStats:
    """Counters since the start. Bytes are those that were passed on."""

    circuits: int = 0
    call_backs: int = 0
    bytes: int = 0


class Relay:
    """Serves reservations, circuits and call-backs to those whom `may_relay` admits, while `run` runs."""

    def __init__(
        self,
        endpoint: Endpoint,
        transport: RawTransport,
        *,
        limits: RelayLimits | None = None,
        may_relay: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        self._endpoint = endpoint
        self._limits = limits or RelayLimits()
        self.may_relay = may_relay
        self._table = CircuitTable(self._limits)
        self._rates = RateLimiter(rate_per_s=1.0, burst=20.0)
        self._total = ClientTurns(self._limits.bytes_per_s, HourlyQuota(self._limits.client_bytes_per_hour))
        self._piece_bytes = int(min(max(_TURN_S * self._limits.bytes_per_s, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES))
        self._waiting: dict[Circuit, _Meeting] = {}
        self.stats = RelayStats()
        endpoint.handle(RESERVE, self._on_reserve)
        endpoint.handle(OPEN_CIRCUIT, self._on_open)
        endpoint.handle(ASK_CALL_BACK, self._on_ask_call_back)
        transport.on_greeting(CIRCUIT_MAGIC, self._on_end)

    @property
    def circuits(self) -> int:
        """How many circuits there are now."""
        return len(self._table)

    @property
    def reservations(self) -> int:
        """How many peers can be called through this relay."""
        return self._table.reserved

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lets go of what nobody uses, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._limits.join_s / 2)
            self._table.expire(trio.current_time())

    # What peers ask.

    async def _on_reserve(self, remote: PeerId, request: Nothing) -> ReserveReply:
        seen_at = self._admit(remote)
        self._table.reserve(remote, trio.current_time())
        return ReserveReply(seen_at)

    async def _on_open(self, remote: PeerId, request: CircuitRequest) -> CircuitReply:
        seen_at = self._admit(remote)
        target, target_at = self._find(request.target, remote)
        circuit = self._table.open((remote, seen_at), (target, target_at), trio.current_time())
        self._waiting[circuit] = _Meeting()
        circuit.on_close = lambda: self._end(circuit)
        try:
            await self._tell(target, INVITE, Invitation(remote, circuit.tokens[1]))
        except BaseException:
            self._table.close(circuit)
            raise
        return CircuitReply(circuit.tokens[0])

    async def _on_ask_call_back(self, remote: PeerId, request: CallBackRequest) -> Nothing:
        seen_at = self._admit(remote)
        target, _ = self._find(request.target, remote)
        await self._tell(target, CALL_BACK, CallBack(remote, Address(seen_at.host, request.port)))
        self.stats.call_backs += 1
        return Nothing()

    def _admit(self, remote: PeerId) -> Address:
        """Where we see the asker. Raises `Refusal` unless it may use this relay."""
        if not self.may_relay(remote):
            raise Refusal("not-a-member", "this relay serves members of its runs only")
        seen_at = self._endpoint.seen_at(remote)
        if seen_at is None:
            raise Refusal("not-observed", "a relay is not asked through another relay")
        if not self._rates.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")
        return seen_at

    def _find(self, target: bytes, asker: PeerId) -> tuple[PeerId, Address]:
        peer = PeerId(target)
        seen_at = self._endpoint.seen_at(peer) if self._table.is_reserved(peer, trio.current_time()) else None
        if seen_at is None or peer == asker:
            raise Refusal("not-here", "the peer has no reservation with this relay")
        return peer, seen_at

    async def _tell(self, target: PeerId, method: Method[Q, R], request: Q) -> None:
        try:
            await self._endpoint.call(Contact(target, ()), method, request, deadline_s=_TARGET_DEADLINE_S)
        except Refusal:
            raise
        except PeerError:
            raise Refusal("not-here", "the peer does not answer") from None

    # Circuits.

    async def _on_end(self, raw: RawConnection, token: bytes) -> None:
        """The life of one end's connection. The second to come copies, in both directions; the first waits for it."""
        joined = self._table.join(token, trio.current_time())
        if joined is None:
            return
        circuit, end = joined
        meeting = self._waiting[circuit]
        meeting.ends[end] = raw
        try:
            if not circuit.is_complete:
                await meeting.over.wait()
                return
            first, second = meeting.ends[0], meeting.ends[1]
            logger.info("circuit %s opens", _name(circuit))
            self.stats.circuits += 1
            with meeting.scope:
                await self._splice(meeting, circuit.client, first, second)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._table.close(circuit)

    def _end(self, circuit: Circuit) -> None:
        meeting = self._waiting.pop(circuit)
        meeting.scope.cancel()
        meeting.over.set()
        logger.info("circuit %s ends after %d bytes", _name(circuit), meeting.bytes)

    async def _splice(self, meeting: _Meeting, client: Hashable, first: RawConnection, second: RawConnection) -> None:
        await first.stream.send_all(encode_go(Go(first.remote, second.remote)))
        await second.stream.send_all(encode_go(Go(second.remote, first.remote)))
        own = Turns(self._limits.circuit_bytes_per_s) if self._limits.circuit_bytes_per_s else None
        meeting.moved_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            ended: list[None] = []

            async def copy(source: RawStream, target: RawStream) -> None:
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._copy(meeting, client, source, target, own)
                ended.append(None)
                # The other direction may still carry a goodbye.
                nursery.cancel_scope.deadline = trio.current_time() + (_LAST_BYTES_S if len(ended) == 1 else 0)

            nursery.start_soon(copy, first.stream, second.stream)
            nursery.start_soon(copy, second.stream, first.stream)
            nursery.start_soon(self._end_when_idle, meeting, nursery.cancel_scope)

    async def _copy(
        self, meeting: _Meeting, client: Hashable, source: RawStream, target: RawStream, own: Turns | None
    ) -> None:
        while data := await source.receive_some(self._piece_bytes):
            if own is not None:
                await own.take(len(data))
            await self._total.take(client, len(data))
            await target.send_all(data)
            meeting.moved_at = trio.current_time()
            meeting.bytes += len(data)
            self.stats.bytes += len(data)
        await target.send_eof()

    async def _end_when_idle(self, meeting: _Meeting, scope: trio.CancelScope) -> None:
        while (idle_at := meeting.moved_at + self._limits.idle_s) > trio.current_time():  # noqa: ASYNC110  # time passes
            await trio.sleep_until(idle_at)
        scope.cancel()


@dataclass(slots=True, eq=False)
class _Meeting:
    """The two connections of a circuit, as they come."""

    ends: dict[int, RawConnection] = field(default_factory=dict)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    over: trio.Event = field(default_factory=trio.Event)
    moved_at: float = 0.0
    bytes: int = 0


def _name(circuit: Circuit) -> str:
    return " - ".join(map(short, circuit.peers))
