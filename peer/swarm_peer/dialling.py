"""Dialling a peer whose contact names several ways to it: which way answers first.

Addresses are tried in order, each with a small head start (RFC 8305, "happy eyeballs"). The detour through a relay
comes last, and later where there are addresses that can be dialled directly.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import trio

from swarm_peer.addresses import Contact
from swarm_peer.errors import ConnectError, Unreachable
from swarm_peer.transport import Channel

_STAGGER_S: Final = 0.25
# With addresses that can be dialled directly, a relay is asked only after this time, or when all have failed.
_DETOUR_AFTER_S: Final = 1.0


class Detour(Protocol):
    """A way to peers that cannot be dialled: through the relays that their contacts name."""

    async def dial(self, to: Contact, deadline_s: float) -> Channel:
        """A relayed channel, with us as TLS client. Is cancelled when the peer connects to us meanwhile.

        Raises `ConnectError`.
        """
        ...


class Dial:
    """A dial under way, shared by all calls that wait for it."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: ConnectError | None = None
        self.detour = trio.CancelScope()

    def end(self) -> None:
        self.done.set()
        self.detour.cancel()


async def dial_first(
    to: Contact,
    direct: Sequence[Callable[[], Awaitable[Channel]]],
    detour: Callable[[], Awaitable[Channel | None]] | None = None,
) -> tuple[Channel, bool] | None:
    """Takes the `direct` ways in order, and the detour last.

    Returns the first channel, and whether it is relayed; None if the detour says that none is needed any more.
    Raises the first `ConnectError` if no way leads there.
    """
    won: list[tuple[Channel, bool]] = []
    errors: list[ConnectError] = []
    all_failed = trio.Event()
    is_needed = True

    async def attempt(way: Callable[[], Awaitable[Channel | None]], failed: trio.Event, *, is_relayed: bool) -> None:
        nonlocal is_needed
        try:
            channel = await way()
        except ConnectError as error:
            errors.append(error)
            failed.set()
            if len(errors) >= len(direct):
                all_failed.set()
            return
        if channel is None:
            is_needed = False
        else:
            won.append((channel, is_relayed))
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for way in direct:
            failed = trio.Event()
            nursery.start_soon(functools.partial(attempt, way, failed, is_relayed=False))
            with trio.move_on_after(_STAGGER_S):
                await failed.wait()
        if detour is not None:
            if direct:
                with trio.move_on_after(_DETOUR_AFTER_S):
                    await all_failed.wait()
            nursery.start_soon(functools.partial(attempt, detour, trio.Event(), is_relayed=True))
    for channel, _ in won[1:]:
        await channel.stream.aclose()
    if won:
        return won[0]
    if not is_needed:
        return None
    raise errors[0] if errors else Unreachable(to, "it can be reached through relays only")
