"""The gate of a run: what only members may call, and how members prove to each other that they are.

A `Gate` is a `Caller` over another one. Methods registered on it answer members alone; a call through it first shows
the remote our certificates and checks the remote's, once per remote and process. A peer that has forgotten us says
`not-introduced`, and we show them again. Runs that are open pass straight through.

The gate also spreads the creator's list of revocations: at once to everybody when it changes, and to one random
member each interval in case that was missed.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, Final

import msgspec
import trio

from swarm_peer.addresses import Contact, PeerIdBytes
from swarm_peer.admission import Admission
from swarm_peer.certificates import DENIALS, NOT_INTRODUCED, REVOKED, AdmissionMode, Revocations, WireChain
from swarm_peer.errors import DeadlineExpired, NotAMember, PeerError, Refusal
from swarm_peer.identity import PeerId, short
from swarm_peer.records import Seq
from swarm_peer.rpc import Caller, Handler, Method, Priority, Q, R
from swarm_peer.storage import RateLimiter

logger = logging.getLogger("swarm_peer")

_MAX_INTRODUCED: Final = 16_384
_CHAINS_CAP: Final = 32
_FLOOD: Final = 64
_AT_ONCE: Final = 8
_SHORT_DEADLINE_S: Final = 5.0


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Request and reply: our certificates, and the number of our list of revocations."""

    chain: WireChain
    seq: Seq


