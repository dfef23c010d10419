"""How small and how fast are weight patches? Real AdamW deltas, every codec in one run, ratios to a plain copy.

    python benchmarks/compression.py [--quick] [--json FILE]

Trains a 10M-parameter language model (FP32 master weights, BF16 snapshots) on the source text of Python's standard
library, then goes on from the same point with each learning rate and takes snapshots after 1, 8 and 50 steps. What is
measured are the differences between those snapshots, and after 1 and 8 steps the next such difference too, with the
history that both sides then have. One thread; nine minutes (`--quick`: five).

Rivals, each written in a few lines below, as other public systems do it:
    int32 + values          raw positions and new values (verl, vLLM, TRL): 6 bytes per change
    int32 + values, zstd    the same as first differences in one zstd-1 frame (PULSE v2)
    u16 gaps + XOR, zstd    NeMo-DCR's sparse form
    dense XOR, zstd         slime's form
Lossy baselines: ternary (TernGrad), rank 4 (PowerSGD, one power iteration), DCT top-k (DeMo), 12-bit top-k
(SparseLoCo). Where hivemind is installed (`pip install 'swarmtrain[hivemind]' 'numpy<2.4'`), its own codecs too.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import swarm_compression as sc
import torch
from lossless_rivals import RIVALS, floors
from lossy_codecs import measure_lossy, print_lossy
from real_deltas import LEARNING_RATES, Deltas, State, make_deltas
from swarm_compression import acceleration


def fastest(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the least processor time of some runs (other programs take wall time, and spoil caches, but no more)."""
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_sizes(deltas: dict[tuple[float, int], tuple[State, State]]) -> list[dict[str, Any]]:
    rows = []
    for (rate, steps), (base, new) in deltas.items():
        visible = sc.count_visible(new, base)
        elements = sum(array.size for array in base.values())
        plain, given = floors(new, base)
        sizes = {name: rival(new, base) for name, rival in RIVALS.items()}
        for level in ("fast", "default", "best"):
            patch = sc.encode_patch(new, base, level=level)
            assert sc.state_hash(sc.apply_patch(patch, base)) == sc.state_hash(new)
            sizes[f"patch, {level}"] = len(patch)
        sizes["floor: independent"] = round(plain)
        sizes["floor: old exponent"] = round(given)
        rows.append(
            {
                "lr": rate,
                "steps": steps,
                "density": visible / elements,
                "visible": visible,
                "elements": elements,
                "bytes": sizes,
                "bytes_per_change": {name: size / visible for name, size in sizes.items()},
                "ratio_to_bf16": {name: 2 * elements / size for name, size in sizes.items()},
                "ratio_to_fp32": {name: 4 * elements / size for name, size in sizes.items()},
                "estimate": sc.estimate_patch_size(new, base) / sizes["patch, default"],
            }
        )
    return rows


def print_sizes(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["bytes"])
    print("\nBytes per changed element\n")
    print("| lr | steps | density | " + " | ".join(names) + " | ratio to BF16 (default) |")
    print("|---|---|---|" + "---|" * (len(names) + 1))
    for row in rows:
        cells = " | ".join(f"{row['bytes_per_change'][name]:.2f}" for name in names)
        ratio = row["ratio_to_bf16"]["patch, default"]
        print(f"| {row['lr']:g} | {row['steps']} | {row['density']:.2%} | {cells} | {ratio:.1f}x |")


def measure_history(deltas: Deltas, later: dict[tuple[float, int], State]) -> list[dict[str, Any]]:
    """The second of two patches: what the state before its base saves."""
    rows = []
    for (rate, steps), new in later.items():
        history, base = deltas[rate, steps]
        plain = sc.encode_patch(new, base, level="best")
        patch = sc.encode_patch(new, base, level="best", history=history)
        assert sc.state_hash(sc.apply_patch(patch, base, history=history)) == sc.state_hash(new)
        visible = sc.count_visible(new, base)
        rows.append(
            {
                "lr": rate,
                "steps": steps,
                "density": visible / sum(array.size for array in base.values()),
                "best": len(plain) / visible,
                "history": len(patch) / visible,
                "saved": 1 - len(patch) / len(plain),
            }
        )
    return rows


