"""Targets: what peers are found by without being asked."""

from __future__ import annotations

import struct

from swarm_peer.identity import PeerId
from swarm_peer.lan_beacon import MAX_BEACON_BYTES, Beacon, Heard, Listening, beacon_of, decode_beacon, encode_beacon
from swarm_peer.nat_pmp import MAX_LIFETIME_S, AddressReply, ErrorReply, MappingReply, decode_reply

from fuzz.connection import IDENTITY, RUN_ID
from fuzz.target import Target


class NoBeacon(Exception):
    """The decoder's answer to a packet that is none."""


def _decode_beacon(data: bytes) -> Heard:
    """As it comes from a socket, which cuts what is longer, and on to the choice of whom to dial."""
    beacon = decode_beacon(data)
    heard = Listening(PeerId(bytes(32))).take(data, "192.168.1.7", 0.0)
    if beacon is None or heard is None:
        assert beacon is None or beacon.peer_id == bytes(32)
        raise NoBeacon
    assert len(encode_beacon(beacon)) <= MAX_BEACON_BYTES
    return heard


def _beacon_seeds() -> dict[str, bytes]:
    beacons = {
        "any-run": beacon_of(IDENTITY.peer_id, 7000, []),
        "two-runs": beacon_of(IDENTITY.peer_id, 7000, [RUN_ID, bytes(32)]),
        "full": Beacon(IDENTITY.peer_id, 65535, tuple(bytes([number]) * 16 for number in range(8))),
    }
    return {name: encode_beacon(beacon) for name, beacon in beacons.items()}


class NoReply(Exception):
    """The decoder's answer to a packet that is no reply of a router."""


def _decode_nat_pmp(data: bytes) -> AddressReply | MappingReply | ErrorReply:
    reply = decode_reply(data)
    if reply is None:
        raise NoReply
    if isinstance(reply, MappingReply):
        assert 0 < reply.internal_port < 2**16
        assert 0 <= reply.mapping.lifetime_s <= MAX_LIFETIME_S
    assert str(reply).isprintable()
    return reply


def _nat_pmp_seeds() -> dict[str, bytes]:
    return {
        "address": struct.pack("!BBHI4s", 0, 128, 0, 1000, bytes([192, 0, 2, 1])),
        "mapping": struct.pack("!BBHIHHI", 0, 130, 0, 1000, 7000, 7001, 3600),
        "refused": struct.pack("!BBHI", 0, 130, 2, 1000),
    }


TARGETS = [
    Target("nat-pmp", _decode_nat_pmp, (NoReply,), _nat_pmp_seeds),
    Target("beacon", _decode_beacon, (NoBeacon,), _beacon_seeds),
]
