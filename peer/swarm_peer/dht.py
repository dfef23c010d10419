"""The four remote procedures of the DHT and their messages. `DISCOVERY.md` has the tables.

The caller is authenticated by the transport; a server states its own contact as `sender`, a peer that only
asks leaves it out and thereby stays out of everybody's routing table.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from swarm_peer.addresses import Contact
from swarm_peer.lookup import CONTACTS_PER_REPLY
from swarm_peer.records import AgedRecord, Key
from swarm_peer.rpc import Method, Priority
from swarm_peer.storage import PutOutcome

RECORDS_PER_REPLY: Final = 64

Contacts = Annotated[tuple[Contact, ...], msgspec.Meta(max_length=CONTACTS_PER_REPLY)]


class Ping(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks whether the remote still serves."""

    sender: Contact | None


class Pong(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """It does."""


class FindNodes(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the servers nearest to `target`."""

    sender: Contact | None
    target: Key


class Nodes(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The nearest that the remote knows, nearest first."""

    contacts: Contacts


class FindRecords(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the records under `key`, and for servers nearer to it."""

    sender: Contact | None
    key: Key


class Records(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the remote holds under the key, with ages, and the nearest servers that it knows."""

    records: Annotated[tuple[AgedRecord, ...], msgspec.Meta(max_length=RECORDS_PER_REPLY)]
    contacts: Contacts


class StoreRecord(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks the remote to hold a record."""

    sender: Contact | None
    aged: AgedRecord


class StoreReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What became of it; if it was stale, the record that the remote holds instead."""

    outcome: PutOutcome
    newer: AgedRecord | None


# Replies fit their caps at the worst: 64 records of 1.2 KiB and 20 contacts of 8 addresses of 260 bytes.
PING: Final = Method("dht.ping", Ping, Pong, 4096, 64, Priority.CONTROL)
FIND_NODES: Final = Method("dht.find-nodes", FindNodes, Nodes, 4096, 65536, Priority.CONTROL)
FIND_RECORDS: Final = Method("dht.find-records", FindRecords, Records, 4096, 160 * 1024, Priority.CONTROL)
STORE: Final = Method("dht.store", StoreRecord, StoreReply, 8192, 8192, Priority.CONTROL)
