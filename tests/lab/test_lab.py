"""The lab itself: what the router does to packets, in virtual time and, as root, for real."""

from __future__ import annotations

import json
import socket
import sys
import time

import pytest

from lab.network import lab_network, link, reason_to_skip
from lab.router import Direction, Link, Router

A, B = "203.0.113.1/24", "203.0.113.2/24"


def packet(to: str, size: int = 1000, mark: int = 0) -> bytes:
    header = bytes([0x45, mark]) + bytes(14) + socket.inet_aton(to.partition("/")[0])
    return header + bytes(size - len(header))


def pair(**of_a: float) -> tuple[Link, Link, Router]:
    a, b = Link(link("a", A, **of_a), 0), Link(link("b", B, delay_ms=20), 0)  # type: ignore[arg-type]
    return a, b, Router([a, b])


def arrivals(router: Router) -> list[tuple[float, str, int]]:
    found = []
    while (at := router.next_due) is not None:
        found += [(round(at, 6), link.config.name, data[1]) for link, data in router.due(at)]
    return found


def test_delay_and_rate_add_up_and_order_is_kept() -> None:
    a, _, router = pair(mbit_per_s=8, delay_ms=30)  # 1 ms for a packet of 1000 bytes
    for mark in range(3):
        router.enter(a, packet(B, mark=mark), 0.0)
    assert arrivals(router) == [(0.051, "b", 0), (0.052, "b", 1), (0.053, "b", 2)]


def test_a_full_queue_drops_the_tail() -> None:
    a, b, router = pair(mbit_per_s=8, queue_bytes=5000)
    for mark in range(20):
        router.enter(a, packet(B, mark=mark), 0.0)
    assert [mark for _, _, mark in arrivals(router)] == list(range(6))
    assert a.stats.queue_drops == 14
    assert b.stats.down_bytes == 6000


def test_loss_is_random_and_repeats_with_the_seed() -> None:
    lost = []
    for _ in range(2):
        a, _, router = pair(loss=0.01)
        for _ in range(20_000):
            router.enter(a, packet(B), 0.0)
        assert len(arrivals(router)) == 20_000 - a.stats.lost
        lost.append(a.stats.lost)
    assert lost[0] == lost[1]
    assert 150 < lost[0] < 250


def test_a_translation_rewrites_or_drops_at_the_border() -> None:
    a, b, router = pair()

    def translate(data: bytes, direction: Direction) -> bytes | None:
        return data[:1] + bytes([direction == "up"]) + data[2:] if data[1] < 9 else None

    a.translate = translate
    router.enter(a, packet(B, mark=5), 0.0)
    router.enter(a, packet(B, mark=9), 0.0)
    router.enter(b, packet(A, mark=7), 0.0)
    router.enter(b, packet(A, mark=9), 0.0)
    router.enter(b, packet("192.0.2.1"), 0.0)
    assert sorted(arrivals(router)) == [(0.02, "a", 0), (0.02, "b", 1)]
    assert a.stats.refused == 2
    assert b.stats.unroutable == 1


ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 7))
print("ready", flush=True)
there, _ = server.accept()
while data := there.recv(65536):
    there.sendall(data)
"""
CALL = """
import json, socket, time
times = []
with socket.create_connection(("203.0.113.2", 7)) as there:
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(5):
        began = time.monotonic()
        there.sendall(b"x")
        there.recv(1)
        times.append(time.monotonic() - began)
print(json.dumps(times))
"""


def test_the_lab_delays_what_crosses_it_and_leaves_nothing_behind() -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    links = [link("a", A, delay_ms=20), link("b", B, delay_ms=20)]
    with lab_network(links) as network:
        with network.popen("b", [sys.executable, "-c", ECHO], stdout=-1, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            began = time.monotonic()
            called = network.run("a", [sys.executable, "-c", CALL], capture_output=True, text=True, check=True)
            assert time.monotonic() - began > 6 * 0.08
            assert min(json.loads(called.stdout)) >= 0.08, "two links of 20 ms, there and back"
            server.wait(10)
        counted = network.stop()
    assert counted["a"]["up_packets"] > 5
    assert counted["b"]["lost"] == counted["b"]["queue_drops"] == 0
    listed = network.run("a", ["true"], capture_output=True, check=False)
    assert listed.returncode != 0, "the namespace is gone"
