"""The seam between a run and whatever finds its peers: four calls, no more.

`Kademlia` is the built-in backend. Another one (a different DHT, a fixed list, a tracker) has to offer these
four calls and to promise two things: what it returns is signed by its author and verified, and a call ends on
its own within seconds, with an empty answer rather than an error when nothing is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm_peer.addresses import Contact
from swarm_peer.records import RunPayload, SignedRecord


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run as one announcer describes it. One run has as many of these as announcers; `payload.run_id` tells
    runs apart.
    """

    payload: RunPayload
    announcer: Contact


class Discovery(Protocol):
    """Finds runs by name and peers by run."""

    async def announce_run(self, run: RunPayload) -> None:
        """Makes the run findable under its name and in the index of all runs, and keep it so."""

    async def find_runs(self, name: str | None) -> list[FoundRun]:
        """The runs called `name`, or a sample of all runs for None. Empty when nothing is found."""

    async def announce_peer(self, record: SignedRecord) -> None:
        """Makes a "peer" record of our own findable under its key and keep it so; a "left" record ends that."""

    async def find_peers(self, run_id: bytes) -> list[SignedRecord]:
        """Verified records of peers of the run, most recently announced first, without those that left.

        A record says that the peer was there when it announced itself, not that it still is.
        """
