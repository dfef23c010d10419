"""The way into the swarm: entry points from several sources, tried in order, the first that answers suffices.

The order is: peers saved by an earlier start, `--peer`, the invite link, the local network. Each entry point that
fails gets one line that says how. What is not reached is tried again in the background for as long as the node runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.invite import EntryPoint, Target, contact_text, resolve_target
from swarmtrain.node import Node
from swarmtrain.saved_peers import saved_entries

# Between two attempts, as in RFC 8305; a failure starts the next at once.
STAGGER_S: Final = 0.25
# What has been started is given this much longer once one has answered: two entry points are better than one.
GRACE_S: Final = 1.0
# Whoever hears a new beacon answers within half a second; a packet or two may be lost.
BEACON_WAIT_S: Final = 5.0


def in_order(*sources: Sequence[EntryPoint]) -> tuple[EntryPoint, ...]:
    """Merges sources of entry points; what comes twice keeps its first place."""
    return tuple(dict.fromkeys(entry for source in sources for entry in source))


def target_with_saved(run: str | None, invite: str | None, peers: Sequence[str], state: Path) -> Target:
    """What the user asks for, with the peers that earlier starts have saved in front of those that are given.

    Raises InviteError.
    """
    target = resolve_target(run, invite, peers)
    return Target(target.reference, in_order(saved_entries(state, target.reference), target.peers), target.ticket)


async def find_way_in(node: Node, entries: Sequence[EntryPoint], say: Callable[[str], None]) -> bool:
    """Tries the entry points, then waits for a beacon; True as soon as one has answered, False when all have failed."""
    # Several peers of one user share their saved peers, so this peer may find itself there.
    others = [entry for entry in entries if entry[0] != node.identity.peer_id] or entries
    if others and await _first_that_answers(node, others, say):
        return True
    if node.local is None:
        return False
    with trio.move_on_after(BEACON_WAIT_S):
        await node.local.reached.wait()
    if node.local.first is not None:
        say(f"found {node.local.first} in the local network")
    return node.local.reached.is_set()


async def _first_that_answers(node: Node, entries: Sequence[EntryPoint], say: Callable[[str], None]) -> bool:
    started: dict[EntryPoint, None] = {}
    reached = trio.Event()
    async with trio.open_nursery() as nursery:

        async def attempt(entry: EntryPoint, ended: trio.Event) -> None:
            [(_, error)] = await node.discovery.bootstrap([entry])
            del started[entry]
            if error is None:
                reached.set()
            else:
                say(str(error))
            ended.set()
            if reached.is_set() and not started:
                nursery.cancel_scope.cancel()

        async def stop_when_reached() -> None:
            await reached.wait()
            await trio.sleep(GRACE_S)
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop_when_reached)
        async with trio.open_nursery() as attempts:
            for entry in entries:
                if reached.is_set():
                    break
                started[entry] = None
                ended = trio.Event()
                attempts.start_soon(attempt, entry, ended)
                with trio.move_on_after(STAGGER_S):
                    await ended.wait()
        nursery.cancel_scope.cancel()
    for entry in started:
        say(f"{entry[1]} has not answered yet; it is tried again in the background")
    return reached.is_set()


async def reach_entries(node: Node, entries: Sequence[EntryPoint], say: Callable[[str], None]) -> None:
    """As `find_way_in`, for whom there is nothing to do without others.

    Raises UserError with exit code 3 when none can be reached.
    """
    if not await find_way_in(node, entries, say):
        raise nobody_reached(entries)


def nobody_reached(entries: Sequence[EntryPoint]) -> UserError:
    """What a user is told who has nobody to begin with."""
    if not entries:
        return UserError(
            "no peer to begin with, and none is heard in the local network; add --peer HOST:PORT of the bootstrap peer "
            "or of any peer",
            ExitCode.NO_PEER,
        )
    tried = ", ".join(contact_text(None, address) for _, address in entries[:3])
    more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
    return UserError(
        f"no peer reached ({tried}{more}): all {len(entries)} addresses failed; start one with `swarmtrain bootstrap`, "
        "ask for a current address, or give a slow link more time with --connect-timeout",
        ExitCode.NO_PEER,
    )