def print_history(rows: list[dict[str, Any]]) -> None:
    print("\nThe second of two patches, bytes per changed element, without and with the state before its base\n")
    print("| lr | steps | density | best | best, with history | saved |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = f"{row['density']:.2%} | {row['best']:.3f} | {row['history']:.3f} | {row['saved']:.1%}"
        print(f"| {row['lr']:g} | {row['steps']} | {cells} |")


def measure_speed(base: State, new: State, repeats: int) -> list[dict[str, Any]]:
    """Time on a state of at least 64M elements, so that nothing fits a cache; MB of BF16 model per second."""
    copies = max(1, round(6.4e7 / sum(array.size for array in base.values())))
    # Each copy is shifted by another distance, or the codec would find them to be tied tensors.
    base, new = (
        {f"{n}.{name}": np.roll(array, n) for n in range(copies) for name, array in state.items()}
        for state in (base, new)
    )
    size = sum(array.nbytes for array in base.values())
    targets = {name: np.empty_like(array) for name, array in base.items()}
    digest = sc.digest_state(base)

    def copy() -> None:
        for name, array in base.items():
            np.copyto(targets[name], array)

    copy()
    copy_s, _ = fastest(copy, repeats + 2)
    rows: list[dict[str, Any]] = []

    def add(what: str, seconds: float, **more: float) -> None:
        rows.append({"what": what, "mb_per_s": size / seconds / 1e6, "to_copy": copy_s / seconds, **more})

    add("copy", copy_s)
    hash_s, _ = fastest(lambda: sc.state_hash(base), repeats)
    add("state hash (BLAKE3)", hash_s)
    for compiled in (False, True):
        if acceleration.use_compiled(compiled) is not compiled:
            print("\nnumba is not installed: the speed of compiled loops is left out", flush=True)
            break
        for level in ("fast", "default", "best"):
            if compiled:
                time_level(new, base, targets, level, 1)  # until now it is not
            copy_s = min(copy_s, fastest(copy, repeats)[0])
            for what, seconds, peak in time_level(new, base, targets, level, repeats):
                loops = "numba" if compiled else "NumPy"
                add(f"{loops}, {level}: {what}", seconds, peak_memory=peak / size)
    layout = sc.Layout.of(base)
    seconds, data = fastest(lambda: sc.encode_dense(base), repeats)
    add("dense: encode", seconds, share=len(data) / size)
    seconds, _ = fastest(lambda: sc.encode_dense(base, digest=digest), repeats)
    add("dense: encode, digest known", seconds)
    seconds, _ = fastest(lambda: sc.decode_dense(data, layout), repeats)
    add("dense: decode", seconds)
    return rows


def time_level(new: State, base: State, targets: State, level: str, repeats: int) -> list[tuple[str, float, int]]:
    """Return (what, seconds, peak extra bytes) of encoding and applying. Streams are thrown away as they come."""
    known = {"new_digest": sc.digest_state(new), "base_digest": sc.digest_state(base)}
    patch = sc.encode_patch(new, base, level=level)

    def encode(**digests: sc.Digest) -> None:
        collections.deque(sc.stream_patch(new, base, level=level, **digests), maxlen=0)

    def apply(**options: object) -> None:
        sc.apply_patch_in_place(patch, targets, base_digest=known["base_digest"], **options)

    def restore() -> None:
        for name, array in base.items():
            np.copyto(targets[name], array)

    peak = peak_bytes(encode)
    rows = [
        ("encode", fastest(encode, repeats)[0], peak),
        ("encode, base digest known", fastest(lambda: encode(base_digest=known["base_digest"]), repeats)[0], peak),
        ("encode, both digests known", fastest(lambda: encode(**known), repeats)[0], peak),
    ]
    restore()
    peak = peak_bytes(apply)
    for what, options in (
        ("apply in place, base digest known", {}),
        ("the same, result not verified", {"verify": False}),
    ):
        seconds = math.inf
        for _ in range(repeats):
            restore()
            seconds = min(seconds, fastest(lambda options=options: apply(**options), 1)[0])
        rows.append((what, seconds, peak))
    return rows


def print_speed(rows: list[dict[str, Any]], density: float) -> None:
    print(f"\nSpeed at {density:.2%} density, one core\n")
    print("| what | MB/s of BF16 model | ratio to copy | peak extra memory, share of the model |\n|---|---|---|---|")
    for row in rows:
        peak = f"{row['peak_memory']:.3f}" if "peak_memory" in row else ""
        print(f"| {row['what']} | {row['mb_per_s']:,.0f} | {row['to_copy']:.3f} | {peak} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three learning rates, less training, fewer repeats")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates = (1e-6, 3e-6, 1e-4) if options.quick else LEARNING_RATES
    deltas, later = make_deltas(40 if options.quick else 150, rates)
    sizes = measure_sizes(deltas)
    print_sizes(sizes)
    history = measure_history(deltas, later)
    print_history(history)
    # The densities nearest to 1 % and 2 %: where the speed goals are stated.
    speed = []
    for goal in (0.01, 0.02):
        chosen = min(sizes, key=lambda row, goal=goal: abs(math.log(row["density"] / goal)))
        if any(row["density"] == chosen["density"] for row in speed):
            continue
        rows = measure_speed(*deltas[chosen["lr"], chosen["steps"]], repeats=2 if options.quick else 4)
        print_speed(rows, chosen["density"])
        speed += [{**row, "density": chosen["density"]} for row in rows]
    lossy = measure_lossy(*deltas[rates[-1], 50])
    print_lossy(lossy, rates[-1], 50)
    if options.json:
        report = {
            "machine": f"{os.cpu_count()} CPUs",
            "sizes": sizes,
            "history": history,
            "speed": speed,
            "lossy": lossy,
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
