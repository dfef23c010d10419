"""The monitor's rendering: snapshots at 80 columns without colour, and JSON."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from swarmtrain.dashboard import PeerRow, SwarmView, duration, quantity, render, to_json

ALICE, BOB = "a1" * 32, "b0" * 32

VIEW = SwarmView(
    run_name="reading-group",
    run_id="c3" * 32,
    watched_s=3723,
    peers=(
        PeerRow(peer_id="1e" * 32, state="left", step=40, total_steps=400, age_s=90),
        PeerRow(peer_id="dd" * 32, state="lost", step=3, loss=math.nan, age_s=85),
        PeerRow(
            peer_id=ALICE,
            state="training",
            step=120,
            total_steps=400,
            loss=2.34567,
            tokens_per_s=12345.6,
            last_partner=BOB,
            staleness=0,
            bytes_up=12_300_000,
            bytes_down=999_999_999,
            age_s=3.2,
        ),
        PeerRow(peer_id=BOB, state="training", step=1_300_000, total_steps=4_000_000, loss=12.3, tokens_per_s=800.0),
        PeerRow(peer_id="ee" * 32, state="watching"),
        PeerRow(peer_id="f1" * 32, state="finished", step=400, total_steps=400, loss=1.5, age_s=601),
    ),
    note="one peer does not answer",
)

SNAPSHOT = """\
reading-group  run c3c3c3c3  watched 1h02m
2 training, 1 watching, 1 finished, 1 left, 1 lost; together 13.1k tokens/s

peer     state               step v.loss tok/s met      stale    up  down  seen
b0b0b0b0 ▶ training     1.3M/4.0M 12.300   800 -            -     -     -    0s
a1a1a1a1 ▶ training       120/400  2.346 12.3k b0b0b0b0     0 12.3M  1.0G    3s
eeeeeeee ○ watching             -      -     - -            -     -     -    0s
f1f1f1f1 ✓ finished       400/400  1.500     - -            -     -     -   10m
1e1e1e1e ◁ left            40/400      -     - -            -     -     - 1m30s
dddddddd ✗ lost                 3    nan     - -            -     -     - 1m25s
one peer does not answer
"""


def drawn(view: SwarmView, *, height: int = 24, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=80, height=height, force_terminal=colour, color_system="standard" if colour else None
    )
    console.print(render(view, height=height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_snapshot_without_colour() -> None:
    assert "\n".join(line.rstrip() for line in drawn(VIEW).splitlines()) + "\n" == SNAPSHOT


def test_every_line_fits_80_columns_and_states_are_not_told_by_colour_alone() -> None:
    lines = drawn(VIEW).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    signs = {line.split()[1] for line in lines[4:10]}
    assert len(signs) == 5


def test_colour_is_used_where_there_is_any() -> None:
    assert "\x1b[" in drawn(VIEW, colour=True)
    assert "\x1b" not in drawn(VIEW)


def test_an_empty_swarm_says_so() -> None:
    assert "no peers yet" in drawn(SwarmView(run_name="a", run_id="00" * 32))


@pytest.mark.parametrize("height", [10, 24, 50])
def test_a_large_swarm_keeps_to_the_screen(height: int) -> None:
    peers = tuple(PeerRow(peer_id=f"{n:064x}", state="training", step=n) for n in range(1000))
    lines = drawn(SwarmView(run_name="big", run_id="00" * 32, peers=peers, note="x"), height=height).splitlines()
    assert len(lines) < height
    shown = height - 7
    assert f"and {1000 - shown} more" in "\n".join(lines)


def test_text_from_strangers_cannot_steer_the_terminal() -> None:
    view = SwarmView(run_name="a\x1b[2Jb\nc", run_id="\x1b" * 8, note="[bold]x[/bold]\x07")
    assert "\x1b" not in drawn(view)
    assert "[bold]x[/bold]" in drawn(view)


def test_json_has_everything_and_no_nan() -> None:
    data = json.loads(to_json(VIEW), parse_constant=pytest.fail)
    assert data["counts"] == {"training": 2, "watching": 1, "finished": 1, "left": 1, "lost": 1}
    by_id = {peer["peer_id"]: peer for peer in data["peers"]}
    assert by_id[ALICE]["loss"] == 2.34567
    assert by_id[ALICE]["last_partner"] == BOB
    assert by_id["dd" * 32]["loss"] is None
    assert "\n" not in to_json(VIEW)


QUANTITIES: dict[float | None, str] = {
    None: "-",
    0: "0",
    999: "999",
    1000: "1.0k",
    99_949: "99.9k",
    99_960: "100k",
    999_600: "1.0M",
}
QUANTITIES |= {12_345_678: "12.3M", 5e9: "5.0G", 5e12: "5.0T", math.inf: "-"}
DURATIONS: dict[float, str] = {
    0: "0s",
    59.9: "59s",
    61: "1m01s",
    599: "9m59s",
    600: "10m",
    3723: "1h02m",
    40_000: "11h",
}
DURATIONS |= {400_000: "4d", -1: "-", math.nan: "-"}


@pytest.mark.parametrize(("value", "text"), QUANTITIES.items())
def test_quantities(value: float | None, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_partner_that_was_met_through_a_relay_is_marked() -> None:
    row = PeerRow(peer_id=ALICE, state="training", last_partner=BOB, last_relayed=True)
    view = SwarmView(run_name="r", run_id="c3" * 32, peers=(row,))
    assert "b0b0b0b~" in drawn(view)
    assert json.loads(to_json(view))["peers"][0]["last_relayed"] is True
