"""What a user reads when exchanges do not happen."""

from __future__ import annotations

import pytest
from swarm_peer.errors import ConnectionRefused, ConnectTimedOut, Disconnected, PeerError

from swarmtrain.exchange_notices import PATIENCE_ROUNDS, ExchangeNotices

ALICE, BOB = bytes.fromhex("aa" * 32), bytes.fromhex("bb" * 32)


def close_rounds(notices: ExchangeNotices, count: int, candidates: int) -> list[str]:
    return [line for line in (notices.round_closed(candidates) for _ in range(count)) if line]


def test_being_alone_is_said_once_and_the_end_of_it_too() -> None:
    notices = ExchangeNotices()
    assert close_rounds(notices, PATIENCE_ROUNDS - 1, 0) == []
    (line,) = close_rounds(notices, 20, 0)
    assert "no other training peer" in line
    assert "alone" in line
    assert notices.exchange_ended(ALICE, "mixed") == "exchanging now, with peer aaaaaaaa"
    assert notices.exchange_ended(ALICE, "mixed") is None


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        (["busy", "busy", "too-soon"], "busy when asked"),
        (["unreachable", "connecttimedout"], "cannot be reached"),
        (["other-run", "other-run", "busy"], "mostly: other-run (peer aaaaaaaa)"),
        (["norm-outlier"], "mostly: norm-outlier (peer aaaaaaaa)"),
    ],
)
def test_each_reason_has_its_own_line(outcomes: list[str], says: str) -> None:
    notices = ExchangeNotices()
    for outcome in outcomes:
        assert notices.exchange_ended(ALICE, outcome) is None
    (line,) = close_rounds(notices, 10, 1)
    assert says in line
    assert "1 other peer trains" in line


def test_another_reason_is_another_line() -> None:
    notices = ExchangeNotices()
    close_rounds(notices, PATIENCE_ROUNDS, 0)
    notices.exchange_ended(BOB, "disconnected")
    (line,) = close_rounds(notices, 5, 2)
    assert "2 other peers train" in line
    assert "cannot be reached" in line


def test_nothing_is_said_while_exchanges_happen() -> None:
    notices = ExchangeNotices()
    for _ in range(10):
        assert close_rounds(notices, PATIENCE_ROUNDS - 1, 3) == []
        assert notices.exchange_ended(BOB, "mixed") is None


def test_a_peer_that_closes_rounds_before_anybody_was_asked_is_not_accused() -> None:
    assert close_rounds(ExchangeNotices(), 10, 2) == []


@pytest.mark.parametrize("error", [ConnectTimedOut, Disconnected, ConnectionRefused])
def test_the_errors_of_connections_are_known_by_their_names(error: type[PeerError]) -> None:
    notices = ExchangeNotices()
    notices.exchange_ended(ALICE, error.__name__.lower())
    assert "cannot be reached" in close_rounds(notices, PATIENCE_ROUNDS, 1)[-1]


def test_a_stranger_cannot_grow_the_list_of_reasons() -> None:
    notices = ExchangeNotices()
    for number in range(10_000):
        notices.exchange_ended(ALICE, f"reason-{number}")
    assert len(close_rounds(notices, PATIENCE_ROUNDS, 1)[0]) < 200
    assert len(notices._refusals) <= 64