class News(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Request and reply: the number of our list of revocations, and the list where the other may lack it."""

    seq: Seq
    revocations: Revocations | None


class ChainsRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the certificates of other members, of whom the remote has told us."""

    peer_ids: Annotated[tuple[PeerIdBytes, ...], msgspec.Meta(max_length=_CHAINS_CAP)]


class ChainsReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the remote has of them, in the order of the question; empty where it has none."""

    chains: Annotated[tuple[WireChain, ...], msgspec.Meta(max_length=_CHAINS_CAP)]


class GuardedCaller:
    """A `Caller` whose handlers answer only what `guard(remote, request)` does not refuse."""

    def __init__(self, caller: Caller, guard: Callable[[PeerId, Any], None]) -> None:
        self._caller = caller
        self._guard = guard

    @property
    def peer_id(self) -> PeerId:
        """Our own peer id."""
        return self._caller.peer_id

    def handle(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """As `Caller.handle`; the guard raises `Refusal` to keep somebody out."""

        async def guarded(remote: PeerId, request: Q) -> R:
            self._guard(remote, request)
            return await handler(remote, request)

        self._caller.handle(method, guarded)

    async def call(self, to: Contact, method: Method[Q, R], request: Q, *, deadline_s: float = 5.0) -> R:
        """As `Caller.call`."""
        return await self._caller.call(to, method, request, deadline_s=deadline_s)

    def stream(
        self, to: Contact, method: Method[Q, bytes], request: Q, *, deadline_s: float = 60.0, lane: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """As `Caller.stream`."""
        return self._caller.stream(to, method, request, deadline_s=deadline_s, lane=lane)

    def rtt_s(self, peer_id: PeerId) -> float | None:
        """As `Caller.rtt_s`."""
        return self._caller.rtt_s(peer_id)


class Gate(GuardedCaller):
    """See the module. `clock` gives wall-clock seconds.

    `on_news` gets each new list of revocations, `on_out` the ids of the peers that are out with it, and `on_expelled`
    is called when the creator's own signature says that we are.
    """

    def __init__(
        self,
        caller: Caller,
        admission: Admission,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.time,
        interval_s: float = 5.0,
    ) -> None:
        super().__init__(caller, lambda remote, request: self.check(remote))
        self.admission = admission
        self._rng = rng
        self._clock = clock
        self._interval_s = interval_s
        self._introduced: OrderedDict[bytes, None] = OrderedDict()
        self._meeting: dict[bytes, trio.Event] = {}
        self._limiter = RateLimiter(rate_per_s=2.0, burst=20.0)
        self._has_news = trio.Event()
        self.on_news: Callable[[Revocations], None] = lambda revocations: None
        self.on_out: Callable[[frozenset[bytes]], None] = lambda peer_ids: None
        self.on_expelled: Callable[[], None] = lambda: None
        run = admission.charter.run_id.hex()[:32]
        self._hello = Method(f"admission.hello.{run}", Hello, Hello, 8192, 8192, Priority.CONTROL)
        self._news = Method(f"admission.news.{run}", News, News, priority=Priority.CONTROL)
        self._chains = Method(f"admission.chains.{run}", ChainsRequest, ChainsReply, 2048, 160 * 1024, Priority.CONTROL)
        if not self.is_open:
            caller.handle(self._hello, self._on_hello)
            caller.handle(self._news, self._on_news)
            self.handle(self._chains, self._on_chains)

    @property
    def is_open(self) -> bool:
        """Whether everybody may come in."""
        return self.admission.charter.mode is AdmissionMode.OPEN

    def check(self, remote: bytes) -> None:
        """Raises `Refusal` unless `remote` is in."""
        self.admission.require(remote, self._clock())

    def has(self, remote: bytes) -> bool:
        """Whether `remote` is in, as far as is known here."""
        return self.admission.is_admitted(remote, self._clock())

    async def call(self, to: Contact, method: Method[Q, R], request: Q, *, deadline_s: float = 5.0) -> R:
        """As `Caller.call`, after an introduction within the same deadline.

        Raises `NotAMember` too, if it is the remote that is not in the run.
        """
        if self.is_open:
            return await self._caller.call(to, method, request, deadline_s=deadline_s)
        deadline = trio.current_time() + deadline_s
        for is_last in (False, True):
            await self.introduce(to, deadline_s=_left_s(deadline))
            try:
                return await self._caller.call(to, method, request, deadline_s=_left_s(deadline))
            except Refusal as error:
                if is_last or error.code != NOT_INTRODUCED:
                    await self._hear_denial(to, error)
                    raise
                self._introduced.pop(to.peer_id, None)
        raise AssertionError

    @asynccontextmanager
    async def stream(
        self, to: Contact, method: Method[Q, bytes], request: Q, *, deadline_s: float = 60.0, lane: int = 0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """As `Caller.stream`, after an introduction.  Raises as `call`; a remote that has forgotten us refuses once."""
        deadline = trio.current_time() + deadline_s
        await self.introduce(to, deadline_s=deadline_s)
        try:
            async with self._caller.stream(to, method, request, deadline_s=_left_s(deadline), lane=lane) as parts:
                yield parts
        except Refusal as error:
            if error.code == NOT_INTRODUCED:
                self._introduced.pop(to.peer_id, None)
            raise

    async def introduce(self, to: Contact, *, deadline_s: float = 5.0) -> None:
        """Shows our certificates and checks the remote's, if that has not been done.

        Raises `NotAMember` if it is not in, `Refusal` if it says that we are not, else as `Caller.call`.
        """
        remote = to.peer_id
        deadline = trio.current_time() + deadline_s
        while (meeting := self._meeting.get(remote)) is not None:
            with trio.move_on_at(deadline) as scope:
                await meeting.wait()
            if scope.cancelled_caught:
                raise DeadlineExpired(f"peer {to} did not introduce itself within {deadline_s:.1f} s")
        if self.admission.needs_introduction and remote not in self._introduced and not self.is_open:
            done = self._meeting[remote] = trio.Event()
            try:
                await self._say_hello(to, _left_s(deadline))
            finally:
                del self._meeting[remote]
                done.set()
        try:
            self.check(remote)
        except Refusal as error:
            raise NotAMember(remote, error.code, error.detail) from None

    async def _say_hello(self, to: Contact, deadline_s: float) -> None:
        hello = Hello(self.admission.chain, self.admission.seq)
        try:
            reply = await self._caller.call(to, self._hello, hello, deadline_s=deadline_s)
        except Refusal as error:
            await self._hear_denial(to, error)
            raise
        try:
            self.admission.admit(to.peer_id, reply.chain, self._clock())
        except Refusal as error:
            raise NotAMember(to.peer_id, error.code, error.detail) from None
        self._introduced[to.peer_id] = None
        if len(self._introduced) > _MAX_INTRODUCED:
            self._introduced.popitem(last=False)
        if reply.seq > self.admission.seq:
            await self._ask_news(to)

    async def _hear_denial(self, to: Contact, error: Refusal) -> None:
        """One peer's word does not end our part: that we were revoked, the creator's signature must say."""
        if error.code in DENIALS:
            logger.info("peer %s keeps us out: %s", short(to.peer_id), error)
        if error.code == REVOKED:
            await self._ask_news(to)

    async def vouch(self, peer_ids: Iterable[PeerId], sender: PeerId) -> frozenset[PeerId]:
        """Which of some peers are in; of those that we do not know, `sender` is asked for their certificates."""
        own = {self.peer_id}  # what others tell of us is for the caller to judge
        wanted = list(dict.fromkeys(peer_id for peer_id in peer_ids if peer_id != self.peer_id))
        if not self.is_open and self.admission.needs_introduction:
            unknown = [peer_id for peer_id in wanted if not self.has(peer_id)][:_CHAINS_CAP]
            if unknown:
                await self._ask_chains(unknown, sender)
        return frozenset(own.union(peer_id for peer_id in wanted if self.has(peer_id)))

    async def _ask_chains(self, peer_ids: Sequence[PeerId], sender: PeerId) -> None:
        request = ChainsRequest(tuple(peer_ids))
        try:
            reply = await self.call(Contact(sender, ()), self._chains, request, deadline_s=_SHORT_DEADLINE_S)
        except PeerError as error:
            logger.debug("peer %s does not vouch: %s", short(sender), error)
            return
        for peer_id, chain in zip(peer_ids, reply.chains, strict=False):
            await trio.lowlevel.checkpoint()  # a signature takes 0.2 ms
            try:
                self.admission.admit(peer_id, chain, self._clock())
            except Refusal as error:
                logger.debug("peer %s is kept out: %s", short(peer_id), error)

    # The list of revocations.

    def take_news(self, revocations: Revocations) -> bool:
        """Takes a list of revocations from anywhere. True if it was news."""
        out = self.admission.take(revocations)
        if out is None:
            return False
        logger.info("list %d of revocations: %d ids", revocations.seq, len(revocations.revoked))
        for peer_id in out:
            self._introduced.pop(peer_id, None)
        self.on_news(revocations)
        self.on_out(out)
        self._has_news.set()
        if out & {self.peer_id, *(link.subject for link in self.admission.chain)}:
            self.on_expelled()
        return True

    async def run(self, contacts: Callable[[], list[Contact]]) -> None:
        """Spreads news to `contacts()` until cancelled."""
        if self.is_open:
            return
        while True:
            with trio.move_on_after(self._interval_s * self._rng.uniform(0.8, 1.2)):
                await self._has_news.wait()
            known = contacts()
            if self._has_news.is_set():
                self._has_news = trio.Event()
                await self.spread(self._rng.sample(known, min(len(known), _FLOOD)))
            elif known:
                await self._ask_news(self._rng.choice(known))

    async def spread(self, contacts: Sequence[Contact]) -> int:
        """Tells our list to some peers; returns how many have it now, or a newer one."""
        limit = trio.CapacityLimiter(_AT_ONCE)
        told = 0

        async def tell(contact: Contact) -> None:
            nonlocal told
            async with limit:
                told += await self._ask_news(contact)

        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(tell, contact)
        return told

    async def _ask_news(self, to: Contact) -> bool:
        """Exchanges lists with a peer: both have the newer one afterwards. False if it did not answer."""
        try:
            request = News(self.admission.seq, None)
            reply = await self._caller.call(to, self._news, request, deadline_s=_SHORT_DEADLINE_S)
            if reply.revocations is not None:
                self.take_news(reply.revocations)
            elif reply.seq < self.admission.seq:
                request = News(self.admission.seq, self.admission.revocations)
                await self._caller.call(to, self._news, request, deadline_s=_SHORT_DEADLINE_S)
        except PeerError as error:
            logger.debug("no news of revocations from %s: %s", to, error)
            return False
        return True

    # What others ask of us.

    async def _on_hello(self, remote: PeerId, request: Hello) -> Hello:
        self._ration(remote)
        if self.admission.needs_introduction:
            self.admission.admit(remote, request.chain, self._clock())
        self.check(remote)
        if request.seq > self.admission.seq:
            await self._ask_news(Contact(remote, ()))
            self.check(remote)
        return Hello(self.admission.chain, self.admission.seq)

    async def _on_news(self, remote: PeerId, request: News) -> News:
        """A list is signed, so anyone may bring it. Members get it, and whoever it concerns."""
        self._ration(remote)
        if request.revocations is not None:
            self.take_news(request.revocations)
        held = self.admission.revocations
        is_told = request.seq < self.admission.seq and self.admission.may_read(remote, self._clock())
        return News(self.admission.seq, held if is_told else None)

    async def _on_chains(self, remote: PeerId, request: ChainsRequest) -> ChainsReply:
        return ChainsReply(tuple(self.admission.chain_of(peer_id) or () for peer_id in request.peer_ids))

    def _ration(self, remote: PeerId) -> None:
        if not self._limiter.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - trio.current_time())
