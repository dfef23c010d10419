from __future__ import annotations

import pytest
from swarm_peer.addresses import Address
from swarm_peer.dial_back import Outcome, Verdict
from swarm_peer.identity import PeerId

from swarmtrain.reachability import is_behind_nat, judge_reach, nat_kind

HOME = (Address("192.168.1.7", 7766), Address("fd00::7", 7766))
OUTSIDE = Address("11.22.33.44", 50123)


def witness(outcome: Outcome, *, observed: Address = OUTSIDE, helper: str | None = "8.8.8.8") -> Verdict:
    return Verdict(PeerId(b"\1" * 32), outcome, observed, Address(helper, 7766) if helper else None)


def test_two_witnesses_of_different_networks_are_believed_on_the_internet() -> None:
    both = [witness(Outcome.REACHED), witness(Outcome.REACHED, helper="9.9.9.9")]
    reach = judge_reach(7766, HOME, both)
    assert (reach.kind, reach.at, reach.line) == (
        "reachable",
        Address("11.22.33.44", 7766),
        "reachable at 11.22.33.44:7766",
    )


@pytest.mark.parametrize(
    ("helpers", "words"),
    [
        (["8.8.8.8"], "reachable at 11.22.33.44:7766, confirmed by one peer only"),
        ([None], "confirmed by one peer only"),
        (["8.8.8.8", "8.8.9.9"], "confirmed by 2 peers of one network only"),
        (["2001:db8:1::8", "2001:db8:2::9"], "confirmed by 2 peers of one network only"),
        (["8.8.8.8", "192.168.1.8"], "confirmed by one peer only"),
    ],
)
def test_witnesses_of_one_network_are_named_as_such(helpers: list[str | None], words: str) -> None:
    reach = judge_reach(7766, HOME, [witness(Outcome.REACHED, helper=helper) for helper in helpers])
    assert reach.kind == "reachable"
    assert words in reach.line


def test_a_network_that_vouches_for_one_address_does_not_vouch_for_another() -> None:
    v6 = Address("2a00::1", 50123)
    reach = judge_reach(7766, HOME, [witness(Outcome.REACHED), witness(Outcome.REACHED, observed=v6, helper="2a01::1")])
    assert "confirmed by one peer only" in reach.line


def test_witnesses_that_disagree_are_both_told_of() -> None:
    some = [witness(Outcome.REACHED), witness(Outcome.REACHED, helper="9.9.9.9")]
    reach = judge_reach(7766, HOME, [*some, witness(Outcome.TIMED_OUT, helper="7.7.7.7")], ["1f2e3d4c"])
    assert (reach.kind, reach.at) == ("partial", Address("11.22.33.44", 7766))
    assert reach.line == (
        "partially reachable, using relay 1f2e3d4c: 2 peers get through at 11.22.33.44:7766, 1 peer does not "
        "(no answer from outside); a firewall or router lets in some networks only"
    )


def test_open_on_ipv6_and_closed_on_ipv4_names_both_and_the_port_to_forward() -> None:
    v6 = witness(Outcome.REACHED, observed=Address("2a00::1", 50123), helper="2a01::1")
    line = judge_reach(7766, HOME, [v6, witness(Outcome.TIMED_OUT), witness(Outcome.TIMED_OUT)]).line
    assert "1 peer gets through at [2a00::1]:7766, 2 peers do not at 11.22.33.44 (no answer" in line
    assert "forward TCP port 7766" in line


def test_one_witness_is_enough_in_a_local_network() -> None:
    local = witness(Outcome.REACHED, observed=Address("192.168.1.7", 50123), helper="192.168.1.8")
    assert judge_reach(7766, HOME, [local]).line == "reachable at 192.168.1.7:7766"


def test_a_local_witness_does_not_speak_for_the_internet() -> None:
    local = witness(Outcome.REACHED, observed=Address("192.168.1.7", 50123), helper="192.168.1.8")
    assert judge_reach(7766, HOME, [local, witness(Outcome.TIMED_OUT)]).kind == "outbound-only"


def test_neighbours_that_see_us_at_the_routers_address_do_not_speak_for_the_internet() -> None:
    hairpin = witness(Outcome.REACHED, helper="192.168.1.8")
    assert judge_reach(7766, HOME, [hairpin, witness(Outcome.TIMED_OUT)]).kind == "outbound-only"


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
