"""What a training peer shows: one line that fits, without colour, and plain lines where no terminal is."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from swarmtrain import progress as progress_module
from swarmtrain.progress import PLAIN_INTERVAL_S, Progress, bar, brief, training_line
from swarmtrain.status import Status

counts = st.integers(0, 10**12)


def plain_console(width: int = 80) -> tuple[io.StringIO, Console]:
    out = io.StringIO()
    return out, Console(file=out, width=width, force_terminal=False, highlight=False)


@given(
    step=counts,
    total=counts,
    loss=st.floats(0, 1e6) | st.just(math.nan),
    speed=st.floats(0, 1e9),
    exchanges=st.integers(0, 10**7),
    sent=st.integers(0, 10**16),
    share=st.floats(0, 1),
    peers=st.integers(0, 10_000),
)
def test_the_line_fits_into_80_columns(
    step: int, total: int, loss: float, speed: float, exchanges: int, sent: int, share: float, peers: int
) -> None:
    status = Status(
        step=step,
        total_steps=total,
        loss=loss,
        tokens_per_s=speed,
        exchanges=exchanges,
        bytes_sent=sent,
        exchange_share=share,
    )
    line = training_line(status, peers)
    assert len(line) <= 80
    assert line.isascii()
    assert line.isprintable()


def test_the_line_says_where_training_stands() -> None:
    status = Status(
        step=200,
        total_steps=400,
        loss=2.3456,
        tokens_per_s=12_345.0,
        exchanges=12,
        bytes_sent=12_345_678,
        exchange_share=0.0123,
    )
    for part in ("200/400", "loss 2.346", "12.3k tok/s", "peers 3", "met 12", "net 1.2%", "up 12.3MB"):
        assert part in training_line(status, 3)
    assert "loss -" in training_line(Status(), 0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9999, "9999"),
        (10_000, "10.0k"),
        (99_960, "100k"),
        (999_499, "999k"),
        (999_500, "1.0M"),
        (1.5e15, "1.5P"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_numbers_are_brief(number: float, text: str) -> None:
    assert brief(number) == text


@given(st.floats(-10, 10), st.integers(0, 40))
def test_a_bar_keeps_its_width(share: float, width: int) -> None:
    assert len(bar(share, width)) == width + 2


def test_the_bar_begins_empty_and_ends_full() -> None:
    assert set(bar(0.0)[1:-1]) == {"."}
    assert set(bar(1.0)[1:-1]) == {"#"}


def test_without_a_terminal_lines_are_plain_and_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    out, console = plain_console()
    with Progress(console) as progress:
        progress.show_training(Status(step=1, total_steps=10), 0)
        progress.show_training(Status(step=2, total_steps=10), 0)
        now += PLAIN_INTERVAL_S
        progress.show_training(Status(step=3, total_steps=10), 0)
        progress.show_transfer("weights", 5_000_000, 10_000_000)
        progress.say("done")
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1/10", "3/10"]
    assert lines[2:] == ["done"]
    assert "\x1b" not in out.getvalue()


def test_transfers_are_shown_in_megabytes() -> None:
    out, console = plain_console()
    with Progress(console) as progress:
        progress.show_transfer("weights", 5_000_000, 10_000_000)
    assert out.getvalue() == "weights [########........] 5.0/10.0 MB\n"


def test_an_empty_transfer_is_complete() -> None:
    out, console = plain_console()
    Progress(console).show_transfer("weights", 0, 0)
    assert "[################]" in out.getvalue()


def test_lines_are_neither_markup_nor_wrapped() -> None:
    out, console = plain_console(width=20)
    line = "[bold]" + "x" * 100 + "[/nonsense]"
    Progress(console).say(line)
    assert out.getvalue() == line + "\n"


def test_on_a_terminal_the_line_is_one_line_and_goes_away() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, force_terminal=True, color_system=None, highlight=False)
    with Progress(console) as progress:
        progress.show_training(Status(step=1, total_steps=10), 0)
        progress.say("a lasting line")
    assert "a lasting line" in out.getvalue()
    assert "…" in out.getvalue()


def test_a_failure_inside_gives_the_terminal_back() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, force_terminal=True, color_system=None)
    with pytest.raises(KeyError), Progress(console):
        raise KeyError
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")
