from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import pytest
import trio
import trio.testing
from swarm_peer.relay_turns import HOUR_S, ClientTurns, HourlyQuota

RATE = 1000.0
PIECE = 10


def passed(waiting: Mapping[str, int], seconds: float, quota: HourlyQuota) -> Counter[str]:
    """Bytes that clients with so many circuits each, all of them always with something to pass on, get through."""
    counts: Counter[str] = Counter()

    async def circuit(turns: ClientTurns, client: str) -> None:
        while True:
            await turns.take(client, PIECE)
            counts[client] += PIECE

    async def main() -> None:
        turns = ClientTurns(RATE, quota)
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for client, circuits in waiting.items():
                    for _ in range(circuits):
                        nursery.start_soon(circuit, turns, client)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return counts


def over(quota: HourlyQuota, *clients: Hashable) -> HourlyQuota:
    """Lets clients use up what they may have at the beginning of the test's clock."""
    for client in clients:
        quota.charge(client, 10**9, -1.0)
    return quota


def test_a_client_with_many_circuits_gets_no_more_than_one_with_one() -> None:
    got = passed({"many": 8, "one": 1, "two": 2}, 30.0, HourlyQuota(1e9))
    assert sum(got.values()) == pytest.approx(30 * RATE, rel=0.01)
    for share in got.values():
        assert share == pytest.approx(10 * RATE, rel=0.05)


def test_all_who_are_over_their_quota_share_one_place_while_others_want_it() -> None:
    got = passed({"big": 4, "bigger": 4, "new": 1}, 30.0, over(HourlyQuota(1e9), "big", "bigger"))
    assert got["new"] == pytest.approx(15 * RATE, rel=0.05)
    assert got["big"] + got["bigger"] == pytest.approx(15 * RATE, rel=0.05)
    assert got["big"] == pytest.approx(got["bigger"], rel=0.1)


def test_a_quota_costs_nothing_while_nobody_else_wants_the_relay() -> None:
    assert passed({"big": 1}, 30.0, over(HourlyQuota(1e9), "big"))["big"] == pytest.approx(30 * RATE, rel=0.01)


def test_who_fills_its_bucket_is_over_until_half_has_drained() -> None:
    quota = HourlyQuota(1000)
    quota.charge("a", 999, 0.0)
    assert not quota.is_over("a", 0.0)
    quota.charge("a", 1, 0.0)
    assert quota.is_over("a", 0.0)
    assert quota.is_over("a", 0.49 * HOUR_S)
    assert not quota.is_over("a", 0.5 * HOUR_S)
    quota.charge("a", 499, 0.5 * HOUR_S)
    assert not quota.is_over("a", 0.5 * HOUR_S)
    assert not quota.is_over("stranger", 0.0)


def test_what_is_spread_over_the_hour_is_never_over() -> None:
    quota = HourlyQuota(3600)
    for second in range(3 * 3600):
        quota.charge("a", 1, float(second))
        assert not quota.is_over("a", float(second))


def test_memory_is_bounded_and_drained_buckets_are_forgotten() -> None:
    quota = HourlyQuota(3600)
    for number in range(10_000):
        quota.charge(number, 3600, 0.0)
    assert len(quota) <= 4096
    quota.charge("late", 1, HOUR_S + 1)
    assert len(quota) == 1
