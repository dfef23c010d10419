"""The in-memory twin of the TCP transport, for tests and virtual swarms.

It carries real bytes between real endpoints in one process, with injected delay, bandwidth, failed dials,
crashes and partitions, all from one seed. It uses only trio's clock, so that under
`trio.testing.MockClock(autojump_threshold=0)` hours pass in seconds. There is no TLS: the network vouches for
identities. A partition behaves as it does for TCP: bytes wait and arrive when it heals, if anybody still waits.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVarTuple

import trio

from swarm_peer.addresses import Address
from swarm_peer.errors import (
    AddressInUse,
    ConnectionRefused,
    ConnectTimedOut,
    DialledSelf,
    NotSwarmtrain,
    Unreachable,
    WrongIdentity,
)
from swarm_peer.identity import PEER_ID_BYTES, Identity, PeerId
from swarm_peer.memory_stream import Link, MemoryStream, Pipe
from swarm_peer.raw import GreetingHandler, RawConnection, receive_exactly
from swarm_peer.transport import Channel

logger = logging.getLogger("swarm_peer")

_FIRST_PORT = 20000


Args = TypeVarTuple("Args")
Nat = Literal["preserving", "symmetric"]


class MemoryNetwork:
    """A virtual internet of hosts, which are strings. `link_of(source, target)` may give links of their own."""

    def __init__(
        self,
        *,
        seed: int = 0,
        link: Link | None = None,
        link_of: Callable[[str, str], Link] | None = None,
    ) -> None:
        default = link or Link()
        self._link_of = link_of or (lambda source, target: default)
        self.rng = random.Random(seed)
        self._hosts: dict[str, None] = {}
        self._listeners: dict[Address, _Listener] = {}
        self.pipes: dict[Pipe, None] = {}
        self._cuts: list[tuple[frozenset[str], frozenset[str]]] = []
        self._silent: set[str] = set()
        self._crashed: set[str] = set()
        self._next_port = _FIRST_PORT
        self._nats: dict[str, Nat] = {}
        self._walls: dict[str, frozenset[str]] = {}
        self._meetings: dict[tuple[Address, Address], trio.MemorySendChannel[MemoryRaw]] = {}

    def transport(self, identity: Identity, host: str = "10.0.0.1") -> MemoryTransport:
        """The transport of one peer on `host`. A host that had crashed is up again."""
        self.restart(host)
        return MemoryTransport(self, identity, host)

    def put_behind_nat(self, host: str, nat: Nat) -> None:
        """From now on nobody can dial `host`. A "preserving" NAT shows all remotes the same port, so that a
        simultaneous open can work; a "symmetric" one does not."""
        self._nats[host] = nat

    def put_behind_wall(self, host: str, sources: Iterable[str]) -> None:
        """From now on a firewall drops what these hosts dial `host` with; others get through."""
        self._walls[host] = frozenset(sources)

    def partition(self, side_a: Iterable[str], side_b: Iterable[str]) -> None:
        """Nothing passes between the two sets of hosts until `heal`."""
        self._cuts.append((frozenset(side_a), frozenset(side_b)))

    def heal(self) -> None:
        """Ends all partitions; what waited arrives now."""
        self._cuts.clear()
        self._wake_all()

    def crash(self, host: str, *, silent: bool = False) -> None:
        """The host's processes die and its kernel resets their connections; `silent`: it just falls silent."""
        if silent:
            self._silent.add(host)
            return
        self._crashed.add(host)
        for address in [address for address in self._listeners if address.host == host]:
            del self._listeners[address]
        for pipe in [pipe for pipe in self.pipes if host in (pipe.source, pipe.target)]:
            pipe.break_off()

    def restart(self, host: str) -> None:
        """The host is up again: at once after a silent crash, else ready for a new peer."""
        self._hosts[host] = None
        self._crashed.discard(host)
        if host in self._silent:
            self._silent.discard(host)
            self._wake_all()

    def is_cut(self, source: str, target: str) -> bool:
        """Whether bytes from `source` to `target` wait."""
        if self._silent and (source in self._silent or target in self._silent):
            return True
        return any((source in a and target in b) or (source in b and target in a) for a, b in self._cuts)

    def _wake_all(self) -> None:
        for pipe in self.pipes:
            pipe.changed()

    async def _dial(self, transport: MemoryTransport, address: Address, *, is_lane: bool) -> tuple[PeerId, _Channel]:
        # TCP and TLS 1.3 take a round trip each.
        listener, there, here = await self._open(transport, address, round_trips=2)
        theirs = listener.transport.identity.peer_id
        ours = transport.identity.peer_id
        if ours != theirs:
            listener.accept(_Channel(there.stream, ours, there.remote, is_lane=is_lane))
        return theirs, _Channel(here.stream, theirs, address, is_lane=is_lane)

    async def _greet(self, transport: MemoryTransport, address: Address, magic: bytes, body: bytes) -> MemoryRaw:
        listener, there, here = await self._open(transport, address, round_trips=1)
        listener.greet(there, magic, body)
        return here

    async def _open(
        self, transport: MemoryTransport, address: Address, *, round_trips: int
    ) -> tuple[_Listener, MemoryRaw, MemoryRaw]:
        """Both ends of a new connection: the listener's and the dialer's."""
        here, there = transport.host, address.host
        link = self._link_of(here, there)
        lost = self.rng.random() < link.dial_loss
        await trio.sleep(2 * round_trips * link.latency_s)
        if here in self._crashed or there not in self._hosts:
            raise Unreachable(address, "no such host" if here not in self._crashed else "this host is down")
        is_barred = (there in self._nats and here != there) or here in self._walls.get(there, ())
        if lost or is_barred or self.is_cut(here, there):
            await trio.sleep_forever()
        listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefused(address)
        local = Address(here, self._new_port())
        # A symmetric NAT shows another port to every remote.
        seen = local if self._nats.get(here) != "symmetric" else Address(here, self._new_port())
        forth, back = self._pipes_between(here, there)
        return (
            listener,
            MemoryRaw(MemoryStream(forth, back), address, seen),
            MemoryRaw(MemoryStream(back, forth), local, address),
        )

    async def _meet(self, local: Address, remote: Address) -> MemoryRaw:
        """Both ends must aim at the other's true port while the other does."""
        await trio.sleep(2 * self._link_of(local.host, remote.host).latency_s)
        if "symmetric" in (self._nats.get(local.host), self._nats.get(remote.host)):
            await trio.sleep_forever()
        if (waiting := self._meetings.pop((remote, local), None)) is not None:
            forth, back = self._pipes_between(local.host, remote.host)
            waiting.send_nowait(MemoryRaw(MemoryStream(forth, back), remote, local))
            return MemoryRaw(MemoryStream(back, forth), local, remote)
        send, receive = trio.open_memory_channel[MemoryRaw](1)
        self._meetings[local, remote] = send
        try:
            return await receive.receive()
        finally:
            self._meetings.pop((local, remote), None)

    def _pipes_between(self, here: str, there: str) -> tuple[Pipe, Pipe]:
        return Pipe(self, here, there, self._link_of(here, there)), Pipe(self, there, here, self._link_of(there, here))

    def _new_port(self) -> int:
        self._next_port += 1
        return self._next_port


