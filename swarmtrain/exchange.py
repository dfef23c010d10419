"""The exchange: one meeting of two peers in which both mix their replicas.

    initiator                                   responder
    round closed, snapshot S_i
    open(offer_i)                ----------->   free?  close the round at the next step boundary: S_j
                                 <-----------   offer_j, payload_j
    settle on a base, encode
    commit(payload_i)            ----------->   fetch S_i, verify, judge
    fetch S_j, verify, judge     <-----------   committed
    apply(session)               ----------->   mix(D = S_i - S_j)
    mix(D = S_j - S_i)           <-----------   applied

An initiator that gives up says so with `cancel`; one that vanishes is waited for no longer than a stage may take.

Invariants.  At most one session per peer: a busy peer refuses at once, nobody queues.  Both sides use the same pair
of snapshots, so D is matched.  Nothing is applied before it is verified and judged, and nothing twice.  A session
that breaks anywhere changes no state, but for one case: when the last reply is lost, one side has mixed and the other
has not.  That moves the swarm's mean once by w D / N in no preferred direction, which is tolerated; agreement by a
second phase would make peers wait for each other.

What a session holds is in `exchange_session`, the fetching and judging in `snapshot_swap`.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio
from swarm_peer.addresses import Contact
from swarm_peer.blobs import Offload
from swarm_peer.errors import PeerError, ProtocolError, Refusal
from swarm_peer.rpc import Caller

from swarmtrain.exchange_messages import (
    APPLY,
    CANCEL,
    COMMIT,
    OPEN,
    ApplyRequest,
    CancelRequest,
    CommitRequest,
    Done,
    OpenReply,
    OpenRequest,
)
from swarmtrain.exchange_session import (
    Blobs,
    ExchangeConfig,
    ExchangeFailed,
    Partners,
    Report,
    Session,
    Stage,
    reason_of,
)
from swarmtrain.partner_choice import choose_partner
from swarmtrain.partner_standing import PartnerStanding
from swarmtrain.round_pace import RoundPace
from swarmtrain.snapshot_swap import SnapshotSwap
from swarmtrain.snapshots import Payload, PayloadInvalid, Snapshot, SnapshotLibrary
from swarmtrain.staleness import Staleness
from swarmtrain.trainer_link import ClosedRound, TrainerGone, TrainerPort

logger = logging.getLogger("swarmtrain.exchange")

CANCEL_DEADLINE_S = 2.0
MAX_COUNTED_OUTCOMES = 64  # strangers choose the refusal codes that we count


class Exchanger:
    """Runs this peer's exchanges, one at a time, as initiator and as responder."""

    def __init__(
        self,
        caller: Caller,
        *,
        config: ExchangeConfig,
        trainer: TrainerPort,
        partners: Partners,
        blobs: Blobs,
        library: SnapshotLibrary,
        rng: random.Random,
        offload: Offload,
        preference: Callable[[Contact], float] = lambda partner: 1.0,
    ) -> None:
        self._caller = caller
        self._config = config
        self._trainer = trainer
        self._partners = partners
        self._rng = rng
        self._preference = preference
        self._busy = False
        self._incoming: Session | None = None
        self._last_mix_s = self._last_call_s = float("-inf")
        self._last_round = 0
        self._pace = RoundPace()
        self.staleness = Staleness(config, partners, self._pace)
        self._snapshots = SnapshotSwap(config, blobs=blobs, library=library, staleness=self.staleness, offload=offload)
        self._standing = PartnerStanding(self._pace, backoff_s=config.backoff_s)
        self._closing_for_partner = False
        self._round_of_partner = 0
        self._nursery: trio.Nursery | None = None
        self.stopped = False
        self.catch_up_wanted = trio.Event()
        self.counts: Counter[str] = Counter()
        self.on_report: Callable[[Report], None] = lambda report: None
        caller.handle(OPEN, self._on_open)
        caller.handle(COMMIT, self._on_commit)
        caller.handle(APPLY, self._on_apply)
        caller.handle(CANCEL, self._on_cancel)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Initiates one exchange after each round of its own, until the trainer ends."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                with contextlib.suppress(TrainerGone):
                    await self._meet_after_each_round()
                self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None

    async def _meet_after_each_round(self) -> None:
        before_s, before_round = trio.current_time(), self._last_round
        while True:
            closed = await self._trainer.next_round(self._last_round)
            self._last_round = closed.round
            try:
                took_s = (trio.current_time() - before_s) / max(1, closed.round - before_round)
                before_s, before_round = trio.current_time(), closed.round
                if not self._closing_for_partner and closed.round != self._round_of_partner:
                    self._pace.record(took_s, closed.round_steps)
                if not self._busy and not await self._meet_someone(closed):
                    self._trainer.abandon(closed)
            finally:
                self._trainer.release(closed)

    # ------------------------------------------------------------------------------------------------- initiator

    async def _meet_someone(self, closed: ClosedRound) -> bool:
        """Tries partners in random order until one exchange has happened or the attempts are used up.

        A snapshot is offered for no longer than a round: what comes next is newer, and this one stale.
        """
        own: Snapshot | None = None
        closed_s = trio.current_time()
        for attempt in range(self._config.attempts_per_round):
            if attempt:
                await trio.sleep(self._config.busy_pause_s * (0.5 + self._rng.random()))
                if trio.current_time() - closed_s > self._pace.at_most_a_round(float("inf")):
                    return False
            if self._busy or self.stopped:
                return True  # someone was faster and met us; that exchange settles this round
            partner = self._choose_partner()
            if partner is None:
                return False
            with self._occupied():
                started_s = trio.current_time()
                try:
                    if own is None:
                        own = await self._snapshots.take(closed)
                    report = await self._initiate(partner, closed, own, started_s)
                except (PeerError, ExchangeFailed, PayloadInvalid) as error:
                    report = Report(partner.peer_id, True, reason_of(error), seconds=trio.current_time() - started_s)
                    self._note_failure(partner.peer_id, error)
                except TrainerGone:
                    raise
                except Exception as error:  # a defect of ours must not end the training
                    logger.exception("exchange with %s failed", partner.peer_id.hex()[:8])
                    report = Report(partner.peer_id, True, "internal", seconds=trio.current_time() - started_s)
                    self._note_failure(partner.peer_id, error)
                self._record(report)
            if report.outcome == "mixed":
                return True
        return False

    def _choose_partner(self) -> Contact | None:
        now = trio.current_time()
        able = [c for c in self._partners.candidates() if not self._standing.is_backed_off(c.peer_id, now)]
        return choose_partner(able, self._preference, self._rng)

    async def _initiate(self, partner: Contact, closed: ClosedRound, own: Snapshot, started_s: float) -> Report:
        id_ = self._rng.randbytes(16)
        request = OpenRequest(id_, self._snapshots.offer(closed, own))
        reply = await self._caller.call(partner, OPEN, request, deadline_s=self._config.boundary_deadline_s)
        blob = b""
        try:
            if reply.offer.run_id != self._config.run_id or reply.payload.snapshot != reply.offer.snapshot:
                raise ProtocolError("inconsistent-offer")
            if self.staleness.is_too_much(closed, reply.offer):
                raise ExchangeFailed("partner-stale")
            encoded, blob = await self._snapshots.encode(own, reply.offer)
            session = Session(id_, partner, reply.offer, started_s, closed, own, encoded, blob)
            await self._swap(session, reply.payload)
            await self._caller.call(partner, APPLY, ApplyRequest(id_), deadline_s=self._config.boundary_deadline_s)
            await self._mix(session)
        except BaseException as error:
            if not isinstance(error, Refusal):  # a partner that refuses has ended its session already
                await self._say_cancel(partner, CancelRequest(id_, reason_of(error)[:40]))
            raise
        finally:
            if blob:
                self._snapshots.discard(blob)
        return session.report_mixed(initiated=True, now_s=trio.current_time())

    async def _say_cancel(self, partner: Contact, request: CancelRequest) -> None:
        """Lets the partner go at once; it would else wait for us until the session expires."""
        with trio.move_on_after(CANCEL_DEADLINE_S, shield=True), contextlib.suppress(PeerError):
            await self._caller.call(partner, CANCEL, request, deadline_s=CANCEL_DEADLINE_S)

    async def _swap(self, session: Session, theirs: Payload) -> None:
        """Lets the partner fetch while we fetch; raises what went wrong first on either side."""
        failures: list[Exception] = []

        async def attempt(half: Awaitable[object]) -> None:
            try:
                await half
            except (PeerError, ExchangeFailed, PayloadInvalid) as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        commit = CommitRequest(session.id, session.own_payload)
        deadline_s = self._config.transfer_deadline_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, self._caller.call(session.partner, COMMIT, commit, deadline_s=deadline_s))
            nursery.start_soon(attempt, self._snapshots.receive(session, theirs))
        if failures:
            raise failures[0]

    # ------------------------------------------------------------------------------------------------- responder

    async def _on_open(self, remote: bytes, request: OpenRequest) -> OpenReply:
        offer = request.offer
        now = trio.current_time()
        if offer.run_id != self._config.run_id:
            raise Refusal("other-run", f"this peer trains run {self._config.run_id.hex()[:8]}")
        if self.stopped:
            raise Refusal("not-training")
        if self._busy:
            raise Refusal("busy")
        if now - max(self._last_mix_s, self._last_call_s) < self._config.ration * self._pace.seconds:
            raise Refusal("too-soon")
        if self._standing.is_backed_off(remote, now):
            raise Refusal("too-soon", "an exchange with you has failed a short while ago")
        if self._nursery is None:
            raise Refusal("not-ready")
        with self._occupied(keep_on_success=True):
            self._last_call_s = now  # it costs us a round's end, whatever becomes of it
            closed = await self._close_round_for_partner()
            try:
                if self.staleness.is_too_much(closed, offer):
                    raise Refusal("stale", f"you are behind by more than {self._config.staleness_cutoff} rounds")
                own = await self._snapshots.take(closed)
                encoded, blob = await self._snapshots.encode(own, offer)
                nursery = self._nursery_or_discard(blob)
            except BaseException:
                self._trainer.abandon(closed)
                self._trainer.release(closed)
                raise
            partner = self._partners.contact(remote)
            session = Session(request.session, partner, offer, now, closed, own, encoded, blob)
            self._incoming = session
            nursery.start_soon(self._expire, session)
        return OpenReply(self._snapshots.offer(closed, own), session.own_payload)

    def _nursery_or_discard(self, blob: bytes) -> trio.Nursery:
        if self._nursery is None:  # training has ended meanwhile
            self._snapshots.discard(blob)
            raise Refusal("not-training")
        return self._nursery

    async def _close_round_for_partner(self) -> ClosedRound:
        self._closing_for_partner = True
        try:
            with trio.fail_after(self._config.boundary_deadline_s):
                closed = await self._trainer.close_round()
        except (TrainerGone, trio.TooSlowError) as error:
            raise Refusal("not-training") from error
        finally:
            self._closing_for_partner = False
        self._round_of_partner = closed.round
        self._last_round = max(self._last_round, closed.round)
        return closed

    async def _on_commit(self, remote: bytes, request: CommitRequest) -> Done:
        session = self._find_session(remote, request.session)
        if session.stage is not Stage.OPEN or request.payload.snapshot != session.theirs.snapshot:
            raise self._end_incoming(session, "inconsistent-commit")
        session.stage = Stage.COMMITTING
        try:
            await self._snapshots.receive(session, request.payload)
        except (PeerError, ExchangeFailed, PayloadInvalid) as error:
            raise self._end_incoming(session, reason_of(error)) from error
        except BaseException:  # among them the cancellation of this handler: the initiator has given up or is gone
            self._end_incoming(session, "commit-interrupted")
            raise
        session.stage = Stage.READY
        return Done()

    async def _on_apply(self, remote: bytes, request: ApplyRequest) -> Done:
        session = self._find_session(remote, request.session)
        if session.stage is not Stage.READY:
            raise self._end_incoming(session, "not-committed")
        session.stage = Stage.APPLYING
        session.scope.cancel()  # it expires no more: what is being applied belongs to the trainer
        try:
            await self._mix(session)
        except TrainerGone:
            raise self._end_incoming(session, "not-training") from None
        except BaseException:
            self._end_incoming(session, "apply-interrupted")
            raise
        self._leave(session)
        self._record(session.report_mixed(initiated=False, now_s=trio.current_time()))
        return Done()

    async def _on_cancel(self, remote: bytes, request: CancelRequest) -> Done:
        session = self._find_session(remote, request.session)
        self._end_incoming(session, "stale" if request.reason == "partner-stale" else "cancelled")
        return Done()

    async def _expire(self, session: Session) -> None:
        """Ends a session whose initiator has vanished, and remembers it."""
        with session.scope:
            await trio.sleep(self._config.boundary_deadline_s)
            if session.stage is not Stage.OPEN:
                await trio.sleep(self._config.transfer_deadline_s)
            self._end_incoming(session, "initiator-vanished")

    def _find_session(self, remote: bytes, id_: bytes) -> Session:
        session = self._incoming
        if session is None or session.id != id_ or session.partner.peer_id != remote:
            raise Refusal("no-session")
        if session.stage is Stage.APPLYING:
            raise Refusal("no-session", "it is being applied")
        return session

    def _end_incoming(self, session: Session, reason: str) -> Refusal:
        """Ends a session without a mix, if it is still there; returns what to tell the initiator."""
        if self._incoming is session:
            if reason == "stale":
                self.catch_up_wanted.set()
            elif reason != "not-training":
                self._note_failure(session.partner.peer_id, ExchangeFailed(reason))
            self._trainer.abandon(session.closed)
            self._leave(session)
            self._record(Report(session.partner.peer_id, False, reason))
        return Refusal(reason)

    def _leave(self, session: Session) -> None:
        session.scope.cancel()
        self._incoming = None
        self._busy = False
        self._trainer.release(session.closed)
        self._snapshots.discard(session.blob)

    # ------------------------------------------------------------------------------------------ both sides alike

    async def _mix(self, session: Session) -> None:
        if session.partner_snapshot is None or session.order is None:
            raise ExchangeFailed("not-committed")
        await self._trainer.mix(session.closed, session.partner_snapshot.bits, session.order)
        self._snapshots.keep(session.own, session.partner_snapshot)
        self._standing.restore(session.partner.peer_id)

    @contextmanager
    def _occupied(self, *, keep_on_success: bool = False) -> Iterator[None]:
        """Takes the one place for a session; as responder it is given back by `_leave`."""
        self._busy = True
        try:
            yield
        except BaseException:
            self._busy = False
            raise
        if not keep_on_success:
            self._busy = False

    def _record(self, report: Report) -> None:
        if report.outcome == "mixed":
            self._last_mix_s = trio.current_time()
        known = report.outcome in self.counts or len(self.counts) < MAX_COUNTED_OUTCOMES
        self.counts[report.outcome if known else "other"] += 1
        logger.info("exchange with %s: %s", report.partner.hex()[:8], report.outcome)
        self.on_report(report)

    def _note_failure(self, peer_id: bytes, error: Exception) -> None:
        """Lowers a partner's standing.  Being busy is no fault, and that we are behind is none of the partner's."""
        if isinstance(error, Refusal) and error.code in ("busy", "too-soon", "not-ready"):
            return
        if isinstance(error, Refusal) and error.code == "stale":
            self.catch_up_wanted.set()
            return
        self._standing.lower(peer_id, trio.current_time())
