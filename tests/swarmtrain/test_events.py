"""The event log: whole JSON lines, appended, bounded, and never the cause of a failure."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from swarmtrain import events as events_module
from swarmtrain.events import EventLog


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_event_is_one_json_line_with_the_time(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "events.jsonl"
    with EventLog(path) as events:
        events.write("ready", step=1, device="cpu", note="zwei\nZeilen ✓")
        events.write("round")
    first, second = lines(path)
    assert first.pop("time") == pytest.approx(second.pop("time"), abs=60)
    assert first == {"event": "ready", "step": 1, "device": "cpu", "note": "zwei\nZeilen ✓"}
    assert second == {"event": "round"}


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("ready")
        assert len(lines(tmp_path / "events.jsonl")) == 1


def test_a_second_opening_appends(tmp_path: Path) -> None:
    for _ in range(2):
        with EventLog(tmp_path / "events.jsonl") as events:
            events.write("ready")
    assert len(lines(tmp_path / "events.jsonl")) == 2


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("progress", loss=math.nan, spread=math.inf, step=3)
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["loss"], event["spread"], event["step"]) == (None, None, 3)


def test_the_log_stops_at_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_EVENT_LOG_BYTES", 1000)
    for _ in range(3):
        with EventLog(tmp_path / "events.jsonl") as events:
            for step in range(100):
                events.write("progress", step=step)
    assert (tmp_path / "events.jsonl").stat().st_size < 1100
    assert lines(tmp_path / "events.jsonl")


def test_a_full_disk_costs_the_event_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    events = EventLog(full)
    with caplog.at_level(logging.WARNING):
        events.write("progress", step=1)
        events.write("progress", step=2)
    assert "not written" in caplog.text
    with events:
        pass  # what could not be written must not come up again when the log is closed


def test_a_closed_log_takes_no_more_and_complains_to_the_log_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    with events:
        pass
    with caplog.at_level(logging.WARNING):
        events.write("late")
    assert "not written" in caplog.text


def test_what_json_cannot_hold_costs_the_event_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EventLog(tmp_path / "events.jsonl") as events, caplog.at_level(logging.WARNING):
        events.write("strange", value=object())
        events.write("nested", value=[math.nan])
        events.write("ready")
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")] == ["ready"]


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        EventLog(tmp_path / "file" / "events.jsonl")
