"""Real processes of which only the bootstrap peer can be dialled: all others meet through it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_end_to_end import command, has_ended, swarm_of, wait_until

from swarmtrain.local_swarm import PeerProcess

pytestmark = pytest.mark.processes


def met(peer: PeerProcess) -> dict[str, bool]:
    """The partners of a peer's exchanges, and whether the last one with each went through a relay."""
    peer.read_events()
    mixed = [e for e in peer.events if e["event"] == "exchange" and e["outcome"] == "mixed"]
    return {event["partner"]: event["relayed"] for event in mixed}


def test_three_outbound_only_peers_all_exchange_with_each_other(tmp_path: Path) -> None:
    with swarm_of(tmp_path, steps=100_000, inner=20) as (swarm, address):
        peers = [swarm.join(f"peer {n}", "tiny", address, options=["--relay-only"]) for n in "abc"]

        def all_have_met() -> bool:
            assert not any(map(has_ended, peers))
            return all(len(met(peer)) == len(peers) - 1 for peer in peers)

        wait_until(all_have_met, "every pair has exchanged")
        assert all(all(met(peer).values()) for peer in peers), "by relay, for nobody can be dialled"
        # Counted at the peer that began last: the others train alone until then.
        rounds = min(len([e for e in peer.events if e["event"] == "round"]) for peer in peers)
        assert rounds <= 60
        for peer in peers:
            assert "outbound-only, using relay" in peer.log.read_text()

        def all_are_shown_as_relayed() -> bool:
            shown = command("monitor", "--run-id", "tiny", "--peer", address, "--once", "--json")
            return sum(bool(row["last_relayed"]) for row in json.loads(shown.stdout)["peers"]) == len(peers)

        wait_until(all_are_shown_as_relayed, "news of the exchanges has come to the monitor")
        assert "relays for peers that cannot reach each other" in (tmp_path / "swarm" / "bootstrap.log").read_text()
