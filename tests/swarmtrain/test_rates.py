"""Data rates as users write them."""

from __future__ import annotations

import pytest

from swarmtrain.rates import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("17Mbit", 2_125_000),
        ("17mbit/s", 2_125_000),
        ("2MB", 2_000_000),
        ("1.5 MiB", 1_572_864),
        ("800kbit", 100_000),
        ("1Gbit", 125_000_000),
        ("5000B", 5000),
        ("20Mbps", None),
        ("20mb", None),
        ("20", None),
        ("", None),
        ("-3MB", None),
        ("nanMB", None),
        ("1bit", None),
        ("1e9MB", None),
    ],
)
def test_rates_are_read_or_refused_in_one_line(text: str, bytes_per_s: float | None) -> None:
    if bytes_per_s is not None:
        assert parse_rate(text) == bytes_per_s
        return
    with pytest.raises(ValueError, match=r"^.{1,100}$"):
        parse_rate(text)


def test_rates_are_shown_as_links_are_sold() -> None:
    assert [format_rate(rate) for rate in (2_125_000, 100_000, 125_000_000)] == [
        "17 Mbit/s",
        "800 kbit/s",
        "1 Gbit/s",
    ]
