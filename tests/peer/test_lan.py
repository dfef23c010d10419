"""The beacon's packet against everything that a local network may send, and real multicast on this machine."""

from __future__ import annotations

import random
import socket

import msgspec
import pytest
import trio
import trio.testing
from swarm_peer.addresses import Address
from swarm_peer.identity import PeerId
from swarm_peer.lan import GROUP, LanBeacon
from swarm_peer.lan_beacon import (
    MAX_BEACON_BYTES,
    MAX_TAGS,
    Beacon,
    Listening,
    beacon_of,
    decode_beacon,
    encode_beacon,
    run_tag,
)

ALICE, BOB = PeerId(b"\1" * 32), PeerId(b"\2" * 32)
RUN, OTHER_RUN = b"\7" * 32, b"\x08" * 32


def packet(peer_id: PeerId = ALICE, port: int = 4000, *runs: bytes) -> bytes:
    return encode_beacon(beacon_of(peer_id, port, runs))


def test_a_beacon_is_small_and_does_not_tell_the_run() -> None:
    full = packet(ALICE, 65535, *(bytes([n]) * 32 for n in range(20)))
    assert len(full) <= MAX_BEACON_BYTES
    read = decode_beacon(full)
    assert read is not None
    assert (read.peer_id, read.port, len(read.tags)) == (ALICE, 65535, MAX_TAGS)
    assert RUN not in packet(ALICE, 4000, RUN)
    assert RUN[:16] not in packet(ALICE, 4000, RUN)
    assert run_tag(RUN) != run_tag(OTHER_RUN)


def test_a_hundred_thousand_hostile_packets_are_read_or_refused() -> None:
    rng = random.Random(20261201)
    good = [packet(), packet(ALICE, 1, RUN), packet(BOB, 65535, *(bytes([n]) * 32 for n in range(8)))]
    read = 0
    for number in range(100_000):
        data = bytearray(rng.choice(good))
        kind = number % 5
        if kind == 0:
            data = bytearray(rng.randbytes(rng.randrange(300)))
        elif kind == 1:
            data[4:] = rng.randbytes(rng.randrange(300))
        elif kind == 2:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        beacon = decode_beacon(bytes(data))
        if beacon is not None:
            read += 1
            assert len(beacon.peer_id) == 32
            assert 1 <= beacon.port <= 65535
            assert len(beacon.tags) <= MAX_TAGS
    assert read > 1000, "flips in ids and ports leave beacons that can be read"
    for nested in (b"\x91" * 250, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        assert decode_beacon(b"SWL1" + nested) is None
    assert decode_beacon(b"SWL2" + packet()[4:]) is None
    assert decode_beacon(packet() + b"\0") is None
    assert decode_beacon(b"SWL1" + msgspec.msgpack.encode(Beacon(b"\1" * 32, 0, ()))) is None


def test_only_strangers_of_our_runs_in_our_own_network_are_dialled() -> None:
    listening = Listening(BOB)
    heard = listening.take(packet(), "192.168.1.9", 0.0)
    assert heard is not None
    assert (heard.peer_id, heard.address, heard.is_new) == (ALICE, Address("192.168.1.9", 4000), True)
    assert listening.take(packet(), "192.168.1.9", 30.0) is None, "told already"
    again = listening.take(packet(), "192.168.1.9", 61.0)
    assert again is not None
    assert not again.is_new
    assert listening.take(packet(BOB), "192.168.1.9", 62.0) is None, "ourselves"
    assert listening.take(packet(), "8.8.8.8", 62.0) is None, "from afar"
    listening.wanted.add(run_tag(RUN))
    assert listening.take(packet(ALICE, 1, OTHER_RUN), "192.168.1.8", 63.0) is None
    assert listening.take(packet(ALICE, 1, OTHER_RUN, RUN), "192.168.1.8", 63.0) is not None
    assert listening.take(packet(ALICE, 2), "192.168.1.7", 63.0) is not None, "it serves no run yet"


def test_a_flood_of_beacons_costs_little() -> None:
    listening = Listening(BOB, memory=16)
    rng = random.Random(1)
    one_host = [listening.take(packet(PeerId(rng.randbytes(32))), "10.0.0.1", 0.001 * n) for n in range(1000)]
    assert sum(found is not None for found in one_host) <= 11
    many = [
        listening.take(packet(PeerId(rng.randbytes(32))), f"10.1.{n % 200}.1", 10 + 0.001 * n) for n in range(10_000)
    ]
    assert sum(found is not None for found in many) <= 320
    assert len(listening._told) <= 16


def free_group() -> tuple[str, int]:
    """A group of the test's own, so that beacons of real peers on this machine do not disturb."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return GROUP, int(probe.getsockname()[1])


def has_multicast() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(
                socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + socket.inet_aton("127.0.0.1")
            )
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_multicast(), reason="this system has no IPv4 multicast")
def test_two_peers_on_one_machine_hear_each_other() -> None:
    async def main() -> None:
        group = free_group()
        found: dict[PeerId, list[tuple[PeerId, Address]]] = {ALICE: [], BOB: []}
        both = trio.Event()

        def beacon(own: PeerId, port: int) -> LanBeacon:
            async def on_found(peer_id: PeerId, address: Address) -> None:
                await trio.lowlevel.checkpoint()
                found[own].append((peer_id, address))
                if all(found.values()):
                    both.set()

            made = LanBeacon(own, port, ["127.0.0.1"], on_found, rng=random.Random(port), group=group)
            made.care_about(RUN)
            return made

        async with trio.open_nursery() as nursery:
            await nursery.start(beacon(ALICE, 1111).run)
            await nursery.start(beacon(BOB, 2222).run)
            with trio.fail_after(20):
                await both.wait()
            # Garbage and a stranger's packet do not end the task.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
                for data in (b"", b"SWL1", b"x" * 4000):
                    stranger.sendto(data, group)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert found == {
            ALICE: [(BOB, Address("127.0.0.1", 2222))],
            BOB: [(ALICE, Address("127.0.0.1", 1111))],
        }

    trio.run(main)


def test_without_a_usable_interface_the_task_ends_quietly() -> None:
    async def main() -> None:
        async def on_found(peer_id: PeerId, address: Address) -> None:
            raise AssertionError

        async with trio.open_nursery() as nursery:
            await nursery.start(LanBeacon(ALICE, 1, [], on_found, rng=random.Random(0), group=free_group()).run)

    trio.run(main)
