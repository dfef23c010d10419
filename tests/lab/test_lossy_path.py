"""Transfers over a path with delay, rate, queue and loss, between real processes. As root; ratios only, no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.network import lab_network, link, reason_to_skip

TRANSFER = str(Path(__file__).with_name("transfer.py"))


@pytest.fixture(autouse=True)
def _lab() -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)


def transfer(
    size_mb: float, *, rtt_ms: float, loss: float = 0.0, lanes: int = 8, limit_up: str = "auto", calls: bool = False
) -> dict[str, Any]:
    """A fetch from behind a home link of 20 Mbit/s, with cubic on both ends."""
    home = link("home", "203.0.113.1/24", mbit_per_s=20, delay_ms=rtt_ms / 2, loss=loss)
    with lab_network([home, link("other", "203.0.113.2/24")], seed=3) as network:
        hold = [sys.executable, TRANSFER, "hold", str(size_mb), "cubic", limit_up]
        with network.popen("home", hold, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert holder.stdout is not None
                held = json.loads(holder.stdout.readline())
                address = f"203.0.113.1:{held['port']}"
                fetch = [sys.executable, TRANSFER, "fetch", address, held["peer"], held["blob"], "cubic", str(lanes)]
                fetched = network.run(
                    "other",
                    [*fetch, "calls" if calls else "-"],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    timeout=90,
                )
            finally:
                holder.kill()
    result: dict[str, Any] = json.loads(fetched.stdout)
    assert result["bytes"] == int(size_mb * 1e6)
    return result


@pytest.mark.processes
def test_loss_does_not_hold_a_transfer_to_what_one_connection_gets() -> None:
    alone = transfer(5, rtt_ms=100, loss=0.005, lanes=1)
    several = transfer(14, rtt_ms=100, loss=0.005)
    assert alone["connections"] == 1
    assert 2 < several["connections"] <= 9
    assert several["mbit_per_s"] > 1.5 * alone["mbit_per_s"]
    assert several["received_bytes"] < 1.1 * several["bytes"], "little is fetched twice"


@pytest.mark.processes
def test_the_automatic_limit_takes_the_queue_away_that_calls_would_wait_in() -> None:
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("this machine is too busy: calls would wait for the processor, not for the network")
    added_ms = {}
    for limit_up in ("none", "auto"):
        result = transfer(14, rtt_ms=50, limit_up=limit_up, calls=True)
        added_ms[limit_up] = result["beside"]["p50_ms"] - result["idle"]["p50_ms"]
    assert added_ms["auto"] < added_ms["none"]
