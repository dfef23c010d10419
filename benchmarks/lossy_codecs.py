"""Bytes against error of one pre-training difference: our lossy codecs, baselines from papers, hivemind's codecs."""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any

import numpy as np
import swarm_compression as sc
import torch
from real_deltas import BF16, State
from swarm_compression.floats import to_float32


def lossy_baselines(moved: dict[str, np.ndarray]) -> dict[str, tuple[float, dict[str, np.ndarray]]]:
    """Name to (bytes, decoded difference); matrices only where the method needs them."""
    ternary, low_rank, dct = {}, {}, {}
    sizes = dict.fromkeys(("ternary", "rank 4", "DCT top-k"), 0.0)
    rng = np.random.default_rng(0)
    n = np.arange(64)
    basis = np.cos(np.pi * (n[:, None] + 0.5) * n[None, :] / 64) * math.sqrt(2 / 64)
    basis[:, 0] /= math.sqrt(2)
    for name, delta in moved.items():
        limit = 2.5 * float(delta.std()) + 1e-30
        clipped = np.clip(delta, -limit, limit)
        scale = float(np.abs(clipped).max()) + 1e-30
        ternary[name] = (np.sign(clipped) * (rng.random(delta.shape) < np.abs(clipped) / scale) * scale).astype(
            np.float32
        )
        sizes["ternary"] += delta.size / 4 + 4
        if delta.ndim == 2 and not delta.shape[0] % 64 and not delta.shape[1] % 64:
            q = rng.standard_normal((delta.shape[1], 4)).astype(np.float32)
            p, _ = np.linalg.qr(delta @ q)
            low_rank[name] = p @ (delta.T @ p).T
            sizes["rank 4"] += 4 * 4 * sum(delta.shape)
            tiles = delta.reshape(delta.shape[0] // 64, 64, -1, 64).transpose(0, 2, 1, 3)
            spectrum = np.einsum("ia,xyij,jb->xyab", basis, tiles, basis).reshape(-1, 4096)
            weakest = np.argpartition(np.abs(spectrum), 4096 - 64, axis=1)[:, : 4096 - 64]
            np.put_along_axis(spectrum, weakest, 0, axis=1)
            back = np.einsum("ia,xyab,jb->xyij", basis, spectrum.reshape(tiles.shape), basis)
            dct[name] = back.transpose(0, 2, 1, 3).reshape(delta.shape).astype(np.float32)
            sizes["DCT top-k"] += delta.size / 4096 * 64 * (2 + 2)  # u16 index, BF16 value
        else:
            low_rank[name] = dct[name] = delta
            sizes["rank 4"] += 4 * delta.size
            sizes["DCT top-k"] += 4 * delta.size
    decoded = {"ternary": ternary, "rank 4": low_rank, "DCT top-k": dct}
    return {name: (sizes[name], decoded[name]) for name in sizes}


def measure_lossy(base: State, new: State) -> list[dict[str, Any]]:
    elements = sum(array.size for array in base.values())
    floats = [{name: to_float32(array, BF16) for name, array in state.items()} for state in (base, new)]
    moved = {name: floats[1][name] - floats[0][name] for name in base}
    norm = math.sqrt(sum(float(np.square(delta).sum()) for delta in moved.values()))
    rows = []

    def add(what: str, size: float, got: dict[str, np.ndarray]) -> None:
        error = math.sqrt(sum(float(np.square(moved[name] - got[name]).sum()) for name in moved)) / norm
        rows.append({"what": what, "bytes_per_weight": size / elements, "relative_error": error})

    for codec in (sc.PatchCodec(), sc.BlockCodec(8), sc.BlockCodec(4)):
        data = codec.encode(new, base)
        state = codec.decode(data, base)
        add(str(codec), len(data), {name: to_float32(state[name], BF16) - floats[0][name] for name in base})
    for bits in (2, 4, 8):
        data = sc.encode_top_k(moved, k=64, bits=bits)
        dense = {}
        for name, sparse in sc.decode_top_k(data, sc.displacement_layout(moved)).items():
            flat = np.zeros(moved[name].size, np.float32)
            flat[sparse.positions] = sparse.values
            dense[name] = flat.reshape(moved[name].shape)
        add(f"top-k 64 of 4096, {bits}-bit values", len(data), dense)
        if bits == 2:
            add("12-bit top-k layout, 2-bit values", elements / 4096 * (64 * (12 + 2) / 8 + 4), dense)
    for name, (size, got) in lossy_baselines(moved).items():
        add(name, size, got)
    rows += measure_hivemind(moved, norm, elements)
    return rows


HIVEMIND_CODECS = {
    "hivemind, none": "NoCompression",
    "hivemind, fp16": "Float16Compression",
    "hivemind, scaled fp16": "ScaledFloat16Compression",
    "hivemind, uniform 8-bit": "Uniform8BitQuantization",
    "hivemind, quantile 8-bit": "Quantile8BitQuantization",
    "hivemind, blockwise 8-bit": "BlockwiseQuantization",
}


def measure_hivemind(moved: dict[str, np.ndarray], norm: float, elements: int) -> list[dict[str, Any]]:
    """hivemind's own codecs, where it is installed. One that does not work here says why in its row."""
    try:
        codecs = importlib.import_module("hivemind.compression")
    except ImportError:
        print("\nhivemind is not installed: its codecs are left out", flush=True)
        return []
    # hivemind renames the level for the whole program.
    logging.addLevelName(logging.WARNING, "WARNING")
    rows = []
    for what, name in HIVEMIND_CODECS.items():
        codec = getattr(codecs, name)()
        size, error = 0, 0.0
        try:
            for delta in moved.values():
                tensor = torch.from_numpy(delta)
                packed = codec.compress(tensor, codecs.CompressionInfo.from_tensor(tensor))
                got = codec.extract(packed)
                size += packed.ByteSize()
                error += float(np.square(got.numpy().reshape(delta.shape) - delta).sum())
        except Exception as problem:  # whatever a rival's defect raises: it is that row's result
            reason = " ".join(f"{type(problem).__name__}: {problem}".split())
            reason += f" (numpy {np.__version__}; it needs numpy<2.4)" if "8-bit" in what and _numpy_is_new() else ""
            rows.append({"what": what, "broken": reason[:160]})
            continue
        rows.append({"what": what, "bytes_per_weight": size / elements, "relative_error": math.sqrt(error) / norm})
    return rows


def _numpy_is_new() -> bool:
    return tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4)


def print_lossy(rows: list[dict[str, Any]], rate: float, steps: int) -> None:
    print(f"\nPre-training difference (lr {rate:g}, {steps} steps): bytes against error\n")
    print("| codec | bytes per weight | relative error of the difference |\n|---|---|---|")
    for row in rows:
        if "broken" in row:
            print(f"| {row['what']} | does not work here: {row['broken']} | |")
        else:
            print(f"| {row['what']} | {row['bytes_per_weight']:.4f} | {row['relative_error']:.4f} |")
