"""What the monitor shows: a view of the swarm as plain data, drawn with rich or written as JSON.

Pure: what is looked at, and when, is decided by the monitor. Fits 80 columns; a peer's state is a word and a sign, so
nothing is said by colour alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarmtrain.errors import one_line

State = Literal["training", "watching", "finished", "left", "lost"]

_ORDER: tuple[State, ...] = ("training", "watching", "finished", "left", "lost")
_SIGNS: dict[State, tuple[str, str]] = {
    "training": ("▶", "green"),
    "watching": ("○", "cyan"),
    "finished": ("✓", "blue"),
    "left": ("◁", "dim"),
    "lost": ("✗", "red"),
}
_LINES_BESIDE_ROWS = 7  # of a screen: headline, gap, column titles, the line of what is not shown, note, cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer as it last described itself. None stands for "not told"."""

    peer_id: str  # hex
    state: State
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    last_partner: str | None = None  # hex
    last_relayed: bool | None = None  # whether it was met through a relay
    staleness: int | None = None  # rounds
    bytes_up: int | None = None
    bytes_down: int | None = None
    age_s: float = 0.0  # since the peer's newest record
    hivemind: str = ""  # of its bridge: starting, up or down; empty without one


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmView:
    """The swarm at one moment, as one observer knows it."""

    run_name: str
    run_id: str  # hex
    watched_s: float = 0.0
    peers: tuple[PeerRow, ...] = ()
    note: str = ""  # one line below the table, as "offline for 12 s: …"


def render(view: SwarmView, *, height: int = 24) -> RenderableType:
    """Returns the view for a terminal of ``height`` lines and at least 80 columns.

    Live peers come first; rows that do not fit are counted in a line of their own.
    """
    rows = sorted(view.peers, key=lambda row: (_ORDER.index(row.state), -(row.step or 0), row.peer_id))
    room = max(1, height - _LINES_BESIDE_ROWS)
    parts: list[RenderableType] = [_headline(view, rows), Text(), _table(rows[:room])]
    if len(rows) > room:
        parts.append(Text(f"  … and {len(rows) - room} more; --json shows all", style="dim"))
    if view.note:
        parts.append(Text(one_line(view.note, 200)))
    return Group(*parts)


def to_json(view: SwarmView) -> str:
    """Returns the view as one line of JSON; numbers that are not finite become null."""
    data = asdict(view)
    for peer in data["peers"]:
        for key, value in peer.items():
            if isinstance(value, float) and not math.isfinite(value):
                peer[key] = None
    data["counts"] = {state: sum(row.state == state for row in view.peers) for state in _ORDER}
    return json.dumps(data, sort_keys=True, allow_nan=False)


def _headline(view: SwarmView, rows: list[PeerRow]) -> Text:
    title = Text(one_line(view.run_name, 63), style="bold", no_wrap=True, overflow="ellipsis")
    title.append(f"  run {one_line(view.run_id)[:8]}  watched {duration(view.watched_s)}\n", style="dim")
    counted = [(state, sum(row.state == state for row in rows)) for state in _ORDER]
    line = ", ".join(f"{number} {state}" for state, number in counted if number) or "no peers yet"
    live = [row for row in rows if row.state == "training"]
    speed = sum(row.tokens_per_s for row in live if row.tokens_per_s is not None and math.isfinite(row.tokens_per_s))
    title.append(line + (f"; together {quantity(speed)} tokens/s" if speed else ""), style="not bold")
    return title


def _table(rows: Iterable[PeerRow]) -> Table:
    # 70 columns of text and 9 gaps: 79, so that a full 80-column terminal never wraps.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("peer", no_wrap=True, width=8)
    table.add_column("state", no_wrap=True, width=10)
    table.add_column("step", no_wrap=True, justify="right", width=13)
    table.add_column("v.loss", no_wrap=True, justify="right", width=6)
    table.add_column("tok/s", no_wrap=True, justify="right", width=5)
    table.add_column("met", no_wrap=True, width=8)
    table.add_column("stale", no_wrap=True, justify="right", width=5)
    table.add_column("up", no_wrap=True, justify="right", width=5)
    table.add_column("down", no_wrap=True, justify="right", width=5)
    table.add_column("seen", no_wrap=True, justify="right", width=5)
    for row in rows:
        sign, style = _SIGNS[row.state]
        table.add_row(
            row.peer_id[:8],
            Text(f"{sign} {row.state}", style=style),
            _steps(row),
            _loss(row.loss),
            quantity(row.tokens_per_s),
            _partner(row),
            "-" if row.staleness is None else str(row.staleness),
            quantity(row.bytes_up),
            quantity(row.bytes_down),
            duration(row.age_s),
        )
    return table


def _partner(row: PeerRow) -> str:
    """The partner's id; ~ in place of its last digit stands for a meeting through a relay."""
    partner = (row.last_partner or "-")[:8]
    return f"{partner[:7]}~" if row.last_relayed else partner


def _steps(row: PeerRow) -> str:
    if row.step is None:
        return "-"
    if row.total_steps is None:
        return str(row.step)
    text = f"{row.step}/{row.total_steps}"
    return text if len(text) <= 13 else f"{quantity(row.step)}/{quantity(row.total_steps)}"


def _loss(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if math.isfinite(value) and abs(value) < 100 else f"{value:.0g}"[:6]


def quantity(value: float | None) -> str:
    """Returns a number in at most five characters, with k, M, G or T for the powers of 1000; "-" for None."""
    if value is None or not math.isfinite(value):
        return "-"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            digits = 0 if unit == "" or abs(value) >= 99.95 else 1
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Returns a time in at most five characters: 7s, 3m20s, 4h05m, 12d."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 36000:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    if whole < 86400 * 2:
        return f"{whole // 3600}h"
    return f"{whole // 86400}d"
