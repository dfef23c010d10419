"""Whom to ask whether others can dial us: a few peers, of as many networks as there are."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

import trio
from swarm_peer.addresses import Contact
from swarm_peer.dial_back import DialBack, Verdict
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import PeerError
from swarm_peer.identity import PeerId
from swarm_peer.relay_entry import direct_addresses
from swarm_peer.routing import wide_network_of

from swarmtrain.reachability import NETWORKS_NEEDED, networks_of

logger = logging.getLogger("swarmtrain.witnesses")

ASKED_AT_ONCE: Final = 4
ASKED_AT_MOST: Final = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer to ask, and its /16 or /32 as far as we know; None in a local network."""

    contact: Contact
    network: Hashable | None


def candidates(endpoint: Endpoint, known: Iterable[Contact]) -> list[Candidate]:
    """Those who can be asked: first whom we are connected to directly, then other known peers."""
    contacts = {PeerId(contact.peer_id): contact for contact in known}
    seen = {peer: at for peer in endpoint.connected() if (at := endpoint.seen_at(peer)) is not None}
    found = [Candidate(contacts.get(peer, Contact(peer, ())), wide_network_of((at,))) for peer, at in seen.items()]
    for peer, contact in contacts.items():
        if peer not in seen:
            found.append(Candidate(contact, wide_network_of(direct_addresses(contact.addresses))))
    return found


def in_turn(found: Iterable[Candidate]) -> list[Candidate]:
    """Orders candidates so that networks take turns: the first of each, the second of each, and so on."""
    counts: dict[Hashable | None, int] = {}
    ranked = []
    for one in found:
        ranked.append((counts.get(one.network, 0), one))
        counts[one.network] = counts.get(one.network, 0) + 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


async def hear(dial_back: DialBack, found: Iterable[Candidate], port: int) -> list[Verdict]:
    """Has some dial `port` of ours. While fewer than two networks have answered, peers of further ones are asked too.

    Where all are in one network, nobody is waited for in vain. A call ends after 10 s; there are two in a row at most.
    """
    verdicts: list[Verdict] = []

    async def ask(helper: Contact) -> None:
        try:
            verdicts.append(await dial_back.ask(helper, port))
        except PeerError as error:
            logger.info("%s does not say whether it can dial us: %s", helper, error)

    waiting = in_turn(found)[:ASKED_AT_MOST]
    while waiting:
        async with trio.open_nursery() as nursery:
            for one in waiting[:ASKED_AT_ONCE]:
                nursery.start_soon(ask, one.contact)
        heard = networks_of(verdicts)
        if len(heard) >= NETWORKS_NEEDED:
            break
        waiting = [c for c in waiting[ASKED_AT_ONCE:] if not verdicts or (c.network and c.network not in heard)]
    return verdicts
