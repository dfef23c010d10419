from __future__ import annotations

import pytest
from swarm_peer.addresses import Address
from swarm_peer.dial_back import Outcome, Verdict
from swarm_peer.identity import PeerId

from swarmtrain.reachability import Witness, is_behind_nat, judge_reach, nat_kind

HOME = (Address("192.168.1.7", 7766), Address("fd00::7", 7766))
OUTSIDE = Address("11.22.33.44", 50123)


def witness(outcome: Outcome, *, observed: Address = OUTSIDE, helper: str | None = "8.8.8.8") -> Witness:
    where = Address(helper, 7766) if helper else None
    return Witness(Verdict(PeerId(b"\1" * 32), outcome, observed), where)


def test_two_witnesses_of_different_networks_are_believed_on_the_internet() -> None:
    both = [witness(Outcome.REACHED), witness(Outcome.REACHED, helper="9.9.9.9")]
    reach = judge_reach(7766, HOME, both)
    assert (reach.kind, reach.at, reach.line) == (
        "reachable",
        Address("11.22.33.44", 7766),
        "reachable at 11.22.33.44:7766",
    )
    neighbours = [witness(Outcome.REACHED), witness(Outcome.REACHED, helper="8.8.9.9")]
    assert "says one peer" in judge_reach(7766, HOME, neighbours).line
    assert "says one peer" in judge_reach(7766, HOME, [witness(Outcome.REACHED, helper=None)]).line


def test_one_witness_is_enough_in_a_local_network() -> None:
    local = witness(Outcome.REACHED, observed=Address("192.168.1.7", 50123), helper="192.168.1.8")
    assert judge_reach(7766, HOME, [local]).line == "reachable at 192.168.1.7:7766"


def test_a_local_witness_does_not_speak_for_the_internet() -> None:
    local = witness(Outcome.REACHED, observed=Address("192.168.1.7", 50123), helper="192.168.1.8")
    assert judge_reach(7766, HOME, [local, witness(Outcome.TIMED_OUT)]).kind == "outbound-only"


def test_behind_a_nat_the_line_names_both_addresses_the_port_and_the_flags() -> None:
    reach = judge_reach(7766, HOME, [witness(Outcome.TIMED_OUT)], ["1f2e3d4c"])
    assert reach.kind == "outbound-only"
    for words in (
        "outbound-only, using relay 1f2e3d4c",
        "no answer from outside",
        "at 11.22.33.44, not at 192.168.1.7",
        "forward TCP port 7766",
        "--announce 11.22.33.44:7766",
    ):
        assert words in reach.line
    assert "\n" not in reach.line


def test_behind_a_firewall_alone_the_line_names_the_port() -> None:
    here = Address("11.22.33.44", 7766)
    reach = judge_reach(7766, [here], [witness(Outcome.TIMED_OUT)])
    assert "allow incoming TCP port 7766 in the firewall" in reach.line
    assert "router" not in reach.line


def test_without_witnesses_nothing_is_claimed_and_without_a_port_nothing_is_asked() -> None:
    assert judge_reach(7766, HOME, []).kind == "unknown"
    assert judge_reach(None, (), [], ["1f2e3d4c"]).line.startswith("outbound-only, using relay 1f2e3d4c")


@pytest.mark.parametrize(
    ("pairs", "kind"),
    [
        ([], "unknown"),
        ([(Address("11.22.33.44", 5), Address("11.22.33.44", 5))], "none"),
        ([(Address("192.168.1.7", 5), Address("11.22.33.44", 5))], "port-preserving"),
        ([(Address("192.168.1.7", 5), Address("11.22.33.44", 6))], "symmetric"),
        (
            [
                (Address("192.168.1.7", 5), Address("11.22.33.44", 5)),
                (Address("192.168.1.7", 7), Address("11.22.33.44", 61000)),
            ],
            "symmetric",
        ),
        ([(Address("::ffff:10.0.0.1", 5), Address("10.0.0.1", 9))], "none"),
    ],
)
def test_the_nat_is_told_from_both_ends_of_connections(pairs: list[tuple[Address, Address]], kind: str) -> None:
    assert nat_kind(pairs) == kind


def test_an_address_that_differs_is_a_nat() -> None:
    assert is_behind_nat(HOME, OUTSIDE)
    assert not is_behind_nat(HOME, Address("192.168.1.7", 1))
    assert not is_behind_nat((), OUTSIDE)
