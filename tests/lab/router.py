"""A user-space IPv4 router that behaves like the internet between homes: delay, rate, queue and loss per link.

`Router` is the core, without I/O: packets and times in, packets and times out. Run as a program it opens one TUN
device in each network namespace that it is told of and moves packets between them, because `tc netem` is missing
from many kernels:

    python router.py '{"links": [{"name": "a", "namespace": "lab-a", "address": "203.0.113.1/24"}], "seed": 0}'

It prints "ready" when the devices are up and, on SIGTERM, one line of JSON with what each link counted.

Every packet crosses two links. Going up it waits in the sender's queue (tail drop), is lost or not, and takes the
sender's delay; going down the same at the receiver's link. A link may rewrite what crosses it (`Translate`): that is
where address translation goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

MTU_BYTES = 1500
_MAX_BATCH = 64

Direction = Literal["up", "down"]
"""Which way a packet crosses a link: from the namespace to the internet, or back."""

_DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Translate = Callable[[bytes, Direction], bytes | None]
"""Rewrites a packet at the border of a link, or drops it (None). Going up it is applied on leaving the namespace,
going down last before entering it, so all queues and losses see the outer form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One namespace's way to the others. Rates of 0 are unlimited; delay and loss hold per direction.

    `public` is the address that the router delivers to this link; it is `address` unless a translation stands between
    the two. `translation` is "module:function"; the function gets this configuration and returns a `Translate`.
    """

    name: str
    namespace: str
    address: str  # with prefix length, as `ip address` takes it
    public: str = ""
    up_bit_per_s: float = 0.0
    down_bit_per_s: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 250_000
    translation: str = ""
    interface: str = "wan0"


@dataclass(slots=True)
class LinkStats:
    """Packets of one link. `queue_drops` did not fit into a queue, `refused` were dropped by the translation."""

    up_packets: int = 0
    up_bytes: int = 0
    down_packets: int = 0
    down_bytes: int = 0
    lost: int = 0
    queue_drops: int = 0
    refused: int = 0
    unroutable: int = 0


@dataclass(slots=True)
class Queue:
    """A serialiser with a tail-drop queue in front of it."""

    bytes_per_s: float
    size_bytes: int
    idle_at: float = 0.0

    def departure(self, size_bytes: int, now: float) -> float | None:
        """When a packet that comes now has left; None if the queue is full."""
        if not self.bytes_per_s:
            return now
        start = max(now, self.idle_at)
        if (start - now) * self.bytes_per_s > self.size_bytes:
            return None
        self.idle_at = start + size_bytes / self.bytes_per_s
        return self.idle_at


class Link:
    """One namespace's link, in both directions."""

    def __init__(self, config: LinkConfig, seed: int) -> None:
        self.config = config
        self.stats = LinkStats()
        self.translate: Translate | None = None
        self._random = {
            direction: random.Random(f"{seed} {config.name} {direction}") for direction in get_args(Direction)
        }
        self._queues = {
            "up": Queue(config.up_bit_per_s / 8, config.queue_bytes),
            "down": Queue(config.down_bit_per_s / 8, config.queue_bytes),
        }

    @property
    def public(self) -> bytes:
        """The address, in 4 bytes, of which packets are delivered here."""
        return socket.inet_aton((self.config.public or self.config.address).partition("/")[0])

    def cross(self, size_bytes: int, direction: Direction, now: float) -> float | None:
        """When a packet that enters now is through; None if it is dropped."""
        departure = self._queues[direction].departure(size_bytes, now)
        if departure is None:
            self.stats.queue_drops += 1
            return None
        if self.config.loss and self._random[direction].random() < self.config.loss:
            self.stats.lost += 1
            return None
        return departure + self.config.delay_s


@dataclass(order=True, slots=True)
class _Event:
    at: float
    number: int
    packet: bytes = field(compare=False)
    link: Link = field(compare=False)
    direction: Direction = field(compare=False)


