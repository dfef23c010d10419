"""A training peer, wired: membership, trainer, exchange, donor, status, final merge.

`TrainingPeer.run` reads from top to bottom as the life of a peer in the design: be known, get weights, train and
exchange, say goodbye or merge.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import trio
from swarm_peer.addresses import Contact
from swarm_peer.gated import Gate
from swarm_peer.identity import PeerId
from swarm_peer.membership import Membership, MembershipParams
from swarm_peer.records import PeerState
from swarm_peer.relay_entry import direct_addresses

from swarmtrain import control
from swarmtrain.control import ToNode
from swarmtrain.donor import Donation, Donor, Joiner, NoDonor
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.events import EventLog
from swarmtrain.exchange import Exchanger
from swarmtrain.exchange_session import ExchangeConfig, Report
from swarmtrain.final_merge import export_merge, fetch_final_replicas
from swarmtrain.layout import FlatLayout, fp32_to_bf16
from swarmtrain.live_members import LiveMembers
from swarmtrain.manifest import tokens_per_step
from swarmtrain.merge import Merge, WeightedReplica, merge_replicas
from swarmtrain.model_config import parameter_specs
from swarmtrain.node import Node
from swarmtrain.own_account import OwnAccount
from swarmtrain.run_lookup import LocatedRun, announce
from swarmtrain.slabs import Slabs
from swarmtrain.snapshots import SnapshotLibrary, take_snapshot
from swarmtrain.status import FinalReplica
from swarmtrain.trainer_link import TrainerLink
from swarmtrain.workspace import Workspace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarmtrain.hivemind_bridge.bridge import BridgeState

logger = logging.getLogger("swarmtrain.peer")

STATUS_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.2
FIRST_LOOK_S = 3.0
# A transfer is given up when the link is slower than this; below it a run of this size makes no sense.
SLOWEST_LINK_BYTES_PER_S = 20_000
TRANSFER_SLACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What `join` has prepared: files and settings of this peer."""

    workspace: Workspace
    token_file: str
    token_dtype: str
    device: str
    threads: int
    checkpoint_interval_s: float
    linger_s: float
    resume: bool
    genesis: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How it ended.  `merge` is None when the peer left before the end of the run."""

    finished: bool
    step: int
    validation_loss: float
    merge: Merge | None = None
    merged_validation_loss: float = math.nan


class TrainingPeer:
    """One peer of one run, from the first look at the swarm to the goodbye."""

    def __init__(self, node: Node, gate: Gate, run: LocatedRun, job: TrainingJob, events: EventLog) -> None:
        self._node = node
        self._gate = gate
        self._run = run
        self._job = job
        self._events = events
        self._manifest = run.signed.manifest
        self._layout = FlatLayout.of(parameter_specs(self._manifest.model.config()))
        self._rng = random.Random(node.identity.peer_id + run.signed.run_id)
        self._library = SnapshotLibrary(self._layout)
        self._membership = Membership(
            gate,
            node.identity,
            run.signed.run_id,
            discovery=node.discovery,
            rng=random.Random(self._rng.random()),
            addresses=node.addresses,
            params=MembershipParams(rpc_deadline_s=node.answer_deadline_s),
            vouch=None if gate.is_open else gate.vouch,
        )
        self._tokens_per_step = tokens_per_step(self._manifest)
        self.members = LiveMembers(self._membership, tokens_per_step=self._tokens_per_step)
        self.account = OwnAccount(events, self.members, total_steps=self._manifest.optimizer.total_steps)
        gate.on_out = self._membership.forget
        gate.on_expelled = self._on_expelled
        self.is_expelled = False
        node.relaying.on_addresses(self._membership.move)
        self._membership.on_duplicate = lambda: self.account.duplicate_seen(node.identity)
        self._slabs = Slabs.create(self._layout.size)
        self._link = TrainerLink(self._slabs, self._on_trainer_message)
        self._donor = Donor(
            gate,
            run_id=run.signed.run_id,
            library=self._library,
            blobs=node.blobs,
            offload=trio.to_thread.run_sync,
            newest=self._newest_donation,
        )
        self._joiner = Joiner(
            gate,
            run_id=run.signed.run_id,
            library=self._library,
            blobs=node.blobs,
            offload=trio.to_thread.run_sync,
        )
        mixer = self._manifest.mixer
        self._exchanger = Exchanger(
            gate,
            config=ExchangeConfig(
                run_id=run.signed.run_id,
                staleness_cutoff=mixer.staleness_cutoff,
                outer_gain=(mixer.gamma or mixer.beta) / (1.0 - mixer.alpha),
                transfer_deadline_s=self._transfer_deadline_s(),
            ),
            trainer=self._link,
            partners=self.members,
            blobs=node.blobs,
            library=self._library,
            rng=random.Random(self._rng.random()),
            offload=trio.to_thread.run_sync,
            preference=node.relaying.preference,
        )
        self._exchanger.on_report = self._on_report
        self._state = PeerState.WATCHING
        self._round_steps = self._manifest.round.inner_steps or 1
        self._finished: control.Finished | None = None
        self._settled = trio.Event()  # finished, stopped or dead
        self._stop_wanted = False
        self.bridge_state: Callable[[], BridgeState] | None = None
        self.on_transfer: Callable[[int, int], None] = lambda done, total: None

    # ----------------------------------------------------------------------------------------------- the life of a peer

    async def run(self) -> Result:
        """Runs the peer until the run is over or `stop` was called."""
        try:
            async with trio.open_nursery() as nursery:
                self._publish()
                await nursery.start(self._membership.run)
                nursery.start_soon(self._announce)
                nursery.start_soon(self._gate.run, self.members.contacts)
                start = await self._prepare_start()
                nursery.start_soon(self._publish_regularly)
                nursery.start_soon(self._train, start)
                nursery.start_soon(self._exchanger.run)
                nursery.start_soon(self._catch_up_when_stale)
                await self._settled.wait()
                self._exchanger.stopped = True
                result = await self._merge_with_others() if self._finished else self._left_early()
                self._link.stop()
                await self._link.ended.wait()
                with trio.move_on_after(3.0, shield=True):
                    await self._membership.goodbye()
                stats = self._node.endpoint.stats
                self._events.write("left", bytes_sent=stats.bytes_sent, bytes_received=stats.bytes_received)
                nursery.cancel_scope.cancel()
            return result
        finally:
            self._slabs.close()

    def stop(self) -> None:
        """Leaves as soon as the trainer has finished its step and saved."""
        self._stop_wanted = True
        self._exchanger.stopped = True
        if self._finished:
            self._settled.set()
        self._link.stop()

    def _on_expelled(self) -> None:
        """The creator has revoked us: no peer deals with us any more, so we save and leave."""
        self.is_expelled = True
        self._events.write("revoked")
        self.stop()

    async def _train(self, start: Callable[[int], control.Start]) -> None:
        try:
            await self._link.run(start)
        finally:
            self._settled.set()

    async def _announce(self) -> None:
        if direct_addresses(self._node.addresses):  # who cannot be dialled is no place to get the manifest from
            await announce(self._node, self._run)

    # ------------------------------------------------------------------------------------------------ getting weights

    async def _prepare_start(self) -> Callable[[int], control.Start]:
        """Decides where the replica starts: own checkpoint, a donor's snapshot, or the genesis."""
        await trio.to_thread.run_sync(self._adopt_genesis_as_base)
        donors = await self._first_look()
        if self._job.resume:
            return self._start("checkpoint", 0)
        if donors:
            try:
                donation = await self._joiner.fetch(
                    donors, deadline_s=self._transfer_deadline_s(), progress=self.on_transfer
                )
            except NoDonor as error:
                if not all("not-ready" in reason for reason in error.reasons):
                    raise UserError(
                        f"no donor delivered its weights: {error}; try again, or join with other --peer addresses",
                        ExitCode.NO_PEER,
                    ) from None
            else:
                self._library.add(donation.snapshot)
                self._link.fill_partner_slot(donation.snapshot.bits)
                self.account.on_notice(f"weights received at step {donation.step} of {self.account.status.total_steps}")
                return self._start("slot", donation.step)
        await trio.to_thread.run_sync(self._job.genesis.tofile, self._job.workspace.genesis)
        self.account.on_notice("starting from the run's genesis")
        return self._start("file", 0)

    def _adopt_genesis_as_base(self) -> None:
        self._library.add(take_snapshot(self._layout, fp32_to_bf16(self._job.genesis)), permanent=True)

    async def _first_look(self) -> list[Contact]:
        """Waits a moment for members to appear; returns those that train, in random order."""
        await self._wait_until(lambda: bool(self.members.training()), FIRST_LOOK_S)
        finished, training = self.members.finished(), self.members.training()
        if finished and not training and not self._job.resume:
            name = self._manifest.name
            raise UserError(
                f"run {name} has ended; take its model home with: swarmtrain export --run-id {name} --peer …",
                ExitCode.NO_RUN,
            )
        donors = [member.contact for member in training]
        self._rng.shuffle(donors)
        return donors

    def _start(self, weights: str, step: int) -> Callable[[int], control.Start]:
        job = self._job

        def make(slabs_fd: int) -> control.Start:
            return msgspec.convert(
                {
                    "type": "Start",
                    "manifest": self._run.signed.encode(),
                    "peer_id": bytes(self._node.identity.peer_id),
                    "slabs_fd": slabs_fd,
                    "token_file": job.token_file,
                    "token_dtype": job.token_dtype,
                    "validation_file": str(job.workspace.validation),
                    "device": job.device,
                    "threads": job.threads,
                    "checkpoint_directory": str(job.workspace.checkpoints),
                    "checkpoint_interval_s": job.checkpoint_interval_s,
                    "weights": weights,
                    "weights_file": str(job.workspace.genesis),
                    "step": step,
                },
                control.Start,
            )

        return make

    async def _catch_up_when_stale(self) -> None:
        """Takes a donor's snapshot when the swarm has gone on without us for too long."""
        while True:
            await self._exchanger.catch_up_wanted.wait()
            self._exchanger.catch_up_wanted = trio.Event()
            lag = self._exchanger.staleness.rounds_behind(
                self.members.swarm_step() or 0, self.account.status.step, self._round_steps
            )
            if lag <= self._manifest.mixer.staleness_cutoff:
                continue  # one peer's claim only: the swarm as a whole is not ahead
            donors = self.members.candidates()
            self._rng.shuffle(donors)
            try:
                donation = await self._joiner.fetch(donors, deadline_s=self._transfer_deadline_s())
            except NoDonor as error:
                logger.warning("no donor to catch up from: %s", error)
                continue
            self._library.add(donation.snapshot)
            await self._link.adopt(donation.snapshot.bits, donation.step)
            self.account.on_notice(f"caught up with the swarm at step {donation.step}")
            self._events.write("caught-up", step=donation.step)

    # ------------------------------------------------------------------------------------------------ status and events

    def _on_trainer_message(self, message: ToNode) -> None:
        match message:
            case control.Ready():
                self._state = PeerState.TRAINING
            case control.RoundClosed() if not message.requested:  # one that a partner cut short is no measure
                self._round_steps = max(1, message.round_steps)
            case control.Finished():
                self._finished = message
            case _:
                pass
        self.account.trainer_said(message)
        if isinstance(message, control.Finished):
            self._settled.set()

    def _on_report(self, report: Report) -> None:
        is_relayed = self._node.endpoint.is_relayed(PeerId(report.partner)) or False
        self.account.exchange_ended(report, is_relayed=is_relayed)

    def _publish(self) -> None:
        stats = self._node.endpoint.stats
        bridge: BridgeState | Literal[""] = self.bridge_state() if self.bridge_state is not None else ""
        self.account.count_traffic(bytes_sent=stats.bytes_sent, bytes_received=stats.bytes_received, hivemind=bridge)
        self._membership.publish(self._state, self.account.status.encode())

    async def _publish_regularly(self) -> None:
        while True:
            await trio.sleep(STATUS_INTERVAL_S)
            self._publish()
            self.account.look_at_connection(self.members.silent_s())

    async def _newest_donation(self) -> Donation | None:
        if self._finished is not None:
            return None
        closed = self._link.latest()
        if closed is None:
            return None
        try:
            snapshot = await trio.to_thread.run_sync(take_snapshot, self._layout, closed.bits)
            return Donation(snapshot, closed.step, self.account.status.tokens_total)
        finally:
            self._link.release(closed)

    def _transfer_deadline_s(self) -> float:
        return TRANSFER_SLACK_S + 2 * self._layout.size / SLOWEST_LINK_BYTES_PER_S

    # ------------------------------------------------------------------------------------------------ the end of a run

    def _left_early(self) -> Result:
        status = self.account.status
        return Result(finished=False, step=status.step, validation_loss=status.validation_loss)

    async def _merge_with_others(self) -> Result:
        """Waits a while for the others to finish, merges their replicas with ours, and writes the model."""
        assert self._finished is not None
        finished = self._finished
        own = await trio.to_thread.run_sync(take_snapshot, self._layout, self._slabs.slot(finished.slot))
        payload = await self._donor.encode(own, [])
        final = FinalReplica(own.hash, payload.blob, payload.size_bytes, finished.tokens_total)
        self._state = PeerState.FINISHED
        self.account.update(final=final)
        self._publish()
        await self._wait_until(self.members.none_trains, self._job.linger_s)
        replicas = [WeightedReplica(own.bits, finished.tokens_total)]
        replicas += await fetch_final_replicas(
            self._membership.live(),
            self._joiner,
            rng=self._rng,
            most_tokens=self._manifest.optimizer.total_steps * self._tokens_per_step,
            deadline_s=self._transfer_deadline_s(),
        )
        merge = await trio.to_thread.run_sync(merge_replicas, replicas)
        loss = await self._link.evaluate(fp32_to_bf16(merge.weights))
        await trio.to_thread.run_sync(export_merge, self._job.workspace.model, self._run.signed, merge, loss)
        self._events.write("merged", replicas=merge.replicas, spread=merge.spread, validation_loss=loss)
        self.account.update(merged=True)
        self._publish()
        await self._wait_until(self.members.all_have_merged, self._job.linger_s)
        return Result(
            finished=True,
            step=finished.step,
            validation_loss=finished.validation_loss,
            merge=merge,
            merged_validation_loss=loss,
        )

    async def _wait_until(self, holds: Callable[[], bool], deadline_s: float) -> None:
        """Waits for something to become true of the membership, which changes by gossip and by expiry."""
        with trio.move_on_after(deadline_s):
            while not self._stop_wanted and not holds():  # noqa: ASYNC110  # expiry is time, not an event
                await trio.sleep(POLL_INTERVAL_S)
