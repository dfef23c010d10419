"""Exchanging the ticket of an invite link, once, for a certificate of one's own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
import trio

from swarm_peer.addresses import Contact
from swarm_peer.admission import Admission, Redemptions
from swarm_peer.certificates import (
    BAD_CERTIFICATE,
    Chain,
    Charter,
    Ticket,
    WireChain,
    claim,
    verify_chain,
)
from swarm_peer.errors import Refusal
from swarm_peer.identity import Identity, PeerId
from swarm_peer.rpc import Caller, Method, Priority
from swarm_peer.storage import RateLimiter


class Claim(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Request: the ticket's chain and what its key certifies. Reply: the same, witnessed by the redeemer."""

    chain: WireChain


def _method(run_id: bytes) -> Method[Claim, Claim]:
    return Method(f"admission.redeem.{run_id.hex()[:32]}", Claim, Claim, 8192, 8192, Priority.CONTROL)


class Redeemer:
    """Answers claims of strangers. `save` keeps what was redeemed; the answer waits for it."""

    def __init__(
        self,
        caller: Caller,
        identity: Identity,
        admission: Admission,
        redemptions: Redemptions,
        *,
        save: Callable[[bytes], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._admission = admission
        self._redemptions = redemptions
        self._save = save
        self._clock = clock
        self._limiter = RateLimiter(rate_per_s=0.2, burst=10.0)
        self._saving = trio.Lock()
        caller.handle(_method(admission.charter.run_id), self._on_claim)

    async def _on_claim(self, remote: PeerId, request: Claim) -> Claim:
        if not self._limiter.allow(remote, trio.current_time()):
            raise Refusal("rate-limited", "try again in a minute")
        async with self._saving:
            chain = self._redemptions.redeem(
                self._identity,
                self._admission.charter,
                request.chain,
                remote,
                self._clock(),
                self._admission.revoked,
            )
            await self._save(self._redemptions.encode())
        return Claim(chain)


async def redeem(
    caller: Caller, redeemer: Contact, charter: Charter, ticket: Ticket, *, deadline_s: float = 20.0
) -> Chain:
    """Turns a ticket into our own chain. Only the chain travels, never the ticket's secret.

    Raises `Refusal`, with one of `DENIALS` where the ticket is no good, else as `Caller.call`.
    """
    chain = claim(ticket, caller.peer_id)
    if ticket.chain[-1].redeemer:
        reply = await caller.call(redeemer, _method(charter.run_id), Claim(chain), deadline_s=deadline_s)
        if [link.signature for link in reply.chain] != [link.signature for link in chain]:
            raise Refusal(BAD_CERTIFICATE, "the redeemer answered with other certificates")
        chain = reply.chain
    # Lifetimes are for the others to judge: our own clock may be the wrong one.
    verify_chain(charter, chain, caller.peer_id, 0.0, frozenset())
    return chain
