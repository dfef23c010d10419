"""A peer's one point of contact with all others: pooled connections, calls, bans, limits and counters.

There is one live connection per remote, whoever dialled it; both sides call over it. When two peers dial each
other at the same time, the connection that the smaller peer id dialled stays, and the smaller peer id is the
only one to decide, so never both close. A task of a single remote can fail as it likes: it ends that
connection and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import trio

from swarm_peer.addresses import LOOPBACK, Address, Contact, host_group
from swarm_peer.calling import NotOpened
from swarm_peer.connection import Connection, ConnectionLimits
from swarm_peer.errors import (
    Banned,
    ConnectError,
    ConnectTimedOut,
    DeadlineExpired,
    DialledSelf,
    Disconnected,
    PeerError,
    ProtocolError,
    Unreachable,
    sanitise,
)
from swarm_peer.host_bans import HostBans
from swarm_peer.identity import Identity, PeerId, short
from swarm_peer.lanes import LANE_IDLE_S, Lanes
from swarm_peer.mux import ByeCode
from swarm_peer.pacing import DownloadLimit, MemoryBudget, UploadLimit
from swarm_peer.relay_entry import direct_addresses
from swarm_peer.rpc import Handler, Method, Q, R, StreamHandler, decode_body, encode_body
from swarm_peer.serving import Registered, Shared
from swarm_peer.transport import Channel, Transport
from swarm_peer.uplink import AutoUploadLimit

logger = logging.getLogger("swarm_peer")

_MAX_BANS = 4096
# Two connections to the same peer that began within this time come from dialling each other at once; otherwise
# the older one is what a crashed remote has left behind.
_SIMULTANEOUS_S = 10.0
_STAGGER_S = 0.25
# With addresses that can be dialled directly, a relay is asked only after this time, or when all have failed.
_DETOUR_AFTER_S = 1.0
_RELAYED_IDLE_S = 30.0


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


class Detour(Protocol):
    """A way to peers that cannot be dialled: through the relays that their contacts name."""

    async def dial(self, to: Contact, deadline_s: float) -> Channel:
        """A relayed channel, with us as TLS client. Is cancelled when the peer connects to us meanwhile.

        Raises `ConnectError`.
        """
        ...


class _Dial:
    """A dial under way, shared by all calls that wait for it."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: ConnectError | None = None
        self.detour = trio.CancelScope()

    def end(self) -> None:
        self.done.set()
        self.detour.cancel()


