"""Who else is in the run: spreads signed records by gossip, and finds the first contacts by discovery.

Every `interval_s` a peer compares notes with two random members: both tell what is new to them, and digests show what
else the other lacks (push-pull anti-entropy, Demers et al., 1987). News of a peer of its own goes out at once. Whoever
is silent for the life of its record is lost, in everybody's eyes and without anybody's vote.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from swarm_peer.addresses import MAX_ADDRESSES, Address, Contact
from swarm_peer.background import supervise
from swarm_peer.discovery import Discovery
from swarm_peer.errors import PeerError, RecordInvalid, Refusal
from swarm_peer.identity import Identity, PeerId, short
from swarm_peer.members import (
    Digest,
    Member,
    MemberTable,
    Merge,
    member_of,
)
from swarm_peer.members import MembershipParams as MembershipParams
from swarm_peer.membership_messages import (
    PAGE,
    Exchange,
    ExchangeReply,
    ListReply,
    ListRequest,
    TradeReply,
    methods_of,
)
from swarm_peer.membership_messages import Trade as Trade
from swarm_peer.records import (
    AGE_CAP_MS,
    SEQ_CAP,
    AgedRecord,
    PeerPayload,
    PeerState,
    SignedRecord,
    decode_peer,
    encode_payload,
    make_record,
    members_key,
    peers_key,
)
from swarm_peer.routing import is_local
from swarm_peer.rpc import Caller
from swarm_peer.storage import RateLimiter

logger = logging.getLogger("swarm_peer")

_DHT_TTL_S: Final = 1200
# Above a former life of ours by enough that none of its records still on their way comes near.
_SEQ_JUMP: Final = 1024
_SALT_DOMAIN: Final = "swarmtrain-view-salt-v1"
_LISTED_CAP: Final = 10_000
# For a peer that knows nobody alive: how much sooner it tries again, whom it remembers, how many it tries at once.
ALONE_PACE: Final = 0.4
MET_CAP: Final = 64
ALONE_FANOUT: Final = 4


Vouch = Callable[[Iterable[PeerId], PeerId], Awaitable[frozenset[PeerId]]]
"""Which of some authors of records are in the run; the second argument is who sent the records."""


class Membership:
    """Our place in one run, and our view of the others. `addresses` is where we can be dialled. Records of peers
    for which `vouch` does not vouch are left out.

    `on_duplicate` is called once if another running process turns out to use our identity.
    """

    def __init__(
        self,
        endpoint: Caller,
        identity: Identity,
        run_id: bytes,
        *,
        discovery: Discovery,
        rng: random.Random,
        addresses: Iterable[Address] = (),
        params: MembershipParams | None = None,
        vouch: Vouch | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._vouch = vouch
        self._identity = identity
        self._run_id = run_id
        self._discovery = discovery
        self._rng = rng
        self._params = params or MembershipParams()
        self._addresses = tuple(addresses)[:MAX_ADDRESSES]
        # A signature that nobody sees is a secret that needs no file and survives a restart.
        salt = identity.sign(_SALT_DOMAIN, run_id)
        self._table = MemberTable(identity.peer_id, run_id, self._params, rng, salt)
        self._table.local_allowed = not self._addresses or any(is_local(a.host) for a in self._addresses)
        self._exchange, self._trade, self._list = methods_of(run_id)
        self._limiter = RateLimiter(rate_per_s=5.0, burst=100.0)
        self._state = PeerState.WATCHING
        self._status = b""
        self._seq = 0
        self._signed_at = -float("inf")
        self._started_at: float | None = None
        self._own: SignedRecord | None = None
        self._has_news = trio.Event()
        self._has_moved = trio.Event()
        self._shunned: dict[bytes, tuple[float, int]] = {}  # until, after how many failures
        self._met: dict[bytes, Contact] = {}  # kept when the table has forgotten them; those met last come last
        self._has_left = False
        self._reported_duplicate = False
        self.on_duplicate: Callable[[], None] | None = None
        self.invalid: Counter[PeerId] = Counter()  # invalid records by who sent them
        endpoint.handle(self._exchange, self._on_exchange)
        endpoint.handle(self._trade, self._on_trade)
        endpoint.handle(self._list, self._on_list)

    # What the owner calls.

    def publish(self, state: PeerState, status: bytes) -> None:
        """States what we do: a change of `state` goes out at once, one of `status` alone within an interval or so.

        `status` has at most 512 bytes; raises `RecordInvalid` beyond that. Without effect after `goodbye`.
        """
        encode_payload(PeerPayload(self._run_id, self._addresses, state, status))
        if self._has_left:
            return
        has_new_state = state is not self._state or self._own is None
        self._state, self._status = state, status
        if has_new_state or self._may_renew(trio.current_time()):
            self._sign()

    def move(self, addresses: Iterable[Address]) -> None:
        """States where we can be reached from now on; goes out at once."""
        moved = tuple(addresses)[:MAX_ADDRESSES]
        if moved == self._addresses or self._has_left:
            return
        self._addresses = moved
        if self._own is not None:
            self._sign()
            self._has_moved.set()

    def members(self) -> list[Member]:
        """Everybody else that we know of, those that left or were lost included."""
        return self._table.members(trio.current_time())

    def live(self) -> list[Member]:
        """The members that are there as far as we know."""
        return [member for member in self.members() if member.is_live]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Gossips until cancelled."""
        self._start()
        async with trio.open_nursery() as nursery:
            for task in (self._keep_gossiping, self._keep_pushing, self._keep_in_touch):
                nursery.start_soon(supervise, task, "membership")
            task_status.started()

    def forget(self, peer_ids: Iterable[bytes]) -> None:
        """Drops all that is known of some peers, because they are not in the run any more."""
        self._table.forget(peer_ids)

    async def goodbye(self) -> None:
        """Tells some members and the discovery that we leave. Takes at most `goodbye_s`, also when cancelled."""
        if self._has_left:
            return
        self._has_left = True
        self._state = PeerState.LEFT
        self._sign()
        with trio.move_on_after(self._params.goodbye_s, shield=True):
            async with trio.open_nursery() as nursery:
                for member in self._choose(8):
                    nursery.start_soon(self._push, member.contact)
                nursery.start_soon(self._announce)

    # Our own record.

    def _start(self) -> None:
        if self._started_at is None:
            self._started_at = trio.current_time()
        if self._own is None:
            self._sign()

    def _sign(self) -> None:
        """Makes our next record and has it pushed."""
        now = trio.current_time()
        if self._started_at is None:
            self._started_at = now
        self._seq = min(self._seq + 1, SEQ_CAP)
        ttl_s = self._params.left_ttl_s if self._state is PeerState.LEFT else self._table.lifetime_s(now)
        self._own = make_record(self._identity, "peer", members_key(self._run_id), self._seq, ttl_s, self._payload())
        self._signed_at = now
        self._table.put_own(self._own, now)
        self._has_news.set()

    def _payload(self) -> bytes:
        return encode_payload(PeerPayload(self._run_id, self._addresses, self._state, self._status))

    def _may_renew(self, now: float) -> bool:
        """True if a new status is due: often in a small swarm, seldom in a large one, as all must carry it."""
        scale = self._table.lifetime_s(now) / self._params.ttl_s
        return now - self._signed_at >= 0.9 * self._params.interval_s * scale

    def _must_renew(self, now: float) -> bool:
        if self._own is None or self._has_left:
            return self._own is None
        is_stale = decode_peer(self._own).status != self._status and self._may_renew(now)
        return is_stale or now - self._signed_at >= self._own.ttl_s / 3

    def _on_own_record(self, aged: AgedRecord) -> None:
        """Somebody has a record of ours. If this process did not sign it, we go above it.

        If it was made after this process began, another process is at work with our key: that is reported once.
        """
        record, now = aged.record, trio.current_time()
        if self._own is None or record.seq < self._seq or record.content_hash() == self._own.content_hash():
            return
        born_at = now - aged.age_s
        began = self._started_at if self._started_at is not None else now
        if aged.age_ms < AGE_CAP_MS and born_at > began + 5.0 and not self._reported_duplicate:
            self._reported_duplicate = True
            logger.warning(
                "another process runs with this peer's identity %s; give each its own key file",
                short(self._identity.peer_id),
            )
            if self.on_duplicate:
                self.on_duplicate()
        self._seq = min(record.seq + _SEQ_JUMP, SEQ_CAP)
        self._sign()

    # Background.

    async def _keep_gossiping(self) -> None:
        while True:
            # Whoever is alone has nobody to burden, and wants to know at once when the link is back.
            pace = 1.0 if self.live() else ALONE_PACE
            await trio.sleep(pace * self._params.interval_s * self._rng.uniform(0.8, 1.2))
            now = trio.current_time()
            self._table.expire(now)
            self._shunned = {p: shun for p, shun in self._shunned.items() if shun[0] + 120 > now}
            if self._must_renew(now):
                self._sign()
            async with trio.open_nursery() as nursery:
                for contact in self._partners():
                    nursery.start_soon(self._meet, contact)

    def _partners(self) -> list[Contact]:
        """Whom to meet next. If everybody seems lost, it is likely we who were cut off: then those are tried."""
        partners = [member.contact for member in self._choose(self._params.fanout)]
        lost = [m.contact for m in self.members() if m.state == "lost"]
        if not partners:
            former = {contact.peer_id: contact for contact in [*self._met.values(), *lost]}
            return self._rng.sample(list(former.values()), min(ALONE_FANOUT, len(former)))
        if lost and self._rng.random() < 0.1:
            partners.append(self._rng.choice(lost))
        return partners

    async def _keep_pushing(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news = trio.Event()
            async with trio.open_nursery() as nursery:
                for member in self._choose(self._params.push_fanout):
                    nursery.start_soon(self._push, member.contact)
            await trio.sleep(self._params.interval_s / 10)

    async def _keep_in_touch(self) -> None:
        """Announces us, and asks the discovery for peers: often while alone, seldom else."""
        await self._announce()
        attempt = 0
        while True:
            await self._discover()
            attempt = 0 if self.live() else attempt + 1
            first, longest = self._params.retry_s
            wait_s = self._params.discovery_s if self.live() else min(longest, first * float(2 ** min(attempt, 16)))
            with trio.move_on_after(wait_s * self._rng.uniform(0.8, 1.2)):
                await self._has_moved.wait()
                self._has_moved = trio.Event()
                await self._announce()

    async def _announce(self) -> None:
        record = make_record(self._identity, "peer", peers_key(self._run_id), self._seq, _DHT_TTL_S, self._payload())
        try:
            await self._discovery.announce_peer(record)
        except PeerError as error:
            logger.info("cannot announce this peer: %s", error)

    async def _discover(self) -> None:
        """Meets some of the peers that the discovery knows and we do not."""
        try:
            records = await self._discovery.find_peers(self._run_id)
        except PeerError as error:
            logger.info("cannot ask for peers: %s", error)
            return
        known = {member.contact.peer_id for member in self.live()} | {self._identity.peer_id}
        unknown = [record for record in records if record.author() not in known][:16]
        chosen = self._rng.sample(unknown, min(len(unknown), 2 if len(known) > 1 else 8))
        async with trio.open_nursery() as nursery:
            for record in chosen:
                addresses = decode_peer(record).addresses
                nursery.start_soon(self._meet, Contact(record.author(), addresses))

    def _choose(self, count: int) -> list[Member]:
        """Random live members, those that did not answer lately only if there are no others."""
        now = trio.current_time()
        live = [member for member in self.live() if member.contact.peer_id != self._identity.peer_id]
        willing = [m for m in live if self._shunned.get(m.contact.peer_id, (now, 0))[0] <= now]
        pool = willing or live
        return self._rng.sample(pool, min(count, len(pool)))

    async def _meet(self, contact: Contact) -> None:
        """One whole meeting. A partner that fails is left alone for a while."""
        deadline_s = self._params.rpc_deadline_s
        digests, is_complete = self._table.digests(trio.current_time())
        request = Exchange(digests, is_complete, self._table.rumours(trio.current_time()))
        try:
            reply = await self._endpoint.call(contact, self._exchange, request, deadline_s=deadline_s)
            await self._take(reply.records, PeerId(contact.peer_id))
            now = trio.current_time()
            trade = Trade(self._table.records_of(reply.wants, now), self._table.wanted(reply.digests, now))
            if trade.records or trade.wants:
                answer = await self._endpoint.call(contact, self._trade, trade, deadline_s=deadline_s)
                await self._take(answer.records, PeerId(contact.peer_id))
        except PeerError as error:
            self._shun(contact, error)
        else:
            self._shunned.pop(contact.peer_id, None)
            self._met.pop(contact.peer_id, None)
            self._met[contact.peer_id] = contact
            if len(self._met) > MET_CAP:
                del self._met[next(iter(self._met))]

    async def _push(self, contact: Contact) -> None:
        """Tells our own record."""
        request = Trade(self._table.records_of([self._identity.peer_id], trio.current_time()), ())
        try:
            reply = await self._endpoint.call(contact, self._trade, request, deadline_s=self._params.rpc_deadline_s)
            await self._take(reply.records, PeerId(contact.peer_id))
        except PeerError as error:
            self._shun(contact, error)

    def _shun(self, contact: Contact, error: PeerError) -> None:
        logger.debug("gossip with %s failed: %s", contact, error)
        _, failures = self._shunned.get(contact.peer_id, (0.0, 0))
        pause_s = min(60.0, self._params.interval_s * 2.0 ** min(failures, 8))
        self._shunned[contact.peer_id] = (trio.current_time() + pause_s, failures + 1)

    async def _take(self, records: Iterable[AgedRecord], sender: PeerId) -> None:
        """Merges what a member sent. Raises `RecordInvalid` at the first invalid record."""
        if self._vouch is not None:
            records = list(records)
            known = await self._vouch({aged.record.author() for aged in records}, sender)
            records = [aged for aged in records if aged.record.author() in known]
        for number, aged in enumerate(records):
            if number % 8 == 7:
                await trio.lowlevel.checkpoint()  # signatures take 0.2 ms each
            try:
                if self._table.merge(aged, sender, trio.current_time()) is Merge.OURS:
                    self._on_own_record(aged)
            except RecordInvalid:
                if len(self.invalid) < 1024 or sender in self.invalid:
                    self.invalid[sender] += 1
                raise

    # What others ask of us.

    async def _on_exchange(self, remote: PeerId, request: Exchange) -> ExchangeReply:
        await self._accept(remote, request.records)
        now = trio.current_time()
        records = self._table.newer_than(request.digests, request.is_complete, remote, now)
        digests, _ = self._table.digests(now)
        # What the other has of us is settled by its reply to ours; what it lacks is in `records` already.
        return ExchangeReply(records, self._table.wanted(request.digests, now), digests)

    async def _on_trade(self, remote: PeerId, request: Trade) -> TradeReply:
        await self._accept(remote, request.records)
        now = trio.current_time()
        told = tuple(Digest(remote, aged.record.seq) for aged in request.records if aged.record.author() == remote)
        outdated = self._table.newer_than(told[:1], False, remote, now)
        room = self._params.records - len(outdated)
        return TradeReply(outdated + self._table.records_of(request.wants, now)[:room])

    async def _on_list(self, remote: PeerId, request: ListRequest) -> ListReply:
        self._admit(remote)
        return ListReply(len(self._table), self._table.page(request.after, PAGE, trio.current_time()))

    async def _accept(self, remote: PeerId, records: Iterable[AgedRecord]) -> None:
        self._admit(remote)
        try:
            await self._take(records, remote)
        except RecordInvalid as error:
            raise Refusal("invalid-record", error.reason) from None

    def _admit(self, remote: PeerId) -> None:
        if not self._limiter.allow(remote, trio.current_time()):
            raise Refusal("rate-limited")


async def list_members(caller: Caller, contact: Contact, run_id: bytes, *, deadline_s: float = 5.0) -> list[Member]:
    """Asks any member of a run for all that it knows, itself included: what a monitor shows.

    Every record is verified. `deadline_s` holds for each page of 40. Raises as `Caller.call`, and `RecordInvalid` if
    the member answers with forged records.
    """
    _, _, method = methods_of(run_id)
    found: list[Member] = []
    after = b""
    while len(found) < _LISTED_CAP:
        reply = await caller.call(contact, method, ListRequest(after), deadline_s=deadline_s)
        for aged in reply.records:
            if aged.record.key != members_key(run_id):
                raise RecordInvalid("wrong-key")
            aged.record.verify()
            found.append(member_of(aged, decode_peer(aged.record)))
        last = reply.records[-1].record.author() if reply.records else b""
        if len(reply.records) < PAGE or last <= after:
            break
        after = last
    return found
