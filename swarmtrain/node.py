"""The node: the network half of every command.  It imports no torch and survives a trainer's crash.

`open_node` brings up identity, transport, DHT and blob store, in that order, and takes them down again.  What a
command does with them stands in the command's own module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from swarm_peer.address_policy import Judged, announced, is_loopback, judge
from swarm_peer.addresses import MAX_ADDRESSES, Address, Contact, parse_address, parse_announced
from swarm_peer.blobs import BlobExchange, BlobId, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import AddressInUse, ListenError, PeerError
from swarm_peer.gated import GuardedCaller
from swarm_peer.identity import Identity
from swarm_peer.interfaces import list_interfaces, runs_in_wsl
from swarm_peer.kademlia import Kademlia, KademliaParams
from swarm_peer.observing import Observer
from swarm_peer.probing import ProbeServer
from swarm_peer.raw import RawTransport
from swarm_peer.tcp import TlsTransport

from swarmtrain.blob_door import BlobDoor
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.invite import EntryPoint
from swarmtrain.link_limits import LinkLimits, endpoint_limits, open_files_limit
from swarmtrain.local_network import LocalNetwork, beacon_hosts
from swarmtrain.port_mapping import PortMapping, mapping_methods
from swarmtrain.relaying import Relaying

# Addresses of RFC 5737, to which nothing is ever sent: connecting a UDP socket only looks up the route.
_ROUTE_PROBE = ("192.0.2.1", 9)
# A small call waits for its answer at least this long, and this share of the time for a dial where that is longer.
ANSWER_S = 4.0
ANSWER_SHARE = 0.4
INTERFACES_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Where a node listens, what it calls itself and whom it knows.  `quota_bytes` bounds the blob store.

    With `announce`, exactly these addresses are told to others; without, those of `swarm_peer.address_policy`.
    """

    listen: str | None  # None: only dials others
    announce: Sequence[str] = ()
    interface: str | None = None  # the only one whose addresses are announced
    entries: Sequence[EntryPoint] = ()
    limits: LinkLimits = field(default_factory=LinkLimits)
    lan: tuple[str, int] | None = None  # the multicast group for beacons in the local network; None: no beacons
    portmap: bool = False  # asks the home router to forward the port
    serve: bool = True  # holds DHT records for others, and is to be reached by them
    relay_bytes_per_s: float = 0.0  # what it relays for others at most
    connect_timeout_s: float = 10.0  # for one dial and its handshake; slower links also get longer answer times
    quota_bytes: int = 8 << 30  # what is on offer and under way; nothing is reserved


