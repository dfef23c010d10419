"""Initial weights as one file: what a creator's folder becomes, and how every peer reads it back.

A safetensors file in the model's parameter order, in BF16 where that loses nothing, else in FP32. The
manifest names the file's blob and the state hash of the weights in FP32, so both the bytes and their meaning are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swarmtrain.errors import ManifestError, one_line
from swarmtrain.export import state_digest
from swarmtrain.layout import bf16_to_fp32, fp32_to_bf16
from swarmtrain.manifest import require_equal
from swarmtrain.model_config import ModelConfig, parameter_specs
from swarmtrain.tensor_file import RawTensor, TensorFileError, encode_tensors, read_entries, read_into

_FILE_DTYPES = {"F32": "<f4", "BF16": "<u2"}

State = Mapping[str, NDArray[np.float32]]


def encode_genesis(state: State) -> bytes:
    """Returns the file's bytes for FP32 arrays in the model's parameter order."""
    is_bf16 = all(not np.any(array.view(np.uint32) & 0xFFFF) for array in state.values())
    tensors = {}
    for name, array in state.items():
        stored = fp32_to_bf16(array) if is_bf16 else np.ascontiguousarray(array, dtype="<f4")
        tensors[name] = RawTensor("BF16" if is_bf16 else "F32", array.shape, stored.data.cast("B"))
    return b"".join(encode_tensors(tensors))


def load_genesis(path: Path, config: ModelConfig, digest: bytes) -> dict[str, NDArray[np.float32]]:
    """Reads a genesis file that came from a stranger, in FP32 and in the model's parameter order.

    Raises:
        ManifestError: malformed, other tensors than the model's, or a value that is not finite.
        Incompatible: the weights are not those that the manifest names.
    """
    try:
        entries = read_entries(path)
        specs = parameter_specs(config)
        if entries.keys() != {name for name, _ in specs}:
            raise ManifestError("genesis weights: not the tensors of the run's model")
        state: dict[str, NDArray[np.float32]] = {}
        for name, shape in specs:
            entry = entries[name]
            if entry.shape != shape or entry.dtype not in _FILE_DTYPES:
                raise ManifestError(f"genesis weights: {name} is {entry.dtype} {list(entry.shape)}, not {list(shape)}")
            array = np.empty(shape, dtype=_FILE_DTYPES[entry.dtype])
            read_into(path, {name: (entry, array.data.cast("B"))})
            state[name] = bf16_to_fp32(array) if entry.dtype == "BF16" else array.astype(np.float32, copy=False)
            if not np.isfinite(state[name]).all():
                raise ManifestError(f"genesis weights: {name} holds a value that is not finite")
    except TensorFileError as error:
        raise ManifestError(f"genesis weights: {one_line(str(error), 200)}") from None
    require_equal("genesis.weights.digest", digest.hex(), state_digest(state).hex(), where="the file")
    return state
