"""What does a transfer get of a link that loses packets, and what do calls beside it wait? Needs Linux and root.

    sudo python benchmarks/lossy_path.py [--quick] [--json FILE]

Two namespaces, joined by the router of tests/lab; one of them behind a home link of 20 Mbit/s in both directions with
a queue of 250 kB. Everyone has cubic, as most users do. About three minutes (`--quick`: one).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from lab.network import lab_network, link, reason_to_skip  # noqa: E402 - the lab belongs to the tests

TRANSFER = str(TESTS / "lab" / "transfer.py")
MBIT = 20.0


def measure(
    size_mb: float, *, rtt_ms: float, loss: float, lanes: int, limit_up: str, calls: bool, control: str = "cubic"
) -> dict[str, Any]:
    """One transfer from home to the other; what `transfer.py fetch` prints."""
    home = link("home", "203.0.113.1/24", mbit_per_s=MBIT, delay_ms=rtt_ms / 2, loss=loss)
    with lab_network([home, link("other", "203.0.113.2/24")]) as network:
        hold = [sys.executable, TRANSFER, "hold", str(size_mb), control, limit_up]
        with network.popen("home", hold, stdout=subprocess.PIPE, text=True) as holder:
            try:
                held = json.loads(holder.stdout.readline())
                address = f"203.0.113.1:{held['port']}"
                fetch = [sys.executable, TRANSFER, "fetch", address, held["peer"], held["blob"], control, str(lanes)]
                fetched = network.run(
                    "other", [*fetch, "calls" if calls else "-"], stdout=subprocess.PIPE, text=True, check=True
                )
            finally:
                holder.kill()
    result: dict[str, Any] = json.loads(fetched.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller transfers")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    if (reason := reason_to_skip()) is not None:
        sys.exit(reason)
    small, large = (3, 20) if options.quick else (6, 40)
    lossy: dict[str, Any] = {"rtt_ms": 100, "loss": 0.005, "limit_up": "auto", "calls": False}
    clean: dict[str, Any] = {"rtt_ms": 50, "loss": 0.0, "lanes": 8, "calls": True}
    rows: list[tuple[str, dict[str, Any], int]] = [
        ("100 ms, 0.5 % loss, one connection", {**lossy, "lanes": 1}, small),
        ("100 ms, 0.5 % loss, up to 8", {**lossy, "lanes": 8}, large),
        ("50 ms, no loss, no limit", {**clean, "limit_up": "none"}, large),
        ("50 ms, no loss, limit auto", {**clean, "limit_up": "auto"}, large),
    ]
    print(
        f"{'path':38} {'MB':>4} {'Mbit/s':>7} {'of link':>8} {'steady':>7} {'calls p50 ms':>13} {'idle':>6}", flush=True
    )
    found = []
    for name, how, size_mb in rows:
        result = measure(size_mb, **how)
        found.append({"path": name, **result})
        share = result["mbit_per_s"] / MBIT
        calls = result["beside"].get("p50_ms", "")
        idle = result["idle"]["p50_ms"] if how["calls"] else ""
        steady = result["steady_mbit_per_s"] or ""
        print(
            f"{name:38} {size_mb:4} {result['mbit_per_s']:7} {share:8.0%} {steady:>7} {calls:>13} {idle:>6}", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
