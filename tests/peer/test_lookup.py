"""The lookup state machine over simulated tables: reach, disjointness, churn, liars."""

from __future__ import annotations

import random

import pytest
from swarm_peer.addresses import Address, Contact
from swarm_peer.lookup import Lookup, LookupParams
from swarm_peer.routing import RoutingTable, distance

OWN = b"\xff" * 32


def contact(peer_id: bytes, host: str = "127.0.0.1") -> Contact:
    return Contact(peer_id, (Address(host, 4000),))


class Swarm:
    """Many routing tables, filled at random; answers questions instantly, unless a peer is dead or lies."""

    def __init__(self, size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ids = [self.rng.randbytes(32) for _ in range(size)]
        self.tables = {peer_id: RoutingTable(peer_id) for peer_id in self.ids}
        for peer_id, table in self.tables.items():
            for other in self.rng.sample(self.ids, min(size, 200)):
                table.offer(contact(other), now=0.0)
            # What self-lookups at joining give in a live swarm: everyone knows its nearest.
            for other in sorted(self.ids, key=lambda o: distance(o, peer_id))[:25]:
                table.offer(contact(other), now=0.0)
        self.dead: set[bytes] = set()
        self.liars: set[bytes] = set()

    def run(self, lookup: Lookup) -> list[Contact]:
        waiting: list[Contact] = []
        while not lookup.finished:
            waiting += lookup.next_queries()
            asked = waiting.pop(self.rng.randrange(len(waiting)))
            if asked.peer_id in self.liars:
                fakes = [lookup.target[:4] + self.rng.randbytes(28) for _ in range(20)]
                lookup.answered(asked.peer_id, [contact(fake) for fake in fakes])
            elif asked.peer_id in self.dead or asked.peer_id not in self.tables:
                lookup.failed(asked.peer_id)
            else:
                lookup.answered(asked.peer_id, self.tables[asked.peer_id].closest(lookup.target))
        return lookup.closest()

    def seeds(self, count: int) -> list[Contact]:
        return [contact(peer_id) for peer_id in self.rng.sample(self.ids, count)]

    def truth(self, target: bytes, count: int) -> list[bytes]:
        alive = [peer_id for peer_id in self.ids if peer_id not in self.dead | self.liars]
        return sorted(alive, key=lambda peer_id: distance(peer_id, target))[:count]


def found(contacts: list[Contact]) -> list[bytes]:
    return [c.peer_id for c in contacts]


@pytest.mark.parametrize("size", [1, 2, 10, 60, 400])
def test_it_finds_the_nearest(size: int) -> None:
    swarm = Swarm(size, seed=size)
    for _ in range(5):
        target = swarm.rng.randbytes(32)
        lookup = Lookup(target, OWN, swarm.seeds(min(size, 5)), LookupParams(agree_on=20))
        assert found(swarm.run(lookup)) == swarm.truth(target, 20)


def test_it_ends_early_when_the_paths_agree() -> None:
    swarm = Swarm(400, seed=1)
    queries = {3: 0, 20: 0}
    for _ in range(20):
        target, seeds = swarm.rng.randbytes(32), swarm.seeds(8)
        for agree_on in queries:
            lookup = Lookup(target, OWN, seeds, LookupParams(agree_on=agree_on))
            assert found(swarm.run(lookup))[:3] == swarm.truth(target, 3)
            queries[agree_on] += lookup.queries
    assert queries[3] < queries[20], queries


def test_it_finds_the_nearest_alive_when_many_are_dead() -> None:
    swarm = Swarm(300, seed=2)
    swarm.dead = set(swarm.rng.sample(swarm.ids, 120))
    target = swarm.rng.randbytes(32)
    alive = [contact(p) for p in swarm.ids if p not in swarm.dead][:8]
    result = found(swarm.run(Lookup(target, OWN, alive)))
    assert result[:8] == swarm.truth(target, 8)


def test_liars_spoil_one_path_but_not_the_lookup() -> None:
    hits = {1: 0, 4: 0}
    for seed in range(10):
        for paths in hits:
            swarm = Swarm(200, seed=100 + seed)
            swarm.liars = set(swarm.rng.sample(swarm.ids, 100))
            target = swarm.rng.randbytes(32)
            lookup = Lookup(target, OWN, swarm.seeds(8), LookupParams(paths=paths))
            honest = [p for p in found(swarm.run(lookup)) if p in swarm.tables and p not in swarm.liars]
            hits[paths] += honest[:1] == swarm.truth(target, 1)
            assert lookup.queries <= 200
    assert hits[4] >= 9, hits
    assert hits[1] < hits[4], hits


def test_no_peer_is_asked_twice_and_alpha_holds() -> None:
    swarm = Swarm(100, seed=3)
    lookup = Lookup(swarm.rng.randbytes(32), OWN, swarm.seeds(8), LookupParams(alpha=2, paths=3))
    asked: list[bytes] = []
    while not lookup.finished:
        asked += [query.peer_id for query in lookup.next_queries()]
        assert all(len(path.in_flight) <= 2 for path in lookup._paths)
        flying = [p for path in lookup._paths for p in path.in_flight]
        if flying:
            lookup.answered(flying[0], swarm.tables[flying[0]].closest(lookup.target))
    assert len(asked) == len(set(asked))


def test_a_wrong_address_told_on_one_path_does_not_hide_the_peer_from_another() -> None:
    honest, liar, hidden = b"\x01" * 32, b"\x02" * 32, b"\x00" * 32
    lookup = Lookup(bytes(32), OWN, [contact(honest), contact(liar)], LookupParams(paths=2))
    assert {c.peer_id for c in lookup.next_queries()} == {honest, liar}
    lookup.answered(liar, [contact(hidden, "10.9.9.9")])
    assert [c.addresses[0].host for c in lookup.next_queries()] == ["10.9.9.9"]
    lookup.answered(honest, [contact(hidden, "127.0.0.1")])
    lookup.failed(hidden)
    assert [c.addresses[0].host for c in lookup.next_queries()] == ["127.0.0.1"]
    lookup.answered(hidden, [])
    assert lookup.finished
    assert found(lookup.closest())[0] == hidden


def test_a_reply_counts_up_to_twenty_contacts_and_never_names_us() -> None:
    lookup = Lookup(bytes(32), OWN, [contact(b"\x01" * 32)])
    [first] = lookup.next_queries()
    told = [contact(OWN)] + [contact(bytes([0, n]) + bytes(30)) for n in range(100)]
    lookup.answered(first.peer_id, told)
    heard = lookup._paths[0].heard
    assert len(heard) == 20
    assert OWN not in heard


@pytest.mark.parametrize("claims", ["the truth", "names of its own", "addresses elsewhere"])
def test_a_subnet_full_of_ids_beside_the_target_does_not_hide_it(claims: str) -> None:
    """Sixty ids nearer than any honest one, all reached in one /24, whatever they say of where they are."""
    rng = random.Random(9)
    target = bytes(32)
    honest = [Contact(b"\x01" + rng.randbytes(31), (Address(f"20.{n}.1.1", 4000),)) for n in range(20)]
    hosts = {
        "the truth": [f"198.51.9.{n + 1}" for n in range(60)],
        "names of its own": [f"node{n}.example" for n in range(60)],
        "addresses elsewhere": [f"21.{n}.1.1" for n in range(60)],
    }[claims]
    mined = [Contact(bytes(2) + rng.randbytes(30), (Address(host, 4000),)) for host in hosts]
    lookup = Lookup(target, OWN, honest[:4])
    enemies = {contact.peer_id for contact in mined}
    while not lookup.finished:
        for contact in lookup.next_queries():
            if contact.peer_id in enemies:
                lookup.answered(contact.peer_id, rng.sample(mined, 20), "198.51.9.77")
            else:
                lookup.answered(contact.peer_id, [*honest[:18], *rng.sample(mined, 2)], contact.addresses[0].host)
    result = found(lookup.closest())
    assert len(enemies & set(result)) == 2
    # The paths end when they agree on the nearest eight, of which two are the enemy's.
    nearest = sorted((contact.peer_id for contact in honest[:18]), key=lambda peer_id: distance(peer_id, target))
    assert result[2:8] == nearest[:6]


def test_without_seeds_it_is_finished_at_once() -> None:
    lookup = Lookup(bytes(32), OWN, [contact(OWN)])
    assert lookup.finished
    assert lookup.next_queries() == []
    assert lookup.closest() == []


def test_unknown_reports_are_ignored() -> None:
    lookup = Lookup(bytes(32), OWN, [contact(b"\x01" * 32)])
    lookup.answered(b"\x09" * 32, [contact(b"\x08" * 32)])
    lookup.failed(b"\x09" * 32)
    assert len(lookup.next_queries()) == 1
