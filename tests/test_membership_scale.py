"""What gossip costs a peer, by the size of its run, and what a view smaller than the run is worth. Virtual time.

SWARMTRAIN_MEMBERS=1000 measures a run of that size instead of 120; it takes about 5 minutes of one core.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import trio
from direct_network import DirectEndpoint, DirectNetwork
from large_swarm import RUN_ID, host_of, identity_of, shared_verification
from swarm_peer.addresses import Address
from swarm_peer.discovery import FoundRun
from swarm_peer.membership import Membership, MembershipParams
from swarm_peer.records import PeerState, RunPayload, SignedRecord
from virtual_swarm import run_virtually

LARGE = int(os.environ.get("SWARMTRAIN_MEMBERS", "120"))


class Directory:
    """A `Discovery` that knows everybody and names twenty at random, as a DHT does."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._records: dict[bytes, SignedRecord] = {}

    async def announce_run(self, run: RunPayload) -> None:
        raise AssertionError

    async def find_runs(self, name: str | None) -> list[FoundRun]:
        raise AssertionError

    async def announce_peer(self, record: SignedRecord) -> None:
        await trio.lowlevel.checkpoint()
        self._records[record.author()] = record

    async def find_peers(self, run_id: bytes) -> list[SignedRecord]:
        await trio.lowlevel.checkpoint()
        return self._rng.sample(list(self._records.values()), min(20, len(self._records)))


class Members:
    """Members of one run on a `DirectNetwork`. Each has news of its own every 5 s, as a training peer does."""

    def __init__(self, nursery: trio.Nursery, params: MembershipParams) -> None:
        self._nursery = nursery
        self._params = params
        self._rng = random.Random(1)
        self._directory = Directory(self._rng)
        self._network = DirectNetwork(random.Random(2))
        self.all: list[tuple[DirectEndpoint, Membership, trio.CancelScope]] = []

    async def grow(self, count: int) -> None:
        for number in range(len(self.all), count):
            identity = identity_of(1, number)
            endpoint = self._network.endpoint(identity, Address(host_of(number), 4000))
            membership = Membership(
                endpoint,
                identity,
                RUN_ID,
                discovery=self._directory,
                rng=random.Random(self._rng.random()),
                addresses=[endpoint.address],
                params=self._params,
            )
            scope = trio.CancelScope()
            self.all.append((endpoint, membership, scope))
            self._nursery.start_soon(self._live, membership, scope)
            await trio.sleep(20 / count)

    async def _live(self, membership: Membership, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(membership.run)
                step = 0
                while True:
                    membership.publish(PeerState.TRAINING, b"step %d" % step)
                    step += 10
                    await trio.sleep(5.0)

    def sent_bytes(self) -> int:
        return sum(endpoint.bytes_sent for endpoint, _, _ in self.all)


def simulate(scenario: Callable[[Members], Awaitable[None]], params: MembershipParams | None = None) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(Members(nursery, params or MembershipParams()))
            nursery.cancel_scope.cancel()

    with shared_verification():
        run_virtually(main, seed=1)


def test_gossip_costs_a_peer_about_the_same_in_a_large_run_as_in_a_small_one() -> None:
    rate: dict[int, float] = {}

    async def measure(members: Members, count: int) -> None:
        await members.grow(count)
        await trio.sleep(30 if count <= 200 else 120)
        before = members.sent_bytes()
        await trio.sleep(20)
        rate[count] = (members.sent_bytes() - before) / count * 3
        known = [len(membership.live()) for _, membership, _ in members.all]
        print(f"{count} members: {rate[count] / 1000:.0f} kB sent per peer and minute, {min(known)} known at least")
        assert min(known) >= 0.97 * (count - 1)

    for count in (50, LARGE):
        simulate(functools.partial(measure, count=count))
    assert rate[LARGE] < 2.5 * rate[50], rate


def test_with_a_view_of_a_fifth_of_the_run_everybody_is_known_to_some_and_the_lost_give_way() -> None:
    async def scenario(members: Members) -> None:
        await members.grow(60)
        await trio.sleep(100)
        views = [membership.live() for _, membership, _ in members.all]
        assert all(10 <= len(view) <= 12 for view in views), Counter(map(len, views))
        known_by = Counter(member.contact.peer_id for view in views for member in view)
        # A sample of 12 out of 59 in each of 60 views: 12 on average, with a standard deviation of 3.
        assert len(known_by) == 60
        assert max(known_by.values()) <= 27
        for endpoint, _, scope in members.all[:20]:
            endpoint.close()
            scope.cancel()
        gone = {endpoint.peer_id for endpoint, _, _ in members.all[:20]}
        await trio.sleep(120)
        views = [membership.live() for _, membership, _ in members.all[20:]]
        assert all(10 <= len(view) <= 12 for view in views), Counter(map(len, views))
        assert not any(member.contact.peer_id in gone for view in views for member in view)

    simulate(scenario, MembershipParams(members=13, interval_s=10.0, ttl_s=90))