class Endpoint:
    """Implements `Caller` over a `Transport`. Calls work while `run` runs."""

    def __init__(self, identity: Identity, transport: Transport, *, limits: EndpointLimits | None = None) -> None:
        self._identity = identity
        self._transport = transport
        self._limits = limits or EndpointLimits()
        upload = self._limits.upload_bytes_per_s
        self._shared = Shared(
            MemoryBudget(self._limits.served_memory_bytes),
            AutoUploadLimit() if upload == "auto" else UploadLimit(upload),
            DownloadLimit(self._limits.download_bytes_per_s),
        )
        self._drops = self._shared.drops
        self._pool: dict[PeerId, list[Connection]] = {}  # oldest first
        self._lanes = Lanes(self._limits.max_connections // 2)
        self._dials: dict[PeerId, _Dial] = {}
        self._bans: dict[PeerId, tuple[float, str]] = {}
        self._host_bans = HostBans()
        self._past_sent = 0
        self._past_received = 0
        self._calls = 0
        self._nursery: trio.Nursery | None = None
        self._stopped = trio.Event()
        self._refusing = 0
        self._dialling = 0
        self._closed_one = trio.Event()
        self.detour: Detour | None = None
        # Where a peer has been met, for contacts that name relays only: within a home, relays are a long way round.
        self.also_at: Callable[[PeerId], tuple[Address, ...]] = lambda peer: ()

    @property
    def peer_id(self) -> PeerId:
        """Our own peer id."""
        return self._identity.peer_id

    @property
    def stats(self) -> EndpointStats:
        """A snapshot of the counters."""
        live = self._connections()
        return EndpointStats(
            bytes_sent=self._past_sent + sum(c.channel.bytes_sent for c in live),
            bytes_received=self._past_received + sum(c.channel.bytes_received for c in live),
            connections=len(live),
            calls=self._calls,
            dropped=self._drops + self._transport.drops,
        )

    def connected(self) -> list[PeerId]:
        """The remotes to which a live connection exists."""
        return [remote for remote in self._pool if self._usable(remote) is not None]

    def rtt_s(self, peer_id: PeerId) -> float | None:
        """As `Caller.rtt_s`."""
        connection = self._usable(peer_id)
        return connection.rtt_s if connection is not None else None

    def seen_at(self, remote: PeerId) -> Address | None:
        """Where a remote's direct connection to us comes from; None if there is none."""
        direct = [c for c in self._pool.get(remote, ()) if not c.is_relayed]
        return direct[-1].channel.remote_address if direct else None

    def is_relayed(self, remote: PeerId) -> bool | None:
        """Whether calls to a remote go through a relay now; None if it is not connected."""
        connection = self._usable(remote)
        return connection.is_relayed if connection is not None else None

    def handle(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Registers the one handler of a method."""
        self._register(Registered(method, handler, None))

    def handle_stream(self, method: Method[Q, bytes], handler: StreamHandler[Q]) -> None:
        """Registers the one handler of a method whose reply is a stream of bytes, for `stream`."""
        self._register(Registered(method, None, handler))

    @property
    def download(self) -> DownloadLimit:
        """The limit that bulk of ours is asked for under."""
        return self._shared.download

    def limit_upload(self, bytes_per_s: float | None) -> None:
        """Changes `EndpointLimits.upload_bytes_per_s` from now on."""
        self._shared.upload.bytes_per_s = bytes_per_s

    def _register(self, registered: Registered) -> None:
        name = registered.method.name
        if name in self._shared.handlers:
            raise ValueError(f"method {name} has a handler already")
        self._shared.handlers[name] = registered

    # Life.

    async def run(
        self,
        listen: Sequence[Address],
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listens (on nothing, if `listen` is empty) and keeps connections until cancelled or `aclose`d.

        Starts with the list of bound addresses. Raises `AddressInUse` or `ListenError`.
        """
        if self._nursery is not None or self._stopped.is_set():
            raise RuntimeError("an endpoint runs once")
        failure: PeerError | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    bound: list[Address] = []
                    if listen:
                        bound = await nursery.start(self._transport.serve, listen, self._accept)
                except PeerError as error:
                    failure = error
                    nursery.cancel_scope.cancel()
                else:
                    task_status.started(bound)
                    await trio.sleep_forever()
        finally:
            self._nursery = None
            self._stopped.set()
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        """Closes everything, telling the remotes; bounded to about two seconds."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            await self._stopped.wait()

    # Calls.

    async def call(self, to: Contact, method: Method[Q, R], request: Q, *, deadline_s: float = 5.0) -> R:
        """As `Caller.call`. A call is never repeated once it may have reached the remote."""
        body = self._encode_request(method, request)
        deadline = trio.current_time() + deadline_s
        connection: Connection | None = None
        with trio.move_on_at(deadline):
            while True:
                connection = await self._connect(to)
                with contextlib.suppress(NotOpened):
                    reply = await connection.call(method, body, deadline)
                    return self._decode_reply(method, reply)
        raise _too_late(to, method, deadline_s, is_connected=connection is not None)

    @contextlib.asynccontextmanager
    async def stream(
        self, to: Contact, method: Method[Q, bytes], request: Q, *, deadline_s: float = 60.0, lane: int = 0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A call whose reply comes in parts: `async with endpoint.stream(...) as parts`, `async for part in parts`.

        The sender is held up while the parts are not taken; `method.max_reply_bytes` bounds their sum. The
        deadline covers all of it. Leaving the block early cancels the remote's handler. Raises as `call`.
        """
        body = self._encode_request(method, request)
        deadline = trio.current_time() + deadline_s
        connection: Connection | None = None
        with trio.move_on_at(deadline) as scope:
            async with contextlib.AsyncExitStack() as stack:
                while True:
                    connection = await (self._connect_lane(to, lane) if lane else self._connect(to))
                    with contextlib.suppress(NotOpened):
                        opened = connection.stream(method, body, deadline)
                        parts = await stack.enter_async_context(opened)
                        break
                yield parts
        if scope.cancelled_caught:
            raise _too_late(to, method, deadline_s, is_connected=connection is not None)

    async def identify(self, address: Address, *, deadline_s: float = 10.0) -> PeerId:
        """Connects to an address whose peer id is not known, and returns who proved to be there.

        The connection is kept for the calls that follow. Raises a subclass of `ConnectError`.
        """
        if self._nursery is None:
            raise RuntimeError("the endpoint does not run")
        async with self._slot(address):
            channel = await self._transport.dial(address, None, deadline_s)
        if (ban := self._ban_of(channel.remote)) is not None:
            await self._connection(channel, is_dialer=True).refuse(ByeCode.BANNED)
            raise ban
        connection = self._adopt(channel, is_dialer=True)
        self._nursery.start_soon(self._supervise, connection)
        return channel.remote

    async def take(self, channel: Channel, *, is_dialer: bool, is_relayed: bool) -> bool:
        """Puts a channel to use that came about in another way than by `Transport.dial` and `serve`. False, and it is
        closed, if contact with its remote is refused."""
        if self._nursery is None or self._ban_of(channel.remote) is not None:
            await self._connection(channel, is_dialer=is_dialer).refuse(ByeCode.BANNED)
            return False
        connection = self._adopt(channel, is_dialer=is_dialer, is_relayed=is_relayed)
        self._nursery.start_soon(self._supervise, connection)
        return True

    def ban(self, peer_id: PeerId, reason: str, seconds: float) -> None:
        """Refuses all contact with a peer for a while, and ends its connections now. Counted as "banned"."""
        now = trio.current_time()
        self._bans[peer_id] = (now + seconds, sanitise(reason))
        if len(self._bans) > _MAX_BANS:
            self._bans = {who: ban for who, ban in self._bans.items() if ban[0] > now}
            while len(self._bans) > _MAX_BANS:
                del self._bans[next(iter(self._bans))]
        self._drops["banned"] += 1
        logger.info("banned peer %s for %.0f s: %s", short(peer_id), seconds, sanitise(reason))
        for connection in [*self._pool.get(peer_id, ()), *self._lanes.of(peer_id)]:
            connection.abort(ByeCode.BANNED, f"peer {short(peer_id)} was banned: {sanitise(reason)}")

    def _encode_request(self, method: Method[Any, Any], request: object) -> bytes:
        body = encode_body(method.request, request)
        if len(body) > method.max_request_bytes:
            raise ValueError(f"{method.name}: request of {len(body)} bytes, {method.max_request_bytes} allowed")
        self._calls += 1
        return body

    def _decode_reply(self, method: Method[Q, R], reply: bytes) -> R:
        try:
            return decode_body(method.reply, reply)
        except ProtocolError as error:
            self._drops[error.reason] += 1
            raise

    # Connections.

    async def _connect(self, to: Contact) -> Connection:
        """A live connection to a peer: the pooled one, or a new one."""
        nursery = self._nursery
        if nursery is None:
            raise Disconnected("this endpoint does not run")
        remote = PeerId(to.peer_id)
        if remote == self.peer_id:
            raise DialledSelf(to)
        if (ban := self._ban_of(remote)) is not None:
            raise ban
        if (connection := self._usable(remote)) is not None:
            return connection
        if not to.addresses and remote not in self._dials:
            raise Unreachable(to, "no address of it is known")
        dial = self._dials.get(remote)
        if dial is None:
            dial = self._dials[remote] = _Dial()
            nursery.start_soon(self._dial, dial, to)
        await dial.done.wait()
        if (connection := self._usable(remote)) is not None:
            return connection
        if dial.error is not None:
            raise copy.copy(dial.error)
        raise Disconnected(f"the connection to {to} ended at once")

    async def _connect_lane(self, to: Contact, number: int) -> Connection:
        """The lane of that number to a peer, dialled if need be; at the address where its connection is, first."""
        remote = PeerId(to.peer_id)
        main = await self._connect(to)
        async with self._lanes.lock(remote, number):
            if (connection := self._lanes.find(remote, number)) is not None:
                return connection
            # Who is known by relays only was reached by simultaneous open, and that works once.
            is_hidden = bool(to.addresses) and not direct_addresses(to.addresses)
            if main.is_relayed or is_hidden or self._nursery is None:
                raise Unreachable(to, "there is no direct way for another connection to it")
            live = len(self._connections()) + self._dialling
            if not self._lanes.has_room(remote) or live + 2 > self._limits.max_connections:
                raise Unreachable(to, "there is no room for another connection to it")
            here = (main.channel.remote_address,) if main.is_dialer else ()
            addresses = tuple(dict.fromkeys((*here, *direct_addresses(to.addresses))))
            if not addresses:
                raise Unreachable(to, "no address of it is known")
            async with self._slot(to):
                won = await self._dial_first(Contact(remote, addresses), is_lane=True)
            assert won is not None
            connection = self._adopt_lane(won[0], number)
            self._nursery.start_soon(self._supervise, connection)
            return connection

    def _adopt_lane(self, channel: Channel, number: int | None = None) -> Connection:
        limits = dataclasses.replace(self._limits.connection, idle_s=min(LANE_IDLE_S, self._limits.connection.idle_s))
        connection = Connection(channel, is_dialer=number is not None, shared=self._shared, limits=limits)
        self._lanes.add(connection, number)
        return connection

    async def _dial(self, dial: _Dial, to: Contact) -> None:
        """Runs on its own, so that a call that gives up does not spoil the dial for the others."""
        remote = PeerId(to.peer_id)
        try:
            async with self._slot(to):
                won = await self._dial_first(to, dial)
            if won is None:  # it has connected to us
                return
            channel, is_relayed = won
            if (ban := self._ban_of(remote)) is not None:
                await self._connection(channel, is_dialer=True).refuse(ByeCode.BANNED)
                raise ban
            connection = self._adopt(channel, is_dialer=True, is_relayed=is_relayed)
            assert self._nursery is not None
            self._nursery.start_soon(self._supervise, connection)
        except ConnectError as error:
            dial.error = error
        except Exception as error:
            logger.exception("dialling %s failed", to)
            dial.error = Unreachable(to, f"internal error: {type(error).__name__}")
        finally:
            dial.end()
            if self._dials.get(remote) is dial:
                del self._dials[remote]

    @contextlib.asynccontextmanager
    async def _slot(self, to: Contact | Address) -> AsyncIterator[None]:
        """Room for one more connection, made by closing quiet ones. Raises `Unreachable` if all are at work."""
        most = self._limits.max_connections
        deadline = trio.current_time() + self._limits.dial_deadline_s
        while len(live := self._connections()) + self._dialling >= most:
            is_closing = any(not c.is_usable for c in live)
            if trio.current_time() >= deadline or not (self._make_room(live) or is_closing or self._dialling):
                raise Unreachable(to, f"all {most} connections of this peer are in use")
            with trio.move_on_at(deadline):
                await self._closed_one.wait()
        self._dialling += 1
        try:
            yield
        finally:
            self._dialling -= 1
            self._closed_one.set()
            self._closed_one = trio.Event()

    async def _dial_first(
        self, to: Contact, dial: _Dial | None = None, *, is_lane: bool = False
    ) -> tuple[Channel, bool] | None:
        """Tries the addresses in order, each with a small head start (RFC 8305), and last, with `dial`, the detour.

        Returns the first channel, and whether it is relayed; None if the peer was faster and connected to us.
        """
        remote = PeerId(to.peer_id)
        deadline_s = self._limits.dial_deadline_s
        more: dict[str, bool] = {"is_lane": True} if is_lane else {}
        won: list[tuple[Channel, bool]] = []
        errors: list[ConnectError] = []
        direct = direct_addresses(to.addresses)
        has_relays = len(direct) < len(to.addresses)
        if has_relays and not direct:
            direct = direct_addresses(self.also_at(remote))
        all_failed = trio.Event()

        async def attempt(address: Address | None, failed: trio.Event) -> None:
            try:
                if address is not None:
                    won.append((await self._transport.dial(address, remote, deadline_s, **more), False))
                else:
                    assert self.detour is not None
                    assert dial is not None
                    with dial.detour:
                        won.append((await self.detour.dial(to, deadline_s), True))
            except ConnectError as error:
                errors.append(error)
                failed.set()
                if len(errors) >= len(direct):
                    all_failed.set()
                return
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for address in direct:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(_STAGGER_S):
                    await failed.wait()
            if dial is not None and has_relays and self.detour is not None:
                if direct:
                    with trio.move_on_after(_DETOUR_AFTER_S):
                        await all_failed.wait()
                nursery.start_soon(attempt, None, trio.Event())
        for channel, _ in won[1:]:
            await channel.stream.aclose()
        if won:
            return won[0]
        if dial is not None and dial.done.is_set():
            return None
        raise errors[0] if errors else Unreachable(to, "it can be reached through relays only")

    async def _accept(self, channel: Channel) -> None:
        """The life of a connection that a remote dialled."""
        if (code := self._reason_to_refuse(channel)) is not None:
            if self._refusing >= self._limits.max_refusing:
                return  # closed without a word
            self._refusing += 1
            try:
                await self._connection(channel, is_dialer=False).refuse(code)
            finally:
                self._refusing -= 1
            return
        is_lane = channel.is_lane
        await self._supervise(self._adopt_lane(channel) if is_lane else self._adopt(channel, is_dialer=False))

    def _reason_to_refuse(self, channel: Channel) -> ByeCode | None:
        host = channel.remote_address.host
        if self._ban_of(channel.remote) is not None or self._host_bans.is_banned(host, trio.current_time()):
            self._drops["refused-banned"] += 1
            return ByeCode.BANNED
        if channel.is_lane and not (self._usable(channel.remote) and self._lanes.has_room(channel.remote)):
            self._drops["full"] += 1
            return ByeCode.FULL
        inbound = [c for c in self._connections() if not c.is_dialer and not c.is_relayed]
        group = host_group(channel.origin)
        from_there = sum(host_group(c.channel.origin) == group for c in inbound)
        if group != LOOPBACK and from_there >= self._limits.max_inbound_per_host:
            self._drops["full"] += 1
            return ByeCode.FULL
        most = self._limits.max_inbound
        # Some more while quiet ones say goodbye; not any number, for they may take their time.
        if len(inbound) >= most and (len(inbound) >= most + 1 + most // 8 or not self._make_room(inbound)):
            self._drops["full"] += 1
            return ByeCode.FULL
        return None

    def _make_room(self, connections: list[Connection]) -> bool:
        """Says goodbye to the connection that was quiet the longest; False if all are at work."""
        quiet = [c for c in connections if c.is_quiet and c.is_usable]
        if not quiet:
            return False
        min(quiet, key=lambda c: c.last_active).close(ByeCode.IDLE)
        return True

    def _connection(self, channel: Channel, *, is_dialer: bool, is_relayed: bool = False) -> Connection:
        limits = self._limits.connection
        if is_relayed:
            limits = dataclasses.replace(limits, idle_s=min(limits.idle_s, _RELAYED_IDLE_S))
        return Connection(channel, is_dialer=is_dialer, shared=self._shared, limits=limits, is_relayed=is_relayed)

    def _adopt(self, channel: Channel, *, is_dialer: bool, is_relayed: bool = False) -> Connection:
        """Puts a new connection in the pool and retires what it replaces."""
        connection = self._connection(channel, is_dialer=is_dialer, is_relayed=is_relayed)
        if is_dialer:
            outbound = [c for c in self._connections() if c.is_dialer]
            if len(outbound) >= self._limits.max_outbound:
                self._make_room(outbound)
        siblings = self._pool.setdefault(channel.remote, [])
        siblings.append(connection)
        if len(siblings) > self._limits.max_connections_per_peer:
            self._drops["too-many-connections"] += 1
            siblings[0].abort(ByeCode.DUPLICATE, "replaced by a newer connection")
        usable = [c for c in siblings if c.is_usable]
        if len(usable) > 1 and self.peer_id < channel.remote:
            kept = self._preferred(usable)
            for other in usable:
                # A relayed one that a direct one replaces is left to what is under way on it, and then to its idleness.
                if other is not kept and other.is_relayed == kept.is_relayed:
                    other.close(ByeCode.DUPLICATE)
        if (dial := self._dials.pop(channel.remote, None)) is not None:
            dial.end()  # whoever waits for our dial may as well use this one
        return connection

    async def _supervise(self, connection: Connection) -> None:
        """Runs a connection to its end, whatever that is."""
        channel = connection.channel
        try:
            end = await connection.run()
            if isinstance(end, ProtocolError):
                self._drops[end.reason] += 1
                logger.warning("peer %s at %s: %s", short(channel.remote), channel.remote_address, end)
                if self._limits.violation_ban_s > 0:
                    self.ban(channel.remote, str(end), self._limits.violation_ban_s)
                    until = trio.current_time() + self._limits.violation_host_ban_s
                    self._host_bans.ban(channel.remote_address.host, until)
        except Exception:
            self._drops["crash"] += 1
            logger.exception("the connection to %s failed", short(channel.remote))
        finally:
            self._lanes.remove(connection)
            siblings = self._pool.get(channel.remote, [])
            if connection in siblings:
                siblings.remove(connection)
            if not siblings:
                self._pool.pop(channel.remote, None)
            self._closed_one.set()
            self._closed_one = trio.Event()
            self._past_sent += channel.bytes_sent
            self._past_received += channel.bytes_received

    def _connections(self) -> list[Connection]:
        return [connection for siblings in self._pool.values() for connection in siblings] + self._lanes.all()

    def _usable(self, remote: PeerId) -> Connection | None:
        usable = [c for c in self._pool.get(remote, ()) if c.is_usable]
        return self._preferred(usable) if usable else None

    def _preferred(self, usable: list[Connection]) -> Connection:
        """Of several connections to one remote, the one to keep: a direct one if there is any. Both ends come to the
        same answer."""
        usable = [c for c in usable if not c.is_relayed] or usable
        newest = usable[-1]
        recent = [c for c in usable if newest.since - c.since < _SIMULTANEOUS_S]
        of_smaller = [c for c in recent if c.is_dialer == (self.peer_id < c.channel.remote)]
        return (of_smaller or recent)[-1]

    def _ban_of(self, remote: PeerId) -> Banned | None:
        ban = self._bans.get(remote)
        if ban is None:
            return None
        until, reason = ban
        if trio.current_time() >= until:
            del self._bans[remote]
            return None
        return Banned(short(remote), reason)


def _too_late(to: Contact, method: Method[Any, Any], deadline_s: float, *, is_connected: bool) -> PeerError:
    if not is_connected:
        return ConnectTimedOut(to, f"no connection within {deadline_s:.1f} s")
    return DeadlineExpired(f"{method.name}: peer {to} did not answer within {deadline_s:.1f} s")
