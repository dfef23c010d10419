"""Peers of a run, met through a hivemind DHT: what is found there becomes entry points of our own network, no more.

Addresses and peer ids are all that is learnt. Whoever answers at such an address with the right key is an entry like
one from `--peer`; run, manifest, members and weights then come from our own DHT, gossip and transfer, and go on
without the bridge once two peers have met.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
from swarm_peer.addresses import Address, Contact
from swarm_peer.dht import PING, Ping
from swarm_peer.errors import PeerError
from swarm_peer.identity import PeerId, short
from swarm_peer.records import RunPayload
from swarm_peer.routing import is_dialable, is_local

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.hivemind_bridge.bridge import CHILD_COMMAND, Bridge, BridgeDown, BridgeState, BridgeTimes
from swarmtrain.hivemind_bridge.entries import ENTRY_LIFE_S, key_for, keys_of, make_entry, newest_entries
from swarmtrain.hivemind_bridge.installation import require_hivemind
from swarmtrain.hivemind_bridge.multiaddr import join_multiaddrs
from swarmtrain.invite import EntryPoint, Target
from swarmtrain.naming import RunReference
from swarmtrain.node import Node
from swarmtrain.way_in import find_way_in, nobody_reached

logger = logging.getLogger("swarmtrain.hivemind")

_TRIED_AT_ONCE: Final = 16
_PING_DEADLINE_S: Final = 5.0
# What strangers in the DHT can make us remember, for the life of this process.
_ENTRIES_CAP: Final = 32


@dataclass(frozen=True, slots=True)
class RendezvousTimes:
    """Seconds. Entries live four times as long as they take to be renewed."""

    announce_every_s: float = ENTRY_LIFE_S / 4
    look_every_s: float = 120.0
    patience_s: float = 15.0  # for a run that nobody announces yet


class Rendezvous:
    """Announces this node under its runs, and meets others that did. `wall_clock` gives seconds since 1970."""

    def __init__(
        self,
        node: Node,
        bridge: Bridge,
        *,
        say: Callable[[str], None],
        rng: random.Random,
        times: RendezvousTimes | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._bridge = bridge
        self._say = say
        self._rng = rng
        self._times = times or RendezvousTimes()
        self._wall_clock = wall_clock
        self._runs: list[RunPayload] = []
        self._has_new_run = trio.Event()
        self._met: set[bytes] = set()
        self._announced: set[bytes] = set()

    @property
    def state(self) -> BridgeState:
        """Of the bridge."""
        return self._bridge.state

    def announce(self, run: RunPayload) -> None:
        """Makes this node findable under a run from now on, and has it look for others of the run now and then."""
        self._runs.append(run)
        self._has_new_run.set()

    async def enter(self, reference: RunReference, say: Callable[[str], None]) -> None:
        """Meets peers of a run, at least one.

        Raises UserError if the bridge does not come up, or nobody in the DHT is in the run or answers.
        """
        if not await self._bridge.settled():
            raise UserError(f"--dht hivemind: {self._bridge.reason}", ExitCode.NO_PEER)
        try:
            contacts = await self._find(reference)
            with trio.move_on_after(self._times.patience_s):
                while not contacts:  # others have to act, and nobody tells us when
                    await trio.sleep(self._times.patience_s / 5)
                    contacts = await self._find(reference)
        except BridgeDown as error:
            raise UserError(f"--dht hivemind: {error}", ExitCode.NO_PEER) from None
        if not contacts:
            raise UserError(
                f"nobody in this hivemind DHT announces run {reference}; its owner starts "
                "`swarmtrain bootstrap NAME.run --dht hivemind --initial-peers …`",
                ExitCode.NO_RUN,
            )
        entries = await self._try(contacts)
        say(f"hivemind DHT: {len(contacts)} peers announce run {reference}, {len(entries)} of those tried answer")
        if not entries:
            raise UserError(
                f"none of the {len(contacts)} peers that announce run {reference} can be reached; "
                "one of them must be reachable from here (a forwarded port and --announce)",
                ExitCode.NO_PEER,
            )
        await self._node.discovery.bootstrap(entries)

    async def run(self) -> None:
        """Announces and looks around until cancelled, while the bridge is up."""
        while True:
            with trio.move_on_after(self._times.announce_every_s):
                if not self._runs:
                    await self._has_new_run.wait()
            await self._bridge.wait_until_up()
            self._has_new_run = trio.Event()
            lives = self._bridge.lives
            try:
                await self._announce_all()
                due_s = trio.current_time() + self._times.announce_every_s * self._rng.uniform(0.9, 1.1)
                while self._bridge.lives == lives and trio.current_time() < due_s and not self._has_new_run.is_set():
                    with trio.move_on_after(self._times.look_every_s * self._rng.uniform(0.9, 1.1)):
                        await self._has_new_run.wait()
                    await self._bridge.wait_until_up()
                    await self._look_around()
            except BridgeDown:
                await trio.sleep(1.0)
            except Exception:
                logger.exception("the hivemind rendezvous failed; it goes on")
                await trio.sleep(10.0)

    async def _announce_all(self) -> None:
        for run in self._runs:
            stored = []
            for key in keys_of(run):
                value = make_entry(self._node.identity, key, run, self._wall_clock())
                stored.append(await self._bridge.put(key, self._node.identity.peer_id, value, ENTRY_LIFE_S))
            logger.info("announced run %s in the hivemind DHT: %d of %d taken", run.name, sum(stored), len(stored))
            if all(stored) and run.run_id not in self._announced:
                self._announced.add(run.run_id)
                self._say(f"run {run.name} is announced in the hivemind DHT")

    async def _look_around(self) -> None:
        """Peers that met elsewhere, or first, are found too, so that two halves of a run come together."""
        for run in self._runs:
            contacts = [c for c in await self._find(RunReference(run_id=run.run_id)) if c.peer_id not in self._met]
            room = _ENTRIES_CAP - len(self._met)
            entries = await self._try(contacts[: min(4, room)]) if room > 0 else []
            if entries:
                logger.info("met %d peers of run %s through the hivemind DHT", len(entries), run.name)
                await self._node.discovery.bootstrap(entries)

    async def _find(self, reference: RunReference) -> list[Contact]:
        """Verified contacts of other peers of the run, in random order. Raises BridgeDown."""
        key = key_for(reference)
        values = await self._bridge.get(key)
        found, invalid = await trio.to_thread.run_sync(newest_entries, values, key, self._wall_clock())
        if invalid:
            logger.warning("%d of %d entries in the hivemind DHT are not valid", invalid, len(values))
        local_allowed = any(is_local(address.host) for address in self._node.addresses)
        contacts = []
        for record, run in found:
            addresses = tuple(a for a in run.addresses if is_dialable(a, local_allowed=local_allowed))
            is_other = record.author() != self._node.identity.peer_id
            if is_other and addresses and reference.matches(run.name, run.creator, run.run_id):
                contacts.append(Contact(record.author(), addresses))
        self._rng.shuffle(contacts)
        return contacts

    async def _try(self, contacts: Sequence[Contact]) -> list[EntryPoint]:
        """Those that answer over our own connections and prove the key that the entry names."""
        reached: list[EntryPoint] = []

        async def ping(contact: Contact) -> None:
            try:
                await self._node.endpoint.call(contact, PING, Ping(None), deadline_s=_PING_DEADLINE_S)
            except PeerError as error:
                logger.info("peer %s from the hivemind DHT: %s", short(contact.peer_id), error)
                return
            self._met.add(contact.peer_id)
            reached.append(_entry_point(contact))

        async with trio.open_nursery() as nursery:
            for contact in contacts[:_TRIED_AT_ONCE]:
                nursery.start_soon(ping, contact)
        return reached


def _entry_point(contact: Contact) -> tuple[PeerId, Address]:
    return PeerId(contact.peer_id), contact.addresses[0]


def check_rendezvous(dht: str, initial_peers: Sequence[str]) -> tuple[str, ...]:
    """The multiaddresses to begin with, empty without `--dht hivemind`. Raises UserError, before anything is opened."""
    if dht != "hivemind":
        return ()
    addresses = join_multiaddrs(initial_peers)
    require_hivemind()
    return addresses


@asynccontextmanager
async def open_rendezvous(
    node: Node,
    initial_peers: Sequence[str],
    say: Callable[[str], None],
    *,
    command: Sequence[str] = CHILD_COMMAND,
    bridge_times: BridgeTimes | None = None,
    times: RendezvousTimes | None = None,
) -> AsyncIterator[Rendezvous | None]:
    """Runs a bridge and its rendezvous for the time of the block; gives None if there are no `initial_peers`."""
    if not initial_peers:
        yield None
        return
    rng = random.Random(node.identity.peer_id)
    bridge = Bridge(initial_peers, say=say, rng=rng, command=command, times=bridge_times)
    rendezvous = Rendezvous(node, bridge, say=say, rng=rng, times=times)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.run)
        nursery.start_soon(rendezvous.run)
        try:
            yield rendezvous
        finally:
            nursery.cancel_scope.cancel()


async def enter_swarm(node: Node, rendezvous: Rendezvous | None, target: Target, say: Callable[[str], None]) -> None:
    """Reaches the entry points of `--peer` and, with a rendezvous, those that it knows; one way in is enough.

    Raises UserError when there is none.
    """
    if await find_way_in(node, target.peers, say):
        return
    if rendezvous is None:
        raise nobody_reached(target.peers)
    say("asking the hivemind DHT; its process needs a few seconds to start")
    await rendezvous.enter(target.reference, say)
