"""The transport of real peers: TCP with mutually authenticated TLS 1.3, and the limits on who may knock."""

from __future__ import annotations

import errno
import functools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from swarm_peer.addresses import LOOPBACK, Address, host_group
from swarm_peer.errors import (
    AddressInUse,
    AddressUnresolvable,
    ConnectionRefused,
    ConnectTimedOut,
    DialledSelf,
    ListenError,
    NotSwarmtrain,
    ProtocolError,
    Unreachable,
    WrongIdentity,
)
from swarm_peer.identity import Identity, PeerId
from swarm_peer.raw import GREETING, GreetingHandler, RawConnection
from swarm_peer.reusable_port import connect_reusably, open_simultaneously
from swarm_peer.routing import is_local
from swarm_peer.tcp_info import set_congestion_control
from swarm_peer.tls import PREAMBLE_MAGIC, Credentials, TlsStream
from swarm_peer.transport import Channel

logger = logging.getLogger("swarm_peer")

_MAX_BUCKETS = 4096
# A port that IPv4 has free may be taken in IPv6; another one is drawn then.
_PORT_TRIES = 16


@dataclass(frozen=True, slots=True)
class AcceptLimits:
    """How much work strangers may cause before they have proved who they are.

    A handshake costs about 5 ms of CPU. With `loopback_is_exempt`, the limits per address do not hold for
    127.0.0.0/8 and ::1, so that many peers can run on one machine.
    """

    handshake_deadline_s: float = 10.0
    max_unauthenticated: int = 64
    max_unauthenticated_per_host: int = 4
    accepts_per_s_per_host: float = 2.0
    accept_burst_per_host: int = 10
    loopback_is_exempt: bool = True


class TlsChannel:
    """An authenticated TLS stream and who is at its other end."""

    def __init__(
        self, stream: TlsStream, remote: PeerId, remote_address: Address, *, origin: str | None = None
    ) -> None:
        self.stream = stream
        self.remote = remote
        self.remote_address = remote_address
        self.origin = origin or remote_address.host

    @property
    def is_lane(self) -> bool:
        return self.stream.is_lane

    @property
    def bytes_sent(self) -> int:
        return self.stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.stream.bytes_received


