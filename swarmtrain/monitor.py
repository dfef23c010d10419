"""`swarmtrain monitor`: watches a swarm from outside.  It is no member and changes nothing."""

from __future__ import annotations

import math
import signal
import sys

import click
import trio
from rich.console import Console
from rich.live import Live
from swarm_peer.addresses import Contact
from swarm_peer.errors import PeerError
from swarm_peer.identity import Identity
from swarm_peer.members import Member
from swarm_peer.membership import list_members
from swarm_peer.records import PeerState
from swarm_peer.rpc import Caller

from swarmtrain.admission import enter_run
from swarmtrain.dashboard import PeerRow, SwarmView, render, to_json
from swarmtrain.errors import ExitCode
from swarmtrain.hivemind_bridge.rendezvous import check_rendezvous, enter_swarm, open_rendezvous
from swarmtrain.invite import Target
from swarmtrain.node import NodeConfig, open_node
from swarmtrain.options import MonitorOptions
from swarmtrain.run_lookup import LocatedRun, locate_run
from swarmtrain.status import decode_status
from swarmtrain.way_in import target_with_saved
from swarmtrain.workspace import read_identity

CALL_DEADLINE_S = 5.0


def run_monitor(options: MonitorOptions) -> int:
    """Shows the swarm until Ctrl-C, or once.  Returns the exit code; raises UserError."""
    initial_peers = check_rendezvous(options.dht, options.initial_peers)
    target = target_with_saved(options.run, options.invite, options.peers, options.state)
    return trio.run(_monitor, options, target, initial_peers)


async def _monitor(options: MonitorOptions, target: Target, initial_peers: tuple[str, ...]) -> int:
    # A fresh identity each time: whoever watches need not be recognised.
    config = NodeConfig(listen="[::]:0", entries=target.peers, serve=False, connect_timeout_s=options.connect_timeout)
    async with (
        open_node(Identity.generate(), config) as node,
        open_rendezvous(node, initial_peers, _say) as rendezvous,
    ):
        await enter_swarm(node, rendezvous, target, _say)
        run = await locate_run(node, target.reference)
        gate = await enter_run(node, run, target, creator=read_identity(options.state))
        watch = SwarmWatch(gate, run)
        if options.once:
            view = await watch.look()
            if options.json:
                click.echo(to_json(view))
            else:
                Console(width=None if sys.stdout.isatty() else 80).print(render(view, height=10_000))
            return int(ExitCode.OK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_show_lines if options.json else _show_table, watch, options.interval_s)
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    nursery.cancel_scope.cancel()
                    break
    return int(ExitCode.OK)


def _say(line: str) -> None:
    click.echo(line, err=True)


async def _show_table(watch: SwarmWatch, interval_s: float) -> None:
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(render(await watch.look(), height=console.height), refresh=True)
            await trio.sleep(interval_s)


async def _show_lines(watch: SwarmWatch, interval_s: float) -> None:
    while True:
        click.echo(to_json(await watch.look()))
        await trio.sleep(interval_s)


class SwarmWatch:
    """Asks peers of the run who its members are; goes on to the next when one does not answer."""

    def __init__(self, caller: Caller, run: LocatedRun) -> None:
        self._caller = caller
        self._run = run
        self._sources: list[Contact] = list(run.holders)
        self._started_s = trio.current_time()
        self._answered_s = self._started_s  # the run was found by way of one of them
        self._members: dict[bytes, Member] = {}

    async def look(self) -> SwarmView:
        """Returns the swarm as it is now, or as last seen with a note that nobody answers."""
        offline_s = trio.current_time() - self._answered_s
        note = f"offline for {offline_s:.0f} s: no peer of the run answers; trying again"
        for source in list(self._sources):
            try:
                with trio.fail_after(2 * CALL_DEADLINE_S):
                    members = await list_members(
                        self._caller, source, self._run.signed.run_id, deadline_s=CALL_DEADLINE_S
                    )
            except (PeerError, trio.TooSlowError):
                self._sources.remove(source)
                self._sources.append(source)
                continue
            self._members = {member.contact.peer_id: member for member in members}
            known = {contact.peer_id for contact in self._sources}
            self._sources += [m.contact for m in members if m.contact.peer_id not in known and m.contact.addresses][:16]
            note = ""
            self._answered_s = trio.current_time()
            break
        manifest = self._run.signed.manifest
        return SwarmView(
            run_name=manifest.name,
            run_id=self._run.signed.run_id.hex(),
            watched_s=trio.current_time() - self._started_s,
            peers=tuple(map(peer_row, self._members.values())),
            note=note,
        )


def peer_row(member: Member) -> PeerRow:
    """Turns a member and its status into a row."""
    status = decode_status(member.status)
    trains = status.total_steps > 0
    return PeerRow(
        peer_id=member.contact.peer_id.hex(),
        state=member.state.value if isinstance(member.state, PeerState) else member.state,
        step=status.step if trains else None,
        total_steps=status.total_steps if trains else None,
        loss=status.validation_loss if trains and math.isfinite(status.validation_loss) else None,
        tokens_per_s=status.tokens_per_s if trains else None,
        last_partner=status.last_partner.hex() if status.last_partner else None,
        last_relayed=status.last_relayed if status.last_partner else None,
        staleness=status.staleness if trains else None,
        bytes_up=status.bytes_sent,
        bytes_down=status.bytes_received,
        age_s=member.age_s,
        hivemind=status.hivemind,
    )