class MemoryTransport:
    """One peer's access to a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity, host: str) -> None:
        self.drops: Counter[str] = Counter()
        self.identity = identity
        self.host = host
        self.greetings: dict[bytes, GreetingHandler] = {}
        self._network = network

    async def dial(
        self, address: Address, expected: PeerId | None, deadline_s: float, *, is_lane: bool = False
    ) -> Channel:
        """As `TlsTransport.dial`."""
        with trio.move_on_after(deadline_s):
            remote, channel = await self._network._dial(self, address, is_lane=is_lane)
            if remote == self.identity.peer_id:
                raise DialledSelf(address)
            if expected is not None and remote != expected:
                await channel.stream.aclose()
                raise WrongIdentity(address, expected, remote)
            return channel
        raise ConnectTimedOut(address, f"no connection within {deadline_s:.1f} s")

    # Connections without TLS (`RawTransport`).

    def on_greeting(self, magic: bytes, handler: GreetingHandler) -> None:
        """As `RawTransport.on_greeting`."""
        self.greetings[magic] = handler

    async def greet(self, address: Address, magic: bytes, body: bytes, deadline_s: float) -> RawConnection:
        """As `RawTransport.greet`."""
        with trio.move_on_after(deadline_s):
            return _as_raw(await self._network._greet(self, address, magic, body))
        raise ConnectTimedOut(address, f"no connection within {deadline_s:.1f} s")

    async def meet(self, local: Address, remote: Address, deadline_s: float) -> RawConnection:
        """As `RawTransport.meet`."""
        with trio.move_on_after(deadline_s):
            return _as_raw(await self._network._meet(local, remote))
        raise ConnectTimedOut(remote, f"no simultaneous open within {deadline_s:.1f} s")

    async def upgrade(self, raw: RawConnection, expected: PeerId, *, is_client: bool, deadline_s: float) -> Channel:
        """As `RawTransport.upgrade`. In place of TLS the ends tell each other who they are."""
        stream = raw.stream
        assert isinstance(stream, MemoryStream)
        try:
            with trio.fail_after(deadline_s):
                await stream.send_all(self.identity.peer_id)
                remote = PeerId(await receive_exactly(stream, PEER_ID_BYTES))
                if remote != expected:
                    raise WrongIdentity(raw.remote, expected, remote)
                return _Channel(stream, remote, raw.remote)
        except trio.TooSlowError:
            stream.close()
            raise ConnectTimedOut(raw.remote, f"no handshake within {deadline_s:.1f} s") from None
        except trio.BrokenResourceError:
            stream.close()
            raise NotSwarmtrain(raw.remote, "it hung up") from None
        except BaseException:
            stream.close()
            raise

    async def serve(
        self,
        addresses: Sequence[Address],
        on_channel: Callable[[Channel], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """As `TlsTransport.serve`. Whatever host is named, it listens on its own."""
        listeners = self._network._listeners
        bound: list[Address] = []
        try:
            async with trio.open_nursery() as nursery:
                listener = _Listener(self, on_channel, nursery)
                taken = self._bind(addresses, listener, bound)
                if taken is None:
                    task_status.started(bound)
                    await trio.sleep_forever()
            assert taken is not None
            raise AddressInUse(taken, taken.port)
        finally:
            for address in bound:
                if listeners.get(address) is listener:
                    del listeners[address]

    def _bind(self, addresses: Sequence[Address], listener: _Listener, bound: list[Address]) -> Address | None:
        """Fills `bound`. Returns the address that another peer has, if any."""
        listeners = self._network._listeners
        for wanted in addresses:
            address = Address(self.host, wanted.port or self._free_port())
            if address in listeners:
                return address
            listeners[address] = listener
            bound.append(address)
        return None

    def _free_port(self) -> int:
        port = _FIRST_PORT
        while Address(self.host, port) in self._network._listeners:
            port += 1
        return port


class _Listener:
    def __init__(
        self,
        transport: MemoryTransport,
        on_channel: Callable[[Channel], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        self.transport = transport
        self._on_channel = on_channel
        self._nursery = nursery

    def accept(self, channel: _Channel) -> None:
        self._nursery.start_soon(self._serve_one, channel)

    def greet(self, raw: MemoryRaw, magic: bytes, body: bytes) -> None:
        handler = self.transport.greetings.get(magic)
        if handler is None:
            raw.stream.close()
            return
        self._nursery.start_soon(self._own, raw.stream, handler, _as_raw(raw), body)

    async def _serve_one(self, channel: _Channel) -> None:
        await self._own(channel.stream, self._on_channel, channel)

    async def _own(self, stream: MemoryStream, live: Callable[[*Args], Awaitable[None]], *args: *Args) -> None:
        try:
            await live(*args)
        except Exception:
            self.transport.drops["crash"] += 1
            logger.exception("an incoming connection failed")
        finally:
            stream.close()


class MemoryRaw(NamedTuple):
    """One end of a connection of which nobody vouches for the other end."""

    stream: MemoryStream
    local: Address
    remote: Address


def _as_raw(end: MemoryRaw) -> RawConnection:
    return RawConnection(end.stream, end.local, end.remote)


class _Channel:
    def __init__(self, stream: MemoryStream, remote: PeerId, remote_address: Address, *, is_lane: bool = False) -> None:
        self.is_lane = is_lane
        self.stream = stream
        self.remote = remote
        self.remote_address = remote_address
        self.origin = remote_address.host

    @property
    def bytes_sent(self) -> int:
        return self.stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.stream.bytes_received
