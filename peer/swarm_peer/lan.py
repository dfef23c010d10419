"""Sends and hears beacons in the local network: UDP multicast in the organisation-local scope (RFC 2365), TTL 1.

One task that never raises for what the network does: without multicast a peer finds others by other ways.
"""

from __future__ import annotations

import errno
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from swarm_peer.addresses import Address
from swarm_peer.identity import PeerId
from swarm_peer.lan_beacon import MAX_BEACON_BYTES, Heard, Listening, beacon_of, encode_beacon, run_tag

logger = logging.getLogger("swarm_peer")

GROUP: Final = "239.192.83.87"
PORT: Final = 7767
INTERVAL_S: Final = 30.0
# A newcomer is answered soon, but not by everybody at the same moment.
ANSWER_WITHIN_S: Final = 0.5
_MIN_GAP_S: Final = 2.0
_FIRST_S: Final = (0.0, 1.0, 3.0)
_DIALS_AT_ONCE: Final = 4

Found = Callable[[PeerId, Address], Awaitable[None]]


class LanBeacon:
    """Tells the local network that a peer listens on `port`, and calls `found` for each other peer that is heard.

    `hosts` are the IPv4 addresses of the interfaces to use, loopback included if peers of one machine are to meet.
    """

    def __init__(
        self,
        own_id: PeerId,
        port: int,
        hosts: Sequence[str],
        found: Found,
        *,
        rng: random.Random,
        group: tuple[str, int] = (GROUP, PORT),
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._own_id = own_id
        self._port = port
        self._hosts = tuple(hosts)
        self._found = found
        self._rng = rng
        self._group = group
        self._interval_s = interval_s
        self._runs: dict[bytes, None] = {}
        self._listening = Listening(own_id, repeat_s=2 * interval_s)
        self._wake = trio.Event()
        self.sent = 0

    def care_about(self, run_id: bytes) -> None:
        """Names a run in our beacons, and from now on minds only peers of such runs."""
        if run_id not in self._runs:
            self._runs[run_id] = None
            self._listening.wanted.add(run_tag(run_id))
            self._wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sends and hears until cancelled; returns early where there is no multicast."""
        receiver = self._open_receiver()
        senders = self._open_senders() if receiver else []
        task_status.started()
        if receiver is None:
            return
        try:
            async with trio.open_nursery() as nursery:
                slots = trio.CapacityLimiter(_DIALS_AT_ONCE)
                nursery.start_soon(self._hear, receiver, nursery, slots)
                nursery.start_soon(self._send, senders)
        finally:
            for opened in [receiver, *senders]:
                opened.close()

    def _open_receiver(self) -> trio.socket.SocketType | None:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Bound to the group: what is sent to this port by unicast, perhaps from afar, never arrives.
            opened.bind(self._group)
            joined = [host for host in self._hosts if _join(opened, self._group[0], host)]
            if joined:
                return trio.socket.from_stdlib_socket(opened)
        except OSError as error:
            logger.info("no beacons in the local network: %s", error)
        opened.close()
        return None

    def _open_senders(self) -> list[trio.socket.SocketType]:
        senders = []
        for host in self._hosts:
            sender = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            except OSError as error:
                logger.info("no beacons by way of %s: %s", host, error)
                sender.close()
            else:
                senders.append(sender)
        return senders

    async def _send(self, senders: list[trio.socket.SocketType]) -> None:
        for wait_s in _FIRST_S:
            await trio.sleep(wait_s)
            await self._send_once(senders)
        while True:
            with trio.move_on_after(self._interval_s * self._rng.uniform(0.9, 1.1)):
                await self._wake.wait()
                await trio.sleep(self._rng.uniform(0, ANSWER_WITHIN_S))
            self._wake = trio.Event()
            await self._send_once(senders)
            await trio.sleep(_MIN_GAP_S)

    async def _send_once(self, senders: list[trio.socket.SocketType]) -> None:
        packet = encode_beacon(beacon_of(self._own_id, self._port, self._runs))
        for sender in senders:
            try:
                await sender.sendto(packet, self._group)
            except OSError as error:  # the interface is down for now
                logger.debug("beacon not sent: %s", error)
            else:
                self.sent += 1

    async def _hear(self, receiver: trio.socket.SocketType, nursery: trio.Nursery, slots: trio.CapacityLimiter) -> None:
        while True:
            try:
                packet, source = await receiver.recvfrom(MAX_BEACON_BYTES + 1)
            except OSError as error:
                if error.errno in (errno.EBADF, errno.ENOTSOCK):
                    return
                await trio.sleep(1.0)
                continue
            heard = self._listening.take(packet, source[0], trio.current_time())
            if heard is None or slots.available_tokens == 0:
                continue
            if heard.is_new:
                self._wake.set()
            nursery.start_soon(self._report, slots, heard)

    async def _report(self, slots: trio.CapacityLimiter, heard: Heard) -> None:
        async with slots:
            try:
                await self._found(heard.peer_id, heard.address)
            except Exception:
                logger.exception("a peer of the local network could not be entered")


def _join(receiver: socket.socket, group: str, host: str) -> bool:
    try:
        receiver.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + socket.inet_aton(host)
        )
    except OSError as error:
        logger.info("no beacons are heard by way of %s: %s", host, error)
        return False
    return True
