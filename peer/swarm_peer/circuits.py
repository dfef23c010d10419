"""Ways to peers that cannot be dialled: have them call back, or meet them through one of their relays.

A circuit is used at once. Meanwhile both ends try to open a direct connection simultaneously (`PUNCH`); if that
succeeds, new calls go there, and what is under way on the circuit goes on to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm_peer.addresses import Address, Contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.errors import ConnectError, PeerError, Refusal, Unreachable
from swarm_peer.identity import PeerId, short
from swarm_peer.raw import RawTransport, close_now
from swarm_peer.relay_entry import relays_of
from swarm_peer.relay_messages import (
    ASK_CALL_BACK,
    CALL_BACK,
    CIRCUIT_MAGIC,
    INVITE,
    OPEN_CIRCUIT,
    PUNCH,
    CallBack,
    CallBackRequest,
    CircuitRequest,
    Invitation,
    Nothing,
    receive_go,
)
from swarm_peer.routing import is_dialable
from swarm_peer.rpc import Caller
from swarm_peer.storage import RateLimiter
from swarm_peer.transport import Channel

logger = logging.getLogger("swarm_peer")

_RELAY_DEADLINE_S = 5.0
_JOIN_DEADLINE_S = 10.0
_CALL_BACK_S = 4.0
_CALL_BACK_HEAD_START_S = 1.0
_PUNCH_S = 6.0
_PUNCH_PAUSE_S = 60.0
_MAX_INCOMING = 32
_MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """The two ends of a circuit's sockets: ours as we bound it, the other's as the relay sees it."""

    local: Address
    other: Address


class Circuits:
    """Implements `Detour`. `relay_contact` tells the contact of a peer that relays for us: only those may invite us.

    `public_port` says at which port others can dial us, None if they cannot. Without `may_punch`, what begins on a
    circuit stays there. Relays are asked through `caller`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        transport: RawTransport,
        *,
        relay_contact: Callable[[PeerId], Contact | None],
        public_port: Callable[[], int | None] = lambda: None,
        local_allowed: Callable[[], bool] = lambda: True,
        may_punch: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._relay_contact = relay_contact
        self._public_port = public_port
        self._local_allowed = local_allowed
        self._may_punch = may_punch
        self.caller: Caller = endpoint
        self._rendezvous: dict[PeerId, _Rendezvous] = {}
        self._may_punch_at: dict[PeerId, float] = {}
        self._invitations = RateLimiter(rate_per_s=1.0, burst=16.0)
        self._incoming = 0
        self._nursery: trio.Nursery | None = None
        endpoint.handle(INVITE, self._on_invite)
        endpoint.handle(CALL_BACK, self._on_call_back)
        endpoint.handle(PUNCH, self._on_punch)
        endpoint.detour = self

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Takes part until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    # As dialer.

    async def dial(self, to: Contact, deadline_s: float) -> Channel:
        """See `Detour`."""
        relays = [relay for relay in relays_of(to) if relay.peer_id != self._endpoint.peer_id]
        connected = set(self._endpoint.connected())
        relays.sort(key=lambda relay: relay.peer_id not in connected)
        reasons: dict[str, None] = {}
        with trio.move_on_after(deadline_s):
            if (port := self._public_port()) is not None:
                await self._ask_to_be_called(relays, to, port)
            for relay in relays:
                try:
                    return await self._open(relay, to)
                except (PeerError, trio.BrokenResourceError) as error:
                    reasons[f"relay {short(relay.peer_id)}: {error}"] = None
                    logger.debug("no circuit to %s: %s", to, error)
                    if isinstance(error, Refusal) and error.code == "pair-busy":
                        await trio.sleep(_CALL_BACK_S)  # the other is dialling us: its connection cancels this
            if not relays:
                raise Unreachable(to, "it is known to no relay but this peer, and not connected to it")
            raise Unreachable(to, "; ".join(reasons))
        raise Unreachable(to, f"no way through its relays within {deadline_s:.0f} s")

    async def _ask_to_be_called(self, relays: list[Contact], to: Contact, port: int) -> None:
        """Has the peer dial us. Its connection, when it comes, cancels the dial."""
        for relay in relays:
            try:
                request = CallBackRequest(to.peer_id, port)
                await self.caller.call(relay, ASK_CALL_BACK, request, deadline_s=_RELAY_DEADLINE_S)
            except PeerError as error:
                logger.debug("%s is not asked to call back: %s", to, error)
                continue
            await trio.sleep(_CALL_BACK_HEAD_START_S)
            return

    async def _open(self, relay: Contact, to: Contact) -> Channel:
        """Raises `PeerError`, or `trio.BrokenResourceError` if the relay hangs up."""
        reply = await self.caller.call(relay, OPEN_CIRCUIT, CircuitRequest(to.peer_id), deadline_s=_RELAY_DEADLINE_S)
        channel = await self._join(relay, reply.token, PeerId(to.peer_id), is_client=True)
        if self._nursery is not None:
            self._nursery.start_soon(self._supervise_punch, to)
        return channel

    # As the one that is dialled.

    async def _on_invite(self, remote: PeerId, request: Invitation) -> Nothing:
        relay = self._relay_of_ours(remote)
        if self._incoming >= _MAX_INCOMING or self._nursery is None:
            raise Refusal("busy", "too many circuits are being opened")
        self._nursery.start_soon(self._accept, relay, request)
        return Nothing()

    async def _accept(self, relay: Contact, request: Invitation) -> None:
        dialer = PeerId(request.dialer)
        self._incoming += 1
        try:
            channel = await self._join(relay, request.token, dialer, is_client=False)
            await self._endpoint.take(channel, is_dialer=False, is_relayed=True)
        except (PeerError, trio.BrokenResourceError) as error:
            logger.info("no circuit with %s: %s", short(dialer), error)
        except Exception:
            logger.exception("a circuit with %s failed", short(dialer))
        finally:
            self._incoming -= 1

    async def _on_call_back(self, remote: PeerId, request: CallBack) -> Nothing:
        self._relay_of_ours(remote)
        if not is_dialable(request.address, local_allowed=self._local_allowed()):
            raise Refusal("not-dialable")
        if self._incoming >= _MAX_INCOMING or self._nursery is None:
            raise Refusal("busy", "too many circuits are being opened")
        self._nursery.start_soon(self._call_back, request)
        return Nothing()

    async def _call_back(self, request: CallBack) -> None:
        dialer = PeerId(request.dialer)
        self._incoming += 1
        try:
            channel = await self._transport.dial(request.address, dialer, _CALL_BACK_S)
            await self._endpoint.take(channel, is_dialer=True, is_relayed=False)
        except PeerError as error:
            logger.info("cannot call back %s: %s", short(dialer), error)
        except Exception:
            logger.exception("calling back %s failed", short(dialer))
        finally:
            self._incoming -= 1

    def _relay_of_ours(self, remote: PeerId) -> Contact:
        relay = self._relay_contact(remote)
        if relay is None:
            raise Refusal("not-my-relay")
        if not self._invitations.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")
        return relay

    # Both.

    async def _join(self, relay: Contact, token: bytes, other: PeerId, *, is_client: bool) -> Channel:
        """Opens our end of a circuit. Raises `PeerError` or `trio.BrokenResourceError`."""
        deadline = trio.current_time() + _JOIN_DEADLINE_S
        failure: ConnectError = Unreachable(relay, "no address")
        for address in relay.addresses:
            try:
                raw = await self._transport.greet(address, CIRCUIT_MAGIC, token, _RELAY_DEADLINE_S)
                break
            except ConnectError as error:
                failure = error
        else:
            raise failure
        try:
            with trio.fail_at(deadline):
                go = await receive_go(raw.stream)
        except trio.TooSlowError:
            await close_now(raw.stream)
            raise Unreachable(relay, "the other end did not come") from None
        except BaseException:
            await close_now(raw.stream)
            raise
        left_s = max(0.1, deadline - trio.current_time())
        channel = await self._transport.upgrade(raw, other, is_client=is_client, deadline_s=left_s)
        self._remember(other, _Rendezvous(raw.local, go.other))
        return channel

    def _remember(self, other: PeerId, rendezvous: _Rendezvous) -> None:
        self._rendezvous.pop(other, None)
        self._rendezvous[other] = rendezvous
        while len(self._rendezvous) > _MAX_REMEMBERED:
            del self._rendezvous[next(iter(self._rendezvous))]

    # Simultaneous open.

    async def _supervise_punch(self, to: Contact) -> None:
        try:
            await self._punch(to)
        except PeerError as error:
            logger.info("no direct connection to %s: %s", short(to.peer_id), error)
        except Exception:
            logger.exception("the way to %s was not shortened", short(to.peer_id))

    async def _punch(self, to: Contact) -> None:
        other = PeerId(to.peer_id)
        rendezvous = self._begin_punch(other)
        if rendezvous is None:
            return
        await self._endpoint.call(Contact(other, to.addresses), PUNCH, Nothing(), deadline_s=_RELAY_DEADLINE_S)
        await self._meet(other, rendezvous, is_client=True)

    async def _on_punch(self, remote: PeerId, request: Nothing) -> Nothing:
        rendezvous = self._begin_punch(remote)
        if rendezvous is None or self._nursery is None:
            raise Refusal("not-now", "no circuit, or a try a short while ago")
        self._nursery.start_soon(self._answer_punch, remote, rendezvous)
        return Nothing()

    async def _answer_punch(self, remote: PeerId, rendezvous: _Rendezvous) -> None:
        try:
            await self._meet(remote, rendezvous, is_client=False)
        except PeerError as error:
            logger.info("no direct connection to %s: %s", short(remote), error)
        except Exception:
            logger.exception("the way to %s was not shortened", short(remote))

    def _begin_punch(self, other: PeerId) -> _Rendezvous | None:
        """The addresses to use, at most once a minute per peer, and only where the policy allows to dial there."""
        now = trio.current_time()
        rendezvous = self._rendezvous.pop(other, None)
        if rendezvous is None or not self._may_punch or self._may_punch_at.get(other, now) > now:
            return None
        if not is_dialable(rendezvous.other, local_allowed=self._local_allowed()):
            return None
        self._may_punch_at = {peer: at for peer, at in self._may_punch_at.items() if at > now}
        self._may_punch_at[other] = now + _PUNCH_PAUSE_S
        return rendezvous

    async def _meet(self, other: PeerId, rendezvous: _Rendezvous, *, is_client: bool) -> None:
        raw = await self._transport.meet(rendezvous.local, rendezvous.other, _PUNCH_S)
        channel = await self._transport.upgrade(raw, other, is_client=is_client, deadline_s=_PUNCH_S)
        if await self._endpoint.take(channel, is_dialer=is_client, is_relayed=False):
            logger.info("connected to %s directly", short(other))