class TlsTransport:
    """Dials and serves under one identity.

    `congestion_control` is asked of the kernel for every connection that leaves this machine. BBR keeps its rate on a
    path that loses packets at random; most systems do not let a user choose it, and nothing depends on it.
    """

    def __init__(
        self, identity: Identity, *, limits: AcceptLimits | None = None, congestion_control: str = "bbr"
    ) -> None:
        self._congestion_control = congestion_control
        self.drops: Counter[str] = Counter()
        self._credentials = Credentials(identity)
        self._limits = limits or AcceptLimits()
        self._gate = AcceptGate(self._limits)
        self._greetings: dict[bytes, GreetingHandler] = {}

    async def dial(
        self, address: Address, expected: PeerId | None, deadline_s: float, *, is_lane: bool = False
    ) -> Channel:
        """Connects and authenticates within `deadline_s`. Each failure has its own `ConnectError` subclass."""
        stage = "no TCP connection"
        with trio.move_on_after(deadline_s):
            tcp = await _connect(address)
            stage = "the TLS handshake did not end"
            self._prepare(tcp, address)
            stream = TlsStream(tcp, is_lane=is_lane)
            try:
                remote = await _authenticate(stream.connect(self._credentials), address)
                if remote == self._credentials.peer_id:
                    raise DialledSelf(address)
                if expected is not None and remote != expected:
                    raise WrongIdentity(address, expected, remote)
            except BaseException:
                await trio.aclose_forcefully(tcp)
                raise
            return TlsChannel(stream, remote, _remote_address(tcp))
        raise ConnectTimedOut(address, f"{stage} within {deadline_s:.1f} s")

    async def serve(
        self,
        addresses: Sequence[Address],
        on_channel: Callable[[Channel], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listens until cancelled. Starts with the bound addresses; raises `AddressInUse` or `ListenError`."""

        async def serve_one(tcp: trio.SocketStream) -> None:
            await self._serve_one(tcp, on_channel)

        listeners: list[trio.SocketListener] = []
        try:
            for address in addresses:
                listeners += await _listen(address)
            bound = [_address(listener.socket.getsockname()) for listener in listeners]
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, serve_one, listeners)
                task_status.started(bound)
        finally:
            for listener in listeners:
                listener.socket.close()

    # Connections without TLS (`RawTransport`).

    def on_greeting(self, magic: bytes, handler: GreetingHandler) -> None:
        """As `RawTransport.on_greeting`."""
        self._greetings[magic] = handler

    async def greet(self, address: Address, magic: bytes, body: bytes, deadline_s: float) -> RawConnection:
        """As `RawTransport.greet`."""
        with trio.move_on_after(deadline_s):
            raw = await connect_reusably(address)
            try:
                await raw.stream.send_all(GREETING.pack(magic, len(body)) + body)
            except trio.BrokenResourceError:
                raise Unreachable(address, "it hung up") from None
            return raw
        raise ConnectTimedOut(address, f"no TCP connection within {deadline_s:.1f} s")

    async def meet(self, local: Address, remote: Address, deadline_s: float) -> RawConnection:
        """As `RawTransport.meet`."""
        return await open_simultaneously(local, remote, deadline_s)

    async def upgrade(self, raw: RawConnection, expected: PeerId, *, is_client: bool, deadline_s: float) -> Channel:
        """As `RawTransport.upgrade`."""
        tcp, address = raw.stream, raw.remote
        assert isinstance(tcp, trio.SocketStream)
        try:
            with trio.move_on_after(deadline_s):
                stream = TlsStream(tcp)
                handshake = stream.connect if is_client else stream.accept
                remote = await _authenticate(handshake(self._credentials), address)
                if remote != expected:
                    raise WrongIdentity(address, expected, remote)
                return TlsChannel(stream, remote, address)
        except BaseException:
            await trio.aclose_forcefully(tcp)
            raise
        await trio.aclose_forcefully(tcp)
        raise ConnectTimedOut(address, f"the TLS handshake did not end within {deadline_s:.1f} s")

    def _prepare(self, tcp: trio.SocketStream, address: Address) -> None:
        if self._congestion_control and host_group(address.host) != LOOPBACK:
            set_congestion_control(tcp.socket, self._congestion_control)

    async def _serve_one(self, tcp: trio.SocketStream, on_channel: Callable[[Channel], Awaitable[None]]) -> None:
        """The life of one incoming connection. Nothing that happens in it may reach the accept loop."""
        try:
            address = _remote_address(tcp)
            self._prepare(tcp, address)
            live = await self._admit(tcp, address, on_channel)
            if live is not None:
                await live()
        except Exception:
            self.drops["crash"] += 1
            logger.exception("an incoming connection failed")
        finally:
            await trio.aclose_forcefully(tcp)

    async def _admit(
        self, tcp: trio.SocketStream, address: Address, on_channel: Callable[[Channel], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]] | None:
        """The rest of the connection's life, if it may live."""
        origin = _origin(tcp, address)
        refusal = self._gate.enter(origin, trio.current_time())
        if refusal is not None:
            self.drops[refusal] += 1
            return None
        try:
            with trio.move_on_after(self._limits.handshake_deadline_s):
                stream = TlsStream(tcp)
                magic, body = await stream.receive_greeting((PREAMBLE_MAGIC, *self._greetings))
                if magic != PREAMBLE_MAGIC:
                    raw = RawConnection(tcp, _address(tcp.socket.getsockname()), address)
                    return functools.partial(self._greetings[magic], raw, body)
                remote = await stream.accept_greeted(self._credentials, body)
                if remote == self._credentials.peer_id:
                    self.drops["own-identity"] += 1
                    return None
                return functools.partial(on_channel, TlsChannel(stream, remote, address, origin=origin))
            self.drops["handshake-deadline"] += 1
        except ProtocolError as error:
            self.drops[error.reason] += 1
            logger.debug("dropped %s: %s", address, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.drops["hung-up"] += 1
        finally:
            self._gate.leave(origin)
        return None


def _rationed_as(host: str, group: str) -> str:
    """What shares one ration of new connections: a public IPv4 /24, as a stranger may own it all; else the host."""
    if is_local(host) or ":" in group or "." not in group:
        return group
    return group.rpartition(".")[0]


class AcceptGate:
    """Counts those who are not yet authenticated, and rations new connections per host and network."""

    def __init__(self, limits: AcceptLimits) -> None:
        self._limits = limits
        self._knocking: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}  # group -> tokens, time

    def enter(self, host: str, now: float) -> str | None:
        """None, or the reason why this host must wait. Each `enter` that gave None needs one `leave`."""
        group = host_group(host)
        if self._knocking.total() >= self._limits.max_unauthenticated:
            return "too-many-unauthenticated"
        if not (self._limits.loopback_is_exempt and group == LOOPBACK):
            if self._knocking[group] >= self._limits.max_unauthenticated_per_host:
                return "too-many-unauthenticated"
            if not self._take_token(_rationed_as(host, group), now):
                return "rate"
        self._knocking[group] += 1
        return None

    def leave(self, host: str) -> None:
        """The connection was authenticated, or has ended."""
        group = host_group(host)
        self._knocking[group] -= 1
        if self._knocking[group] <= 0:
            del self._knocking[group]

    def _take_token(self, group: str, now: float) -> bool:
        burst = float(self._limits.accept_burst_per_host)
        tokens, since = self._buckets.pop(group, (burst, now))
        tokens = min(burst, tokens + (now - since) * self._limits.accepts_per_s_per_host)
        # Re-inserted at the end, so the first is the one that was quiet the longest.
        self._buckets[group] = (max(tokens - 1, 0.0) if tokens >= 1 else tokens, now)
        if len(self._buckets) > _MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return tokens >= 1


async def _connect(address: Address) -> trio.SocketStream:
    try:
        return await trio.open_tcp_stream(address.host, address.port, happy_eyeballs_delay=0.25)
    except socket.gaierror as error:
        raise AddressUnresolvable(address, error.strerror or "unknown host") from None
    except UnicodeError:
        raise AddressUnresolvable(address, "not a host name") from None
    except OSError as error:
        leaves = _leaves(error)
        if all(leaf.errno == errno.ECONNREFUSED for leaf in leaves):
            raise ConnectionRefused(address) from None
        if all(leaf.errno == errno.ETIMEDOUT for leaf in leaves):
            raise ConnectTimedOut(address, "no TCP connection") from None
        reasons = sorted({leaf.strerror or str(leaf) for leaf in leaves if leaf.errno != errno.ECONNREFUSED})
        raise Unreachable(address, ", ".join(reasons)) from None


def _leaves(error: OSError) -> list[OSError]:
    """The attempts behind trio's summary error: one cause, or a group of them."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        return [leaf for leaf in cause.exceptions if isinstance(leaf, OSError)] or [error]
    return [cause] if isinstance(cause, OSError) else [error]


async def _authenticate(handshake: Awaitable[PeerId], address: Address) -> PeerId:
    try:
        return await handshake
    except ProtocolError as error:
        raise NotSwarmtrain(address, error.detail or error.reason) from None
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        raise NotSwarmtrain(address, "it hung up in the handshake (a busy peer does so, too)") from None


async def _listen(address: Address) -> list[trio.SocketListener]:
    """Listens on one address; `::` stands for every address of both families, on one port."""
    try:
        if address.host == "::":
            return await _listen_everywhere(address.port)
        return await trio.open_tcp_listeners(address.port, host=address.host)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror}; give a local address") from None
    except OSError as error:
        leaves = _leaves(error)
        if any(leaf.errno == errno.EADDRINUSE for leaf in leaves):
            raise AddressInUse(address, address.port) from None
        reason = leaves[0].strerror or str(error)
        raise ListenError(
            f"cannot listen on {address}: {reason}; give an address of this machine and a port above 1023"
        ) from None


async def _listen_everywhere(port: int) -> list[trio.SocketListener]:
    """Listens on all IPv4 and, where this machine has it, IPv6 addresses. Port 0: a port that is free in both."""
    for is_last in (*[False] * (_PORT_TRIES - 1), True):
        listeners = await trio.open_tcp_listeners(port, host="0.0.0.0")
        chosen = port or listeners[0].socket.getsockname()[1]
        try:
            return listeners + await trio.open_tcp_listeners(chosen, host="::")
        except OSError as error:
            if not any(leaf.errno == errno.EADDRINUSE for leaf in _leaves(error)):
                return listeners  # this machine has no IPv6
            for listener in listeners:
                listener.socket.close()
            if port or is_last:
                raise
    raise AssertionError("unreachable")


def _origin(tcp: trio.SocketStream, remote: Address) -> str:
    """The host for the limits: loopback also for what one of this machine's other addresses dials."""
    try:
        is_here = _address(tcp.socket.getsockname()).host == remote.host
    except OSError:
        return remote.host
    return "127.0.0.1" if is_here else remote.host


def _remote_address(tcp: trio.SocketStream) -> Address:
    try:
        return _address(tcp.socket.getpeername())
    except OSError:  # it has already hung up
        return Address("unknown", 0)


def _address(name: tuple[str, int]) -> Address:
    return Address(name[0], name[1])
