"""The report as text and JSON, and the whole command against a peer on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import trio
from swarm_peer.identity import Identity

from swarmtrain.diagnosis import Diagnosis, Measured, OwnAddress, SavedRun, WayIn, advice, clock_words, render, to_json
from swarmtrain.node import NodeConfig, open_node

LONG = (
    "outbound-only, using relay 1f2e3d4c: no answer from outside; others see this machine at 11.22.33.44, " + "x " * 99
)
FULL = Diagnosis(
    addresses=(
        OwnAddress(host="fe80::1", interface="eth0", is_told=False, why="link-local"),
        OwnAddress(host="2001:db8:1234:5678:9abc:def0:1234:5678", interface="enp0s31f6", is_told=True, why="public"),
    ),
    ways_in=(
        WayIn(address="train.example.org:7766", peer="1f2e3d4c"),
        WayIn(address="10.0.0.9:1", problem="10.0.0.9:1 refused the connection; start the peer there"),
    ),
    measured=(
        Measured(
            peer="1f2e3d4c",
            observed="11.22.33.44:50000",
            rtt_s=0.034,
            clock_ahead_s=-7300.0,
            down_bits_per_s=12.3e6,
            up_bits_per_s=1.1e6,
        ),
        Measured(peer="5a5a5a5a", rtt_s=2.5, problem="refused: rate-limited"),
    ),
    nat="symmetric",
    reach="outbound-only",
    reach_line=LONG,
    relays=("1f2e3d4c",),
    saved=(SavedRun(run="tiny (12345678)", peers=5),),
    router="192.168.1.1",
    router_says="no NAT-PMP at 192.168.1.1: no answer",
)


def test_the_report_fits_80_columns_and_says_everything() -> None:
    for found in (FULL, Diagnosis()):
        assert all(len(line) < 80 for line in render(found).splitlines())
    text = " ".join(render(FULL).split())
    for words in (
        "told: public",
        "not told: link-local",
        "peer 1f2e3d4c answers",
        "12.3 Mbit/s down, 1.1 Mbit/s up",
        "ours is 2.0 h ahead of its clock",
        "changes port numbers",
        "tiny (12345678) 5",
        "2500 ms; refused: rate-limited",
        "no NAT-PMP at 192.168.1.1",
    ):
        assert words in text, words


def test_advice_is_given_where_something_can_be_done() -> None:
    hints = advice(FULL)
    assert [hint.split()[0] for hint in hints] == ["Outbound-only,", "This", "The"]
    assert any("--limit-up" in hint for hint in hints)
    assert "--peer" in " ".join(advice(Diagnosis()))
    well = Diagnosis(
        addresses=FULL.addresses, ways_in=FULL.ways_in[:1], reach="reachable", reach_line="reachable at 1.2.3.4:5"
    )
    assert advice(well) == []
    assert render(well).endswith("Nothing to mend.")


def test_json_has_the_same_and_the_advice() -> None:
    read = json.loads(to_json(FULL))
    assert read["measured"][0]["up_bits_per_s"] == 1.1e6
    assert len(read["advice"]) == 3


def test_clocks_in_words() -> None:
    assert clock_words(0.4) == "within a second of"
    assert clock_words(600) == "10 min behind"
    assert clock_words(-30) == "30 s ahead of"


def test_the_command_examines_this_machine_and_a_peer_on_it(tmp_path: Path) -> None:
    async def main() -> None:
        config = NodeConfig(listen="127.0.0.1:0")
        async with open_node(Identity.generate(), config) as peer:
            command = [sys.executable, "-m", "swarmtrain", "--state", str(tmp_path), "doctor", "--json"]
            command += ["--listen", "127.0.0.1:0", "--peer", str(peer.addresses[0])]
            with trio.fail_after(120):
                done = await trio.run_process(
                    command, capture_stdout=True, capture_stderr=True, check=False, stdin=subprocess.DEVNULL
                )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["reach"] == "reachable"
        assert found["nat"] == "none"
        assert found["ways_in"][0]["peer"] == peer.identity.peer_id.hex()[:8]
        (measured,) = found["measured"]
        assert abs(measured["clock_ahead_s"]) < 5
        assert measured["down_bits_per_s"] > 0
        assert measured["up_bits_per_s"] > 0
        assert any(address["host"] == "127.0.0.1" for address in found["addresses"])

    trio.run(main)


def test_nobody_there_gives_its_own_exit_code_and_still_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarmtrain", "--state", str(tmp_path), "doctor", "--peer", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "refused" in done.stdout
    assert "Traceback" not in done.stderr
    assert all(len(line) < 80 for line in done.stdout.splitlines())
