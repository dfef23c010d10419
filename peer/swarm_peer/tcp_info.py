"""What the kernel knows about a TCP connection, and what it may be asked to do. Linux has the most to offer; where
something is missing, the answer is None or False, and nothing above depends on it.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Protocol

# struct tcp_info of <linux/tcp.h>, whose fields keep their places: tcpi_rtt, smoothed (RFC 6298), in microseconds.
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_RTT_OFFSET = 68
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)


class SocketOptions(Protocol):
    """The part of a socket that is needed here."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...


def round_trip_s(options: SocketOptions) -> float | None:
    """The kernel's smoothed round trip, which counts neither bytes unsent nor waiting for lost ones."""
    if sys.platform != "linux":
        return None
    try:
        info = options.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RTT_OFFSET + 4)
    except OSError:
        return None
    if len(info) < _RTT_OFFSET + 4:
        return None
    (microseconds,) = struct.unpack_from("=I", info, _RTT_OFFSET)
    return microseconds / 1e6 if microseconds else None


def set_congestion_control(options: SocketOptions, name: str) -> bool:
    """Asks for a congestion control; False if the kernel lacks it or does not let this user choose it."""
    if sys.platform != "linux":
        return False
    try:
        options.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, name.encode("ascii"))
    except OSError:
        return False
    return True
