"""This machine's network interfaces and their addresses, as the C library lists them (`getifaddrs`).

Linux and macOS. Elsewhere, or where the C library cannot be reached, the list is empty and callers fall back on what
the routing table tells.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# <net/if.h>; the same on Linux, macOS and the BSDs.
_IFF_UP: Final = 0x1
_IFF_LOOPBACK: Final = 0x8
_IFF_POINT_TO_POINT: Final = 0x10
# A list from the kernel that is longer than this is not walked to its end.
_MAX_ENTRIES: Final = 4096
_HAS_LENGTH_BYTE: Final = sys.platform == "darwin" or "bsd" in sys.platform


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of one interface. `host` is a literal IP address without brackets, zone or prefix length."""

    interface: str
    host: str
    is_up: bool = True
    is_loopback: bool = False
    is_point_to_point: bool = False


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs`, as far as it is read here."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def list_interfaces() -> list[InterfaceAddress]:
    """Returns every IPv4 and IPv6 address of this machine, in the kernel's order; empty where that is not to be had."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c") if sys.platform == "darwin" else None, use_errno=True)
        get, free = library.getifaddrs, library.freeifaddrs
    except (OSError, AttributeError, TypeError):
        return []
    get.argtypes, get.restype = [ctypes.POINTER(ctypes.POINTER(_IfAddrs))], ctypes.c_int
    free.argtypes, free.restype = [ctypes.POINTER(_IfAddrs)], None
    head = ctypes.POINTER(_IfAddrs)()
    if get(ctypes.byref(head)) != 0:
        return []
    try:
        return list(_walk(head))
    finally:
        free(head)


def runs_in_wsl(kernel_release: str) -> bool:
    """True if `platform.release()` is that of WSL 2: a virtual machine behind the NAT of its Windows host."""
    return "microsoft" in kernel_release.lower()


def _walk(head: ctypes._Pointer[_IfAddrs]) -> Iterator[InterfaceAddress]:
    entry = head
    for _ in range(_MAX_ENTRIES):
        try:
            found = entry.contents
        except ValueError:  # the null pointer at the end
            return
        host = _host_at(found.address) if found.address else None
        if host is not None:
            yield InterfaceAddress(
                interface=found.name.decode("utf-8", "replace"),
                host=host,
                is_up=bool(found.flags & _IFF_UP),
                is_loopback=bool(found.flags & _IFF_LOOPBACK),
                is_point_to_point=bool(found.flags & _IFF_POINT_TO_POINT),
            )
        entry = found.next


def _host_at(pointer: int) -> str | None:
    """Reads a `struct sockaddr`; None unless it is an IPv4 or IPv6 address."""
    start = ctypes.string_at(pointer, 2)
    family = start[1] if _HAS_LENGTH_BYTE else int.from_bytes(start, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(pointer + 8, 16))
    return None