class NodeBlobs:
    """The blob store and its transfers, in the words that the exchange and the donor use."""

    def __init__(self, store: BlobStore, exchange: BlobExchange, door: BlobDoor | None = None) -> None:
        self.store = store
        self.door = door or BlobDoor()
        self._exchange = exchange

    def put(self, data: bytes) -> bytes:
        """Stores and pins: what is on offer must not be evicted.  Heavy; call it in a worker thread."""
        while True:
            blob_id = self.store.put(data)
            # Between the two calls the event loop may discard the same content, or another thread evict it.
            with contextlib.suppress(KeyError):
                self.store.pin(blob_id)
                return blob_id

    def discard(self, blob_id: bytes) -> None:
        """Unpins and forgets a blob."""
        self.store.unpin(BlobId(blob_id))
        self.store.discard(BlobId(blob_id))

    async def fetch(
        self,
        blob_id: bytes,
        holder: Contact,
        *,
        max_size_bytes: int,
        deadline_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> bytes:
        """Fetches from one holder and keeps nothing: payloads are read once."""
        data = await self.fetch_any(
            blob_id, [holder], max_size_bytes=max_size_bytes, deadline_s=deadline_s, progress=progress
        )
        self.store.discard(BlobId(blob_id))
        return data

    async def fetch_any(
        self,
        blob_id: bytes,
        holders: Sequence[Contact],
        *,
        max_size_bytes: int,
        deadline_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> bytes:
        """Fetches from any of several holders, and serves the blob to others from now on."""
        async with trio.open_nursery() as nursery:
            for holder in holders:
                nursery.start_soon(self._introduce, holder)
        return await self._exchange.fetch(
            BlobId(blob_id), holders, max_size_bytes=max_size_bytes, deadline_s=deadline_s, progress=progress
        )

    async def _introduce(self, holder: Contact) -> None:
        with contextlib.suppress(PeerError):  # the fetch will meet it again, and say so
            await self.door.introduce(holder)


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    identity: Identity
    endpoint: Endpoint
    discovery: Kademlia
    blobs: NodeBlobs
    relaying: Relaying
    answer_deadline_s: float = 5.0  # for small calls
    local: LocalNetwork | None = None
    transport: RawTransport | None = None
    mapping: PortMapping | None = None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """What it announces; `relaying.on_addresses` tells when that changes."""
        return self.relaying.addresses

    @property
    def contact(self) -> Contact:
        return Contact(self.identity.peer_id, self.addresses)


@asynccontextmanager
async def open_node(identity: Identity, config: NodeConfig) -> AsyncIterator[Node]:
    """Runs a node for the time of the `async with` block.

    Raises UserError when the port is busy or an address is malformed.
    """
    listen = [_parse(config.listen)] if config.listen is not None else []
    own = judge_interfaces(config.entries, config.interface)
    given = tuple(_parse(text, parse_announced) for text in config.announce)
    patience_s = config.connect_timeout_s
    answer_s = max(ANSWER_S, ANSWER_SHARE * patience_s)
    limits, accept = endpoint_limits(config.limits, open_files_limit())
    accept = dataclasses.replace(accept, handshake_deadline_s=max(10.0, patience_s))
    limits = dataclasses.replace(limits, dial_deadline_s=patience_s)
    transport = TlsTransport(identity, limits=accept)
    endpoint = Endpoint(identity, transport, limits=limits)
    timing = KademliaParams(
        rpc_deadline_s=answer_s, lookup_deadline_s=max(20.0, 4 * answer_s), connect_deadline_s=patience_s
    )
    store = BlobStore(config.quota_bytes)
    async with trio.open_nursery() as nursery:
        try:
            bound: list[Address] = await nursery.start(endpoint.run, listen)
        except AddressInUse as error:
            raise UserError(str(error), ExitCode.PORT_BUSY) from None
        except ListenError as error:
            raise UserError(str(error), ExitCode.USAGE) from None
        try:
            addresses = given or (reachable_addresses(bound, own, config.entries) if bound else ())
            discovery = Kademlia(
                endpoint, identity, rng=random.Random(identity.peer_id), params=timing, serve=config.serve
            )
            relaying = Relaying(
                endpoint,
                transport,
                discovery.table,
                own=addresses,
                port=bound[0].port if bound else None,
                is_given=bool(given),
                limit_bytes_per_s=config.relay_bytes_per_s,
                takes_part=config.serve,
                rng=random.Random(identity.peer_id),
            )
            discovery.advertise(addresses)
            relaying.on_addresses(discovery.advertise)
            await nursery.start(discovery.run)
            await nursery.start(relaying.run)
            if config.serve:
                ProbeServer(endpoint, wall_clock=time.time)
                Observer(transport)
            door = BlobDoor()
            guarded = GuardedCaller(endpoint, door.check)
            blobs = NodeBlobs(store, BlobExchange(guarded, store, download=endpoint.download), door)
            local = None
            hosts = beacon_hosts(bound, own)
            if config.lan and hosts:
                local = LocalNetwork(identity.peer_id, bound[0].port, hosts, discovery, config.lan)
                await nursery.start(local.run)
            mapping = None
            if config.portmap and not given and (methods := mapping_methods(bound, own)):
                mapping = PortMapping(bound[0].port, methods, relaying.forwarded)
                nursery.start_soon(mapping.run)
            if bound and not given:
                nursery.start_soon(follow_interfaces, bound, config, relaying.moved)
            yield Node(identity, endpoint, discovery, blobs, relaying, max(5.0, answer_s), local, transport, mapping)
        finally:
            with trio.move_on_after(3.0, shield=True):
                await endpoint.aclose()
            nursery.cancel_scope.cancel()


def judge_interfaces(entries: Sequence[EntryPoint], interface: str | None = None) -> list[Judged]:
    """Judges this machine's addresses.  Raises UserError if `interface` is none of them."""
    in_wsl = runs_in_wsl(platform.release())
    is_local = all(is_loopback(address.host) for _, address in entries)
    try:
        return judge(list_interfaces(), only=interface, loopback_allowed=is_local, in_wsl=in_wsl)
    except ValueError as error:
        raise UserError(f"--interface {error}", ExitCode.USAGE) from None


async def follow_interfaces(
    bound: Sequence[Address], config: NodeConfig, moved: Callable[[tuple[Address, ...]], None]
) -> None:
    """Looks now and then which addresses this machine has: laptops change networks, and providers change addresses."""
    while True:
        await trio.sleep(INTERFACES_S)
        try:
            own = judge_interfaces(config.entries, config.interface)
        except UserError:  # the interface that was asked for is gone for now
            continue
        moved(reachable_addresses(bound, own, config.entries))


def reachable_addresses(
    bound: Sequence[Address], own: Sequence[Judged], entries: Sequence[EntryPoint]
) -> tuple[Address, ...]:
    """Returns where others can reach a listener, best first."""
    found = announced(bound, own)
    if found or own:
        return found
    # The system lists no interfaces: what the way to the peers starts from is the next best.
    targets = [(peer.host, peer.port) for _, peer in entries] + [_ROUTE_PROBE]
    hosts = dict.fromkeys(filter(None, map(_local_host_towards, targets)))
    return tuple(Address(host, bound[0].port) for host in hosts)[:MAX_ADDRESSES]


def _parse(text: str, parser: Callable[[str], Address] = parse_address) -> Address:
    try:
        return parser(text)
    except ValueError as error:
        raise UserError(str(error), ExitCode.USAGE) from None


def _local_host_towards(target: tuple[str, int]) -> str | None:
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None
