"""`python -m fuzz NAME`: feeds one target with inputs that libFuzzer finds by coverage (needs atheris)."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

PACKAGES = ["swarmtrain", "swarm_peer", "swarm_compression"]


def main() -> None:
    """Runs libFuzzer, which ends the process itself: with 0 when the time is over, with another code at a defect."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", help="which decoder to attack; without it all are listed")
    parser.add_argument("--seconds", type=int, default=60, help="for how long (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    parser.add_argument("--corpus", type=Path, help="where to keep the inputs that reach new code (default: nowhere)")
    parser.add_argument("--input", type=Path, help="run this one file, which a former run found, and show what happens")
    options = parser.parse_args()
    if options.target is None or options.input:
        targets = importlib.import_module("fuzz.targets").TARGETS
        if options.input:
            targets[options.target](options.input.read_bytes())
        else:
            print("\n".join(targets))
        return
    try:
        import atheris
    except ImportError:
        parser.exit(2, "fuzz: error: atheris is not installed; run: pip install --group fuzz (Python 3.11 to 3.13)\n")
    # What is imported from here on reports which branches an input takes.
    with atheris.instrument_imports(include=PACKAGES):
        targets = importlib.import_module("fuzz.targets")
    if options.target not in targets.TARGETS:
        parser.error(f"no target {options.target!r}; there are: {', '.join(targets.TARGETS)}")
    with tempfile.TemporaryDirectory() as found:
        arguments = [
            sys.argv[0],
            f"-max_total_time={options.seconds}",
            f"-seed={options.seed}",
            "-max_len=4096",
            "-timeout=5",
            "-rss_limit_mb=1024",
            "-malloc_limit_mb=256",
            "-print_final_stats=1",
            str(options.corpus or found),
            str(targets.CORPUS / options.target),
        ]
        if options.corpus:
            options.corpus.mkdir(parents=True, exist_ok=True)
        atheris.Setup(arguments, targets.TARGETS[options.target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
