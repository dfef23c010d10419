from __future__ import annotations

from swarmtrain.connection_watch import ConnectionWatch


def lines(watch: ConnectionWatch, seconds: list[float | None]) -> list[str]:
    return [line for second in seconds if (line := watch.look(second))]


def test_a_peer_that_never_met_anybody_is_told_nothing() -> None:
    assert lines(ConnectionWatch(), [None] * 100) == []


def test_short_silences_are_not_worth_a_line() -> None:
    assert lines(ConnectionWatch(), [0.0, 5.0, 19.0, 1.0, 12.0, 0.0]) == []


def test_an_outage_is_told_a_few_times_and_its_end_once() -> None:
    watch = ConnectionWatch()
    told = lines(watch, [float(second) for second in range(0, 7300, 5)])
    assert [line.split(":")[0] for line in told] == [
        f"offline for {s} s" for s in (20, 60, 300, 1800, 3600, 5400, 7200)
    ]
    assert watch.is_offline
    assert lines(watch, [2.0, 4.0, 1.0]) == ["connected again after 7295 s"]
    assert not watch.is_offline
    assert len(lines(watch, [20.0])) == 1
