"""How a peer that nobody can dial states in its record where it can be found: with a relay that keeps it connected.

A relay entry is an `Address` whose host names the relay's peer id and host, and whose port is the relay's. So it
travels wherever addresses do, is signed with them, and needs no further lookup.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from swarm_peer.addresses import RELAY_PREFIX, Address, Contact
from swarm_peer.identity import PeerId

_ENTRY: Final = re.compile(re.escape(RELAY_PREFIX) + r"([0-9a-f]{64}):([0-9A-Za-z._:%-]+)")


def relay_entry(relay: PeerId, address: Address) -> Address:
    """The entry of a relay that listens at `address`."""
    return Address(f"{RELAY_PREFIX}{relay.hex()}:{address.host}", address.port)


@lru_cache(maxsize=4096)
def relay_of(address: Address) -> Contact | None:
    """The relay that an entry names; None for an ordinary address, or a malformed entry."""
    match = _ENTRY.fullmatch(address.host)
    if match is None or match[2].startswith(RELAY_PREFIX):
        return None
    return Contact(bytes.fromhex(match[1]), (Address(match[2], address.port),))


def direct_addresses(addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    """Those that can be dialled."""
    return tuple(address for address in addresses if not address.host.startswith(RELAY_PREFIX))


def relays_of(contact: Contact) -> list[Contact]:
    """The relays through which a peer can be reached, in its own order."""
    return [relay for address in contact.addresses if (relay := relay_of(address)) is not None]
