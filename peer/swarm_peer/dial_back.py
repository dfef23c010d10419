"""Whether others can reach us: a peer that we are connected to tries, and says how it went.

    we                                        helper
    ask(port, knock, answer)  ------------->  where do this peer's connections come from?
    knock?  <== a new connection to that host and our port, greeting with `knock` ==
    answer  ==============================>   is it `answer`?
              <-----------------------------  outcome, and the host

The helper dials only the host from which it sees us: nobody can be aimed at somebody else. That the greeting arrives
keeps the helper honest, that the answer comes back shows that it was we who listened there.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec
import trio

from swarm_peer.addresses import Address, Contact, Host
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import ConnectError, ConnectionRefused, ConnectTimedOut, Refusal
from swarm_peer.identity import PeerId
from swarm_peer.raw import RawConnection, RawTransport, close_now, receive_exactly
from swarm_peer.rpc import Method, Priority
from swarm_peer.storage import RateLimiter

logger = logging.getLogger("swarm_peer")

_MAGIC: Final = b"SWD1"
_SECRET_BYTES: Final = 16
_DIAL_DEADLINE_S: Final = 5.0
_MAX_AT_ONCE: Final = 8

Secret = Annotated[bytes, msgspec.Meta(min_length=_SECRET_BYTES, max_length=_SECRET_BYTES)]


class Outcome(StrEnum):
    """What became of the helper's attempt."""

    REACHED = "reached"
    REFUSED = "refused"  # the host answers, and nothing listens on the port
    TIMED_OUT = "timed-out"  # no answer: a firewall, or a router that translates
    UNREACHABLE = "unreachable"
    STRANGER = "stranger"  # something listens there, and it is not this peer


class DialBackRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Dial `port` on the host that you see me at, greet with `knock`, and expect `answer`."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    knock: Secret
    answer: Secret


class DialBackReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What became of it, and at which host and port the helper sees the asker's own connection."""

    outcome: Outcome
    host: Host
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one helper says. `observed` is where our connection to it comes from, as it sees us.

    `helper_at` is where we see it: where its dial came from if that arrived, else where our connection to it leads.
    """

    helper: PeerId
    outcome: Outcome
    observed: Address
    helper_at: Address | None = None

    @property
    def is_reached(self) -> bool:
        return self.outcome is Outcome.REACHED


DIAL_BACK: Final = Method("dial-back", DialBackRequest, DialBackReply, 128, 512, priority=Priority.CONTROL)


@dataclass(slots=True)
class _Expected:
    """What is to be said to a knock, and where it came from when it came."""

    answer: bytes
    came_from: Address | None = None


class DialBack:
    """Asks others to dial us, and dials those who ask, at most once per 10 s each (burst 6)."""

    def __init__(self, endpoint: Endpoint, transport: RawTransport) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._expected: dict[bytes, _Expected] = {}  # by knock
        self._limiter = RateLimiter(rate_per_s=0.1, burst=6.0)
        self._dialling = 0
        transport.on_greeting(_MAGIC, self._on_knock)
        endpoint.handle(DIAL_BACK, self._on_request)

    async def ask(self, helper: Contact, port: int, *, deadline_s: float = 10.0) -> Verdict:
        """Has `helper` dial `port` on the host that it sees us at.

        Raises as `Caller.call`; `Refusal` with code "not-observed" if it is connected to us by way of others.
        """
        knock, answer = secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
        expected = self._expected[knock] = _Expected(answer)
        try:
            request = DialBackRequest(port, knock, answer)
            reply = await self._endpoint.call(helper, DIAL_BACK, request, deadline_s=deadline_s)
        finally:
            del self._expected[knock]
        outcome, peer = reply.outcome, PeerId(helper.peer_id)
        if outcome is Outcome.REACHED and expected.came_from is None:
            outcome = Outcome.STRANGER
        helper_at = expected.came_from or self._endpoint.seen_at(peer)
        return Verdict(peer, outcome, Address(reply.host, reply.port), helper_at)

    async def _on_knock(self, raw: RawConnection, knock: bytes) -> None:
        expected = self._expected.get(knock)
        if expected is None:
            return
        expected.came_from = raw.remote
        try:
            await raw.stream.send_all(expected.answer)
            with trio.move_on_after(_DIAL_DEADLINE_S):
                await raw.stream.receive_some(1)  # closing first could take the answer with it
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _on_request(self, remote: PeerId, request: DialBackRequest) -> DialBackReply:
        seen = self._endpoint.seen_at(remote)
        if seen is None:
            raise Refusal("not-observed", "this peer sees you through a relay only")
        if self._dialling >= _MAX_AT_ONCE or not self._limiter.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")
        self._dialling += 1
        try:
            outcome = await self._dial(Address(seen.host, request.port), request)
        finally:
            self._dialling -= 1
        return DialBackReply(outcome, seen.host, seen.port)

    async def _dial(self, address: Address, request: DialBackRequest) -> Outcome:
        answer = b""
        try:
            with trio.fail_after(_DIAL_DEADLINE_S):
                raw = await self._transport.greet(address, _MAGIC, request.knock, _DIAL_DEADLINE_S)
                try:
                    answer = await receive_exactly(raw.stream, _SECRET_BYTES)
                finally:
                    await close_now(raw.stream)
        except (trio.TooSlowError, ConnectTimedOut):
            return Outcome.TIMED_OUT
        except ConnectionRefused:
            return Outcome.REFUSED
        except ConnectError:
            return Outcome.UNREACHABLE
        except trio.BrokenResourceError:
            return Outcome.STRANGER
        return Outcome.REACHED if secrets.compare_digest(answer, request.answer) else Outcome.STRANGER
