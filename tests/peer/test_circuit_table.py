from __future__ import annotations

import pytest
from swarm_peer.addresses import Address
from swarm_peer.circuit_table import Circuit, CircuitTable, RelayLimits
from swarm_peer.errors import Refusal
from swarm_peer.identity import PeerId
from swarm_peer.relay_messages import LEASE_S


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def at(number: int) -> tuple[PeerId, Address]:
    return peer(number), Address(f"8.8.{number // 250}.{number % 250}", 1)


def refusal_of(table: CircuitTable, one: tuple[PeerId, Address], other: tuple[PeerId, Address], now: float) -> str:
    with pytest.raises(Refusal) as refused:
        table.open(one, other, now)
    return refused.value.code


def join(table: CircuitTable, circuit: Circuit, now: float) -> None:
    for token in circuit.tokens:
        assert table.join(token, now) is not None


def test_a_token_opens_one_end_once_and_in_time() -> None:
    table = CircuitTable(RelayLimits(join_s=10))
    circuit = table.open(at(1), at(2), 0.0)
    assert table.join(bytes(16), 0.0) is None
    assert table.join(circuit.tokens[1], 1.0) == (circuit, 1)
    assert table.join(circuit.tokens[1], 1.0) is None
    assert not circuit.is_complete
    assert table.join(circuit.tokens[0], 10.0) is None
    table.expire(10.0)
    assert circuit.is_closed
    assert len(table) == 0


def test_a_pair_has_one_circuit_and_whoever_asks_again_gets_a_new_one() -> None:
    table = CircuitTable(RelayLimits())
    first = table.open(at(1), at(2), 0.0)
    assert refusal_of(table, at(2), at(1), 1.0) == "pair-busy"
    join(table, first, 1.0)
    closed: list[None] = []
    first.on_close = lambda: closed.append(None)
    second = table.open(at(2), at(1), 2.0)
    assert closed == [None]
    assert first.is_closed
    assert not second.is_closed
    assert len(table) == 1


def test_circuits_are_bounded_in_all_and_per_host_at_either_end() -> None:
    table = CircuitTable(RelayLimits(circuits=5, circuits_per_host=2))
    here = Address("8.8.4.4", 1)
    table.open((peer(1), here), at(11), 0.0)
    kept = table.open(at(12), (peer(2), here), 0.0)
    assert refusal_of(table, (peer(3), here), at(13), 0.0) == "relay-full"
    assert refusal_of(table, at(14), (peer(4), here), 0.0) == "relay-full"
    table.close(kept)
    table.open((peer(3), here), at(13), 0.0)
    for number in range(20, 23):
        table.open(at(number), at(number + 10), 0.0)
    assert refusal_of(table, at(40), at(41), 0.0) == "relay-full"
    loopback = Address("127.0.0.1", 1)
    table = CircuitTable(RelayLimits(circuits_per_host=2))
    for number in range(9):
        table.open((peer(number), loopback), (peer(number + 10), loopback), 0.0)


def test_bytes_go_on_the_account_of_the_host_that_asked() -> None:
    table = CircuitTable(RelayLimits())
    here = Address("8.8.4.4", 1)
    first, second = (table.open((peer(n), here), at(n + 10), 0.0) for n in (1, 2))
    assert first.client == second.client
    assert table.open(at(20), (peer(3), here), 0.0).client != first.client
    loopback = Address("127.0.0.1", 1)
    first, second = (table.open((peer(n), loopback), (peer(n + 1), loopback), 0.0) for n in (30, 32))
    assert first.client != second.client
    assert RelayLimits(bytes_per_s=1.25e6).client_bytes_per_hour == 1.125e9


def test_reservations_end_unless_renewed_and_make_room() -> None:
    table = CircuitTable(RelayLimits(reservations=2))
    table.reserve(peer(1), 0.0)
    table.reserve(peer(2), 60.0)
    with pytest.raises(Refusal, match="relay-full"):
        table.reserve(peer(3), 60.0)
    table.reserve(peer(2), 80.0)
    table.reserve(peer(3), LEASE_S)
    assert [table.is_reserved(peer(n), LEASE_S) for n in (1, 2, 3)] == [False, True, True]
    table.forget(peer(2))
    assert not table.is_reserved(peer(2), LEASE_S)
    table.expire(3 * LEASE_S)
    assert table.reserved == 0
