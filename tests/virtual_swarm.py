"""A swarm in one process and in virtual time: the product's own drivers over the in-memory network.

Everything between the trainer and the socket is what runs in production: exchange, guard, codecs, blobs, membership,
DHT, endpoint.  Only the trainer is simulated, by a replica that descends a noisy quadratic, because what is tested here
is how replicas meet, not how they learn text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio
import trio.testing
from numpy.typing import NDArray
from swarm_peer.addresses import Address, Contact
from swarm_peer.blobs import BlobExchange, BlobStore
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity
from swarm_peer.kademlia import Kademlia
from swarm_peer.membership import Membership
from swarm_peer.memory import MemoryNetwork
from swarm_peer.memory_stream import Link
from swarm_peer.records import PeerState, RunPayload

from swarmtrain.exchange import Exchanger
from swarmtrain.exchange_session import ExchangeConfig, Report
from swarmtrain.layout import FlatLayout, bf16_to_fp32, fp32_to_bf16
from swarmtrain.mixing import Effort, mix, outer_step
from swarmtrain.node import NodeBlobs
from swarmtrain.snapshots import SnapshotLibrary, take_snapshot
from swarmtrain.status import Status, decode_status
from swarmtrain.trainer_link import ClosedRound, MixOrder

LAYOUT = FlatLayout.of([("model.embed_tokens.weight", (16, 8)), ("model.norm.weight", (8,))])
RUN_ID = bytes(range(32))
ALPHA, BETA = 0.5, 0.7
BATCH_TOKENS = 64


async def inline(function: Callable[..., Any], /, *args: Any) -> Any:
    """Stands in for worker threads, which a virtual clock cannot see."""
    await trio.lowlevel.checkpoint()
    return function(*args)


class SimulatedTrainer:
    """A `TrainerPort` whose replica descends 0.5 |theta - optimum|² with gradient noise."""

    def __init__(
        self, rng: np.random.Generator, *, step_s: float, inner_steps: int, start: NDArray[np.float32]
    ) -> None:
        self._rng = rng
        self._step_s = step_s
        self._inner_steps = inner_steps
        self.theta, self.phi, self.m = start.copy(), start.copy(), np.zeros_like(start)
        self.step = 0
        self.round = 0
        self._round_start = 0
        self._effort = Effort(0, 0)
        self._close_wanted = False
        self._latest: ClosedRound | None = None
        self._changed = trio.Condition()

    async def run(self) -> None:
        """Trains until cancelled, one step per `step_s` of virtual time."""
        while True:
            await trio.sleep(self._step_s)
            noise = self._rng.standard_normal(self.theta.size).astype(np.float32)
            self.theta -= np.float32(0.05) * (self.theta - np.float32(1.0) + np.float32(0.5) * noise)
            self.step += 1
            self._effort = Effort(self._effort.tokens + BATCH_TOKENS, self._effort.steps + 1)
            if self._close_wanted or self.step - self._round_start >= self._inner_steps:
                self._close_wanted = False
                await self._close()

    async def _close(self) -> None:
        drift = self.theta - self.phi
        norms = {g: float(np.linalg.norm(np.concatenate([drift[p] for p in ps]))) for g, ps in LAYOUT.groups().items()}
        outer_step(self.theta, self.phi, self.m, alpha=ALPHA, beta=BETA)
        self.round += 1
        steps = self.step - self._round_start
        bits = fp32_to_bf16(self.phi)
        self._latest = ClosedRound(self.round, self.step, steps, self._effort, norms, bits, slot=0)
        self._round_start = self.step
        async with self._changed:
            self._changed.notify_all()

    async def next_round(self, after: int) -> ClosedRound:
        async with self._changed:
            while self._latest is None or self._latest.round <= after:
                await self._changed.wait()
            return self._latest

    async def close_round(self) -> ClosedRound:
        self._close_wanted = True
        return await self.next_round(self.round)

    def release(self, closed: ClosedRound) -> None:
        """Snapshots are copies here."""

    def abandon(self, closed: ClosedRound) -> None:
        """The matched mixer has nothing to settle."""

    async def mix(self, closed: ClosedRound, partner: NDArray[np.uint16], order: MixOrder) -> None:
        D = bf16_to_fp32(partner) - bf16_to_fp32(closed.bits)
        for group, parts in LAYOUT.groups().items():
            for part in parts:
                D[part] *= np.float32(order.factors.get(group, 1.0))
        mix(self.theta, self.phi, D, order.weight)
        self._effort = Effort(0, 0)
        if (ahead := order.partner_step - self.step) >= self._inner_steps:  # follow the schedule, as the trainer does
            self.step += ahead
            self._round_start += ahead

    async def adopt(self, bits: NDArray[np.uint16], step: int) -> None:
        self.theta = bf16_to_fp32(bits)
        self.phi, self.m = self.theta.copy(), np.zeros_like(self.theta)
        self.step = self._round_start = step


@dataclass
class VirtualPeer:
    """One peer: its host, its replica, its exchanges."""

    index: int
    host: str
    identity: Identity
    trainer: SimulatedTrainer
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    reports: list[Report] = field(default_factory=list)
    membership: Membership | None = None
    exchanger: Exchanger | None = None
    endpoint: Endpoint | None = None


class VirtualSwarm:
    """Peers of one run on a `MemoryNetwork`.  All randomness comes from `seed`."""

    def __init__(
        self, *, seed: int, link: Link | None = None, step_s: float = 0.5, inner_steps: int = 10, spread: float = 0.0
    ) -> None:
        self.rng = random.Random(seed)
        self._seed = seed
        self._step_s, self._inner_steps, self._spread = step_s, inner_steps, spread
        self.network = MemoryNetwork(seed=seed, link=link or Link(latency_s=0.04))
        self.peers: list[VirtualPeer] = []
        self.log: list[str] = []
        self._entry: Address | None = None

    async def start(self, nursery: trio.Nursery, count: int) -> None:
        """Starts `count` more peers at once; the first one of all is the bootstrap of the others."""
        for number in range(count):
            index = len(self.peers)
            numbers = np.random.default_rng([self._seed, index])
            start = (self._spread * numbers.standard_normal(LAYOUT.size)).astype(np.float32)
            step_s = self._step_s * (0.8 + 0.4 * self.rng.random())
            trainer = SimulatedTrainer(numbers, step_s=step_s, inner_steps=self._inner_steps, start=start)
            seed = self._seed.to_bytes(8, "big") + index.to_bytes(24, "big")
            peer = VirtualPeer(index, f"10.{index // 200}.{index % 200}.7", Identity.from_seed(seed), trainer)
            self.peers.append(peer)
            if number == 0:
                await nursery.start(self._run, peer)
            else:
                nursery.start_soon(self._run, peer)

    def crash(self, peer: VirtualPeer) -> None:
        """As `kill -9` or a pulled plug: no goodbye."""
        self.note(peer, "crash")
        self.network.crash(peer.host)
        peer.scope.cancel()

    def alive(self) -> list[VirtualPeer]:
        return [peer for peer in self.peers if not peer.scope.cancel_called]

    def spread(self) -> float:
        """Returns the standard deviation between the live replicas' slow weights."""
        return float(np.std([peer.trainer.phi for peer in self.alive()], axis=0).mean())

    def distance(self) -> float:
        """Returns how far the mean of the live replicas is from the optimum, per weight."""
        mean = np.mean([peer.trainer.phi for peer in self.alive()], axis=0)
        return float(np.abs(mean - 1.0).mean())

    def note(self, peer: VirtualPeer, what: str) -> None:
        self.log.append(f"{trio.current_time():.6f} {peer.index} {what}")

    async def _run(self, peer: VirtualPeer, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with peer.scope:
            async with trio.open_nursery() as nursery:
                endpoint = peer.endpoint = Endpoint(peer.identity, self.network.transport(peer.identity, peer.host))
                addresses = await nursery.start(endpoint.run, [Address(peer.host, 7000)])
                dht = Kademlia(endpoint, peer.identity, rng=random.Random(self.rng.random()))
                dht.advertise(addresses)
                await nursery.start(dht.run)
                if self._entry is None:
                    self._entry = addresses[0]
                else:
                    await dht.bootstrap([(None, self._entry)])
                store = BlobStore(1 << 26)
                blobs = NodeBlobs(store, BlobExchange(endpoint, store, offload=inline))
                membership = peer.membership = Membership(
                    endpoint,
                    peer.identity,
                    RUN_ID,
                    discovery=dht,
                    rng=random.Random(self.rng.random()),
                    addresses=tuple(addresses),
                )
                library = SnapshotLibrary(LAYOUT)
                library.add(take_snapshot(LAYOUT, np.zeros(LAYOUT.size, np.uint16)))
                exchanger = peer.exchanger = Exchanger(
                    endpoint,
                    config=ExchangeConfig(
                        run_id=RUN_ID, staleness_cutoff=4, outer_gain=BETA / (1 - ALPHA), transfer_deadline_s=60.0
                    ),
                    trainer=peer.trainer,
                    partners=VirtualPartners(membership),
                    blobs=blobs,
                    library=library,
                    rng=random.Random(self.rng.random()),
                    offload=inline,
                )

                def on_report(report: Report) -> None:
                    peer.reports.append(report)
                    self.note(peer, f"{report.outcome} {report.partner.hex()[:8]} {report.initiated}")

                exchanger.on_report = on_report
                membership.publish(PeerState.TRAINING, Status().encode())
                await nursery.start(membership.run)
                nursery.start_soon(peer.trainer.run)
                nursery.start_soon(exchanger.run)
                nursery.start_soon(self._publish, peer, membership)
                run = RunPayload(RUN_ID, "virtual", bytes(32), bytes(32), tuple(addresses))
                nursery.start_soon(dht.announce_run, run)
                task_status.started()
                await trio.sleep_forever()

    async def _publish(self, peer: VirtualPeer, membership: Membership) -> None:
        while True:
            await trio.sleep(5.0)
            membership.publish(PeerState.TRAINING, Status(step=peer.trainer.step).encode())


@dataclass
class VirtualPartners:
    """`Partners` from a membership, as the training peer does it."""

    membership: Membership

    def candidates(self) -> list[Contact]:
        return [m.contact for m in self.membership.live() if m.state is PeerState.TRAINING]

    def contact(self, peer_id: bytes) -> Contact:
        known = [m.contact for m in self.membership.members() if m.contact.peer_id == peer_id]
        return known[0] if known else Contact(peer_id, ())

    def swarm_step(self) -> int | None:
        steps = sorted(decode_status(m.status).step for m in self.membership.live())
        return steps[len(steps) // 2] if steps else None


@contextmanager
def deterministic_scheduling(seed: int) -> Iterator[None]:
    """Makes trio run ready tasks in an order that depends on `seed` alone (trio shuffles them otherwise)."""
    core = trio._core._run
    before = core._ALLOW_DETERMINISTIC_SCHEDULING
    core._ALLOW_DETERMINISTIC_SCHEDULING = True
    core._r.seed(seed)
    try:
        yield
    finally:
        core._ALLOW_DETERMINISTIC_SCHEDULING = before


def run_virtually(main: Callable[[], Any], *, seed: int) -> None:
    """Runs `main` under a clock that jumps whenever everybody waits."""
    with deterministic_scheduling(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
