"""Homes behind translating routers meet: every kind against every kind, and with relays that come and go.

relay one 11.22.33.1      relay two 11.22.33.2      visitor 11.22.33.3 (public)
home n: 10.0.n.2, seen as 11.22.33.(10 + n); 1 and 2 keep port numbers, 3 and 4 do not
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.nat import preserving, symmetric
from lab.network import LabNetwork, lab_network, link, reason_to_skip
from lab.router import LinkConfig

_PROGRAM = str(Path(__file__).with_name("meeting_peer.py"))
PORT = 7766
RELAYS = [[1, "11.22.33.1", PORT], [2, "11.22.33.2", PORT]]
KINDS = {1: "preserving", 2: "preserving", 3: "symmetric", 4: "symmetric"}
RTT_MS = 40  # between any two hosts


# The routers by themselves.


def packet(source: tuple[str, int], target: tuple[str, int], protocol: int = 6) -> bytes:
    """An IPv4 packet with correct checksums."""
    body = struct.pack("!HH", source[1], target[1]) + bytes(16) + b"payload!"
    at = 16 if protocol == 6 else 6
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    pseudo = addresses + struct.pack("!BBH", 0, protocol, len(body))
    body = body[:at] + struct.pack("!H", checksum(pseudo + body)) + body[at + 2 :]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0) + addresses
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ends(data: bytes | None) -> tuple[tuple[str, int], tuple[str, int]]:
    """Source and target of a packet whose checksums must be right."""
    assert data is not None
    assert checksum(data[:20]) == 0
    assert checksum(data[12:20] + struct.pack("!BBH", 0, data[9], len(data) - 20) + data[20:]) == 0
    source, target = struct.unpack_from("!HH", data, 20)
    return (socket.inet_ntoa(data[12:16]), source), (socket.inet_ntoa(data[16:20]), target)


HOME = LinkConfig(name="home", namespace="", address="10.0.1.2/24", public="11.22.33.11")
A, B = ("8.8.4.4", 80), ("8.8.8.8", 80)


@pytest.mark.parametrize("protocol", [6, 17])
def test_a_preserving_router_shows_one_port_to_all_and_lets_only_answers_in(protocol: int) -> None:
    router = preserving(HOME)
    assert router(packet(A, ("11.22.33.11", 5000), protocol), "down") is None
    assert ends(router(packet(("10.0.1.2", 5000), A, protocol), "up")) == (("11.22.33.11", 5000), A)
    assert ends(router(packet(A, ("11.22.33.11", 5000), protocol), "down")) == (A, ("10.0.1.2", 5000))
    assert router(packet(B, ("11.22.33.11", 5000), protocol), "down") is None
    assert router(packet((A[0], 81), ("11.22.33.11", 5000), protocol), "down") is None
    assert ends(router(packet(("10.0.1.2", 5000), B, protocol), "up")) == (("11.22.33.11", 5000), B)
    # Another machine at home gets another port.
    (host, port), _ = ends(router(packet(("10.0.1.3", 5000), A, protocol), "up"))
    assert host == "11.22.33.11"
    assert port != 5000


def test_a_symmetric_router_shows_another_port_to_each() -> None:
    router = symmetric(HOME)
    (_, to_a), _ = ends(router(packet(("10.0.1.2", 5000), A), "up"))
    (_, to_b), _ = ends(router(packet(("10.0.1.2", 5000), B), "up"))
    assert len({5000, to_a, to_b}) == 3
    assert ends(router(packet(B, ("11.22.33.11", to_b)), "down")) == (B, ("10.0.1.2", 5000))
    assert router(packet(B, ("11.22.33.11", to_a)), "down") is None


def test_a_router_passes_nothing_but_tcp_and_udp() -> None:
    icmp = packet(("10.0.1.2", 0), A, 6)
    assert preserving(HOME)(icmp[:9] + b"\x01" + icmp[10:], "up") is None


# Peers in namespaces.


class Program:
    """A `meeting_peer.py` in a namespace."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def order(self, what: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self.process.stdin.flush()

    def answer(self, key: str) -> dict[str, Any]:
        """The next line that has `key`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if key in said:
                return said
        raise AssertionError("the program has ended")

    def do(self, what: str, **values: Any) -> dict[str, Any]:
        self.order(what, **values)
        return self.answer("did")


class Lab:
    """The network with programs by name: relays 1 and 2, and homes."""

    def __init__(self, network: LabNetwork, stack: ExitStack, folder: Path) -> None:
        self._network = network
        self._stack = stack
        self._folder = folder

    def start(self, name: str, seed: int, listen: list[Any] | None = None) -> Program:
        """Starts a program; it is ready only when `answer("ready")` says so."""
        config = json.dumps({"seed": seed, "listen": listen or [], "relays": RELAYS})
        log = self._stack.enter_context((self._folder / f"{name}-{time.monotonic_ns()}.log").open("w"))
        process: subprocess.Popen[str] = self._network.popen(
            name, [sys.executable, _PROGRAM, config], stdin=-1, stdout=-1, stderr=log, text=True, env=dict(os.environ)
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return Program(process)

    def start_relay(self, number: int) -> Program:
        return self.start(f"relay{number}", number, [RELAYS[number - 1][1], PORT])


@contextmanager
def nat_lab(folder: Path) -> Iterator[Lab]:
    publics = {"relay1": 1, "relay2": 2, "visitor": 3}
    links = [link(name, f"11.22.33.{n}/24", delay_ms=RTT_MS / 4) for name, n in publics.items()]
    links += [
        link(
            f"home{n}",
            f"10.0.{n}.2/24",
            delay_ms=RTT_MS / 4,
            public=f"11.22.33.{10 + n}",
            translation=f"lab.nat:{kind}",
        )
        for n, kind in KINDS.items()
    ]
    with lab_network(links) as network, ExitStack() as stack:
        yield Lab(network, stack, folder)


def test_homes_meet_through_relays_and_directly_where_their_routers_allow_it(tmp_path: Path) -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    measured: dict[str, dict[str, Any]] = {}
    with nat_lab(tmp_path) as lab:
        relays = [lab.start_relay(number) for number in (1, 2)]
        homes = {n: lab.start(f"home{n}", 10 + n) for n in KINDS}
        visitor = lab.start("visitor", 3, ["11.22.33.3", PORT])
        for program in (*relays, *homes.values(), visitor):
            program.answer("ready")
        for home in homes.values():
            assert "error" not in home.do("reserve", count=2)

        # A peer that can be dialled is called back.
        assert visitor.do("call", seed=13)["relayed"] is False

        pairs = [(1, 2), (1, 3), (4, 2), (3, 4)]
        for here, there in pairs:
            name = f"{KINDS[here]} - {KINDS[there]}"
            called = homes[here].do("call", seed=10 + there)
            assert called.get("relayed") is True, called
            assert called["seconds"] < 5
            measured[name] = {"relay_s": called["seconds"]}
        for here, there in pairs:
            homes[here].order("shorten", seed=10 + there, within_s=8)
        answers = [(here, homes[here].answer("did")) for here, _ in pairs]
        shortened = {(here, done["seed"] - 10): done for here, done in answers}
        for here, there in pairs:
            done = shortened[here, there]
            is_direct = KINDS[here] == KINDS[there] == "preserving"
            assert done.get("relayed") is not is_direct, done
            measured[f"{KINDS[here]} - {KINDS[there]}"] |= {"direct_s": done["seconds"] if is_direct else None}
        assert sum(relay.do("stats")["circuits"] for relay in relays) == len(pairs)

        # The relay that carries a transfer dies, and later comes back.
        blob = homes[4].do("offer", size=4_000_000)["blob"]
        homes[3].order("fetch", seed=14, blob=blob, size=4_000_000)
        homes[3].answer("fetching")
        relays[0].process.kill()
        fetched = homes[3].answer("did")
        assert fetched.get("whole") is True, fetched
        assert relays[1].do("stats")["bytes"] > 500_000
        assert "error" not in homes[4].do("reserve", count=1)
        lab.start_relay(1).answer("ready")
        assert "error" not in homes[4].do("reserve", count=2)
        measured["relay killed in a transfer of 4 MB"] = {"seconds": fetched["seconds"]}
    print(json.dumps(measured, indent=1))