class Router:
    """Packets under way between links. Time is in seconds, on any clock that does not run backwards."""

    def __init__(self, links: list[Link]) -> None:
        self._by_address = {link.public: link for link in links}
        self._events: list[_Event] = []
        self._count = 0

    def enter(self, link: Link, packet: bytes, now: float) -> None:
        """A packet leaves a namespace."""
        if packet[0] >> 4 != 4:
            return
        if link.translate is not None:
            translated = link.translate(packet, "up")
            if translated is None:
                link.stats.refused += 1
                return
            packet = translated
        if packet[16:20] not in self._by_address:
            link.stats.unroutable += 1
            return
        link.stats.up_packets += 1
        link.stats.up_bytes += len(packet)
        self._schedule(link.cross(len(packet), "up", now), packet, link, "up")

    def due(self, now: float) -> list[tuple[Link, bytes]]:
        """The packets that arrive in a namespace by now, in order."""
        arrived: list[tuple[Link, bytes]] = []
        while self._events and self._events[0].at <= now:
            event = heapq.heappop(self._events)
            if event.direction == "up":
                link = self._by_address[event.packet[16:20]]
                at = link.cross(len(event.packet), "down", event.at)
                self._schedule(at, event.packet, link, "down")
                continue
            link, packet = event.link, event.packet
            if link.translate is not None:
                translated = link.translate(packet, "down")
                if translated is None:
                    link.stats.refused += 1
                    continue
                packet = translated
            link.stats.down_packets += 1
            link.stats.down_bytes += len(packet)
            arrived.append((link, packet))
        return arrived

    @property
    def next_due(self) -> float | None:
        """When `due` has something to do, if nothing enters before."""
        return self._events[0].at if self._events else None

    def _schedule(self, at: float | None, packet: bytes, link: Link, direction: Direction) -> None:
        if at is not None:
            self._count += 1
            heapq.heappush(self._events, _Event(at, self._count, packet, link, direction))


# The driver.

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001


def open_tun(namespace: str, interface: str) -> int:
    """The descriptor of a new TUN device inside a namespace. Raises OSError without the privilege for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN_NO_PI))
        finally:
            libc.setns(home, _CLONE_NEWNET)
    finally:
        os.close(home)
        os.close(there)
    return tun


def _attach(link: Link) -> int:
    config = link.config
    tun = open_tun(config.namespace, config.interface)
    for command in (
        ["address", "add", config.address, "dev", config.interface],
        ["link", "set", config.interface, "up", "mtu", str(MTU_BYTES), "txqueuelen", "1000"],
        ["route", "replace", "default", "dev", config.interface],
    ):
        subprocess.run(["ip", "-n", config.namespace, *command], check=True)
    return tun


def _forward(router: Router, tuns: dict[int, Link], stop: list[int]) -> None:
    descriptors = {id(link): descriptor for descriptor, link in tuns.items()}
    while not stop:
        due = router.next_due
        # select() waits with the precision of microseconds; epoll rounds to milliseconds.
        wait_s = 1.0 if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(list(tuns), [], [], wait_s)
        for descriptor in readable:
            for _ in range(_MAX_BATCH):
                try:
                    packet = os.read(descriptor, 2 * MTU_BYTES)
                except BlockingIOError:
                    break
                router.enter(tuns[descriptor], packet, time.monotonic())
        for link, packet in router.due(time.monotonic()):
            try:
                os.write(descriptors[id(link)], packet)
            except OSError:
                link.stats.queue_drops += 1


def main(text: str) -> None:
    """Routes until SIGTERM."""
    sys.path.insert(0, str(Path(__file__).parent.parent))  # for translations
    config: dict[str, Any] = json.loads(text)
    links = [Link(LinkConfig(**entry), config.get("seed", 0)) for entry in config["links"]]
    for link in links:
        if link.config.translation:
            module, _, function = link.config.translation.partition(":")
            link.translate = getattr(importlib.import_module(module), function)(link.config)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    with contextlib.suppress(OSError):
        os.nice(-10)  # a late router would look like a slow network
    tuns = {_attach(link): link for link in links}
    print("ready", flush=True)
    _forward(Router(links), tuns, stop)
    print(json.dumps({link.config.name: asdict(link.stats) for link in links}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
