"""A peer's one point of contact with all others: it dials and accepts, and calls over what it has.

There is one live connection per remote, whoever dialled it; both sides call over it (`pool.py`). A task of a single
remote can fail as it likes: it ends that connection and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import trio

from swarm_peer.addresses import Address, Contact
from swarm_peer.bans import HostBans, PeerBans
from swarm_peer.calling import NotOpened
from swarm_peer.connection import Connection
from swarm_peer.dialling import Detour, Dial, dial_first
from swarm_peer.endpoint_limits import EndpointLimits, EndpointStats
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
from swarm_peer.identity import Identity, PeerId, short
from swarm_peer.lanes import LANE_IDLE_S, Lanes
from swarm_peer.mux_events import ByeCode
from swarm_peer.pacing import DownloadLimit, MemoryBudget, UploadLimit
from swarm_peer.pool import ConnectionPool
from swarm_peer.relay_entry import direct_addresses
from swarm_peer.room import Room, close_quietest
from swarm_peer.rpc import Handler, Method, Q, R, StreamHandler, decode_body, encode_body
from swarm_peer.serving import Registered, Shared
from swarm_peer.transport import Channel, Transport
from swarm_peer.uplink import AutoUploadLimit

logger = logging.getLogger("swarm_peer")

_RELAYED_IDLE_S = 30.0


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
        self._pool = ConnectionPool(identity.peer_id, self._limits.max_connections_per_peer)
        self._lanes = Lanes(self._limits.max_connections // 2)
        self._dials: dict[PeerId, Dial] = {}
        self._bans = PeerBans()
        self._host_bans = HostBans()
        self._past_sent = 0
        self._past_received = 0
        self._calls = 0
        self._nursery: trio.Nursery | None = None
        self._stopped = trio.Event()
        self._refusing = 0
        self._room = Room(self._limits, self._connections)
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
        return self._pool.connected()

    def rtt_s(self, peer_id: PeerId) -> float | None:
        """As `Caller.rtt_s`."""
        connection = self._pool.usable(peer_id)
        return connection.rtt_s if connection is not None else None

    def seen_at(self, remote: PeerId) -> Address | None:
        """Where a remote's direct connection to us comes from; None if there is none."""
        direct = [c for c in self._pool.of(remote) if not c.is_relayed]
        return direct[-1].channel.remote_address if direct else None

    def is_relayed(self, remote: PeerId) -> bool | None:
        """Whether calls to a remote go through a relay now; None if it is not connected."""
        connection = self._pool.usable(remote)
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
        async with self._room.slot(address):
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
        now, reason = trio.current_time(), sanitise(reason)
        self._bans.ban(peer_id, reason, now + seconds, now)
        self._drops["banned"] += 1
        logger.info("banned peer %s for %.0f s: %s", short(peer_id), seconds, reason)
        for connection in [*self._pool.of(peer_id), *self._lanes.of(peer_id)]:
            connection.abort(ByeCode.BANNED, f"peer {short(peer_id)} was banned: {reason}")

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
        if (connection := self._pool.usable(remote)) is not None:
            return connection
        if not to.addresses and remote not in self._dials:
            raise Unreachable(to, "no address of it is known")
        dial = self._dials.get(remote)
        if dial is None:
            dial = self._dials[remote] = Dial()
            nursery.start_soon(self._dial, dial, to)
        await dial.done.wait()
        if (connection := self._pool.usable(remote)) is not None:
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
            if not self._lanes.has_room(remote) or not self._room.has(2):
                raise Unreachable(to, "there is no room for another connection to it")
            here = (main.channel.remote_address,) if main.is_dialer else ()
            addresses = tuple(dict.fromkeys((*here, *direct_addresses(to.addresses))))
            if not addresses:
                raise Unreachable(to, "no address of it is known")
            async with self._room.slot(to):
                won = await self._dial_ways(Contact(remote, addresses), is_lane=True)
            assert won is not None
            connection = self._adopt_lane(won[0], number)
            self._nursery.start_soon(self._supervise, connection)
            return connection

    def _adopt_lane(self, channel: Channel, number: int | None = None) -> Connection:
        limits = dataclasses.replace(self._limits.connection, idle_s=min(LANE_IDLE_S, self._limits.connection.idle_s))
        connection = Connection(channel, is_dialer=number is not None, shared=self._shared, limits=limits)
        self._lanes.add(connection, number)
        return connection

    async def _dial(self, dial: Dial, to: Contact) -> None:
        """Runs on its own, so that a call that gives up does not spoil the dial for the others."""
        remote = PeerId(to.peer_id)
        try:
            async with self._room.slot(to):
                won = await self._dial_ways(to, dial)
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

    async def _dial_ways(
        self, to: Contact, dial: Dial | None = None, *, is_lane: bool = False
    ) -> tuple[Channel, bool] | None:
        """The first channel that comes about, and whether it is relayed; with `dial`, the detour is one of the ways.

        None if the peer was faster and connected to us.
        """
        deadline_s = self._limits.dial_deadline_s
        more: dict[str, bool] = {"is_lane": True} if is_lane else {}
        direct = direct_addresses(to.addresses)
        has_relays = len(direct) < len(to.addresses)
        if has_relays and not direct:
            direct = direct_addresses(self.also_at(PeerId(to.peer_id)))

        async def take_detour() -> Channel | None:
            assert self.detour is not None
            assert dial is not None
            with dial.detour:
                return await self.detour.dial(to, deadline_s)
            return None

        return await dial_first(
            to,
            [functools.partial(self._transport.dial, at, PeerId(to.peer_id), deadline_s, **more) for at in direct],
            take_detour if dial is not None and has_relays and self.detour is not None else None,
        )

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
        if channel.is_lane and not (self._pool.usable(channel.remote) and self._lanes.has_room(channel.remote)):
            self._drops["full"] += 1
            return ByeCode.FULL
        if not self._room.admits(channel.origin):
            self._drops["full"] += 1
            return ByeCode.FULL
        return None

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
                close_quietest(outbound)
        if not self._pool.add(connection):
            self._drops["too-many-connections"] += 1
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
            self._pool.remove(connection)
            self._room.one_closed()
            self._past_sent += channel.bytes_sent
            self._past_received += channel.bytes_received

    def _connections(self) -> list[Connection]:
        return self._pool.all() + self._lanes.all()

    def _ban_of(self, remote: PeerId) -> Banned | None:
        return self._bans.find(remote, trio.current_time())


def _too_late(to: Contact, method: Method[Any, Any], deadline_s: float, *, is_connected: bool) -> PeerError:
    if not is_connected:
        return ConnectTimedOut(to, f"no connection within {deadline_s:.1f} s")
    return DeadlineExpired(f"{method.name}: peer {to} did not answer within {deadline_s:.1f} s")
