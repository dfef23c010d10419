"""What `swarmtrain doctor` has found, as plain data: as text of 80 columns, as JSON, and as advice. Pure."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Final

from swarmtrain.reachability import Nat, ReachKind

_WIDTH: Final = 79
CLOCK_TOLERANCE_S: Final = 5.0
SLOW_BITS_PER_S: Final = 2e6
_NAT_WORDS: Final = {
    "none": "no NAT between",
    "port-preserving": "a NAT that keeps port numbers (peers behind such ones can meet directly)",
    "symmetric": "a NAT that changes port numbers (others reach this one through relays)",
    "unknown": "not known",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAddress:
    """An address of this machine, whether it is told to others, and why."""

    host: str
    interface: str
    is_told: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayIn:
    """An entry point: who answers there, or what is wrong."""

    address: str
    peer: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured with one peer. `clock_ahead_s`: by how much its clock is ahead of ours. Speeds in bit/s."""

    peer: str
    observed: str | None = None
    rtt_s: float | None = None
    clock_ahead_s: float | None = None
    down_bits_per_s: float | None = None
    up_bits_per_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """How many peers of a run earlier starts have saved."""

    run: str
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings. `router` is the private default router, `router_says` what it answers to NAT-PMP or UPnP."""

    addresses: tuple[OwnAddress, ...] = ()
    listens_on: tuple[str, ...] = ()
    ways_in: tuple[WayIn, ...] = ()
    measured: tuple[Measured, ...] = ()
    nat: Nat = "unknown"
    reach: ReachKind = "unknown"
    reach_line: str = ""
    relays: tuple[str, ...] = ()
    saved: tuple[SavedRun, ...] = ()
    router: str | None = None
    router_says: str = ""


def advice(found: Diagnosis) -> list[str]:
    """What the user may do, most urgent first; empty when all is well."""
    lines = []
    reached = [way for way in found.ways_in if way.problem is None]
    if not any(address.is_told for address in found.addresses):
        lines.append("This machine has no address that others could use: is the network cable or the Wi-Fi on?")
    if found.ways_in and not reached:
        lines.append("No entry point answers: ask for a current invite link, or see above what is wrong with each.")
    if not found.ways_in and not found.saved:
        lines.append("Name a peer with --peer HOST:PORT: without one, nothing can be measured.")
    if found.reach in ("partial", "outbound-only"):
        lines.append(found.reach_line[0].upper() + found.reach_line[1:] + ".")
    offsets = [m.clock_ahead_s for m in found.measured if m.clock_ahead_s is not None]
    if offsets and min(map(abs, offsets)) > CLOCK_TOLERANCE_S:
        lines.append(
            f"This machine's clock is {clock_words(min(offsets, key=abs))} the others'. Training does not mind; times "
            "in logs will. Switch on the system's time synchronisation."
        )
    ups = [m.up_bits_per_s for m in found.measured if m.up_bits_per_s]
    if ups and max(ups) < SLOW_BITS_PER_S:
        lines.append(
            f"The uplink carries {max(ups) / 1e6:.1f} Mbit/s: exchanges of large models will be few. --limit-up keeps "
            "it usable for other things."
        )
    return lines


def render(found: Diagnosis) -> str:
    """Returns the report for people, at most 79 columns wide."""
    lines: list[str] = []

    def section(title: str, rows: list[tuple[str, str]], otherwise: str = "") -> None:
        lines.append(title)
        for head, text in rows:
            lines.extend(_row(head, text))
        if not rows and otherwise:
            lines.append(f"  {otherwise}")
        lines.append("")

    told = sorted(found.addresses, key=lambda address: not address.is_told)
    section(
        "Addresses of this machine",
        [(f"{a.host} ({a.interface})", f"{'told' if a.is_told else 'not told'}: {a.why}") for a in told],
        "none found",
    )
    section(
        "Ways in",
        [(way.address, way.problem or f"peer {way.peer} answers") for way in found.ways_in],
        "none given, none saved",
    )
    rows = []
    for one in found.measured:
        rows.append((f"peer {one.peer}", "; ".join(filter(None, [_link_words(one), one.problem]))))
        if one.clock_ahead_s is not None:
            rows.append(("  clock", f"ours is {clock_words(one.clock_ahead_s)} its clock"))
    if rows:
        section("Links", rows)
    rows = [("NAT", _NAT_WORDS[found.nat]), ("dialled from outside", found.reach_line)]
    rows.append(("relays in use", ", ".join(found.relays) or "none"))
    if found.relays:
        rows.append(("", "those who ask a relay share it alike; who has had a quarter of its hour stands behind them"))
    if found.router is not None:
        rows.append((f"router {found.router}", found.router_says))
    section("As others see this machine", rows)
    section("Saved peers", [(saved.run, f"{saved.peers}") for saved in found.saved], "none")
    hints = advice(found)
    lines.append("Advice" if hints else "Nothing to mend.")
    for hint in hints:
        lines.extend(textwrap.wrap(hint, _WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return "\n".join(lines)


def to_json(found: Diagnosis) -> str:
    """Returns everything, advice included, as one line of JSON."""
    return json.dumps({**asdict(found), "advice": advice(found)}, sort_keys=True, allow_nan=False)


def clock_words(ahead_s: float) -> str:
    """Says how our clock stands to one that is `ahead_s` ahead of it."""
    size = abs(ahead_s)
    if size < 1.0:
        return "within a second of"
    text = f"{size:.0f} s" if size < 120 else f"{size / 60:.0f} min" if size < 7200 else f"{size / 3600:.1f} h"
    return f"{text} {'behind' if ahead_s > 0 else 'ahead of'}"


def _link_words(one: Measured) -> str:
    parts = [f"{one.rtt_s * 1000:.0f} ms" if one.rtt_s is not None else ""]
    if one.down_bits_per_s is not None:
        parts.append(f"{one.down_bits_per_s / 1e6:.1f} Mbit/s down")
    if one.up_bits_per_s is not None:
        parts.append(f"{one.up_bits_per_s / 1e6:.1f} Mbit/s up")
    if one.observed is not None:
        parts.append(f"sees us at {one.observed}")
    return ", ".join(filter(None, parts))


def _row(head: str, text: str) -> list[str]:
    label = f"  {head:<26} "
    if len(label) > 40:
        return [label.rstrip(), *textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return textwrap.wrap(text or "-", _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
