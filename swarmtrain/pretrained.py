"""Weights to start a run from: a Hugging Face folder of a Llama-family model, read with suspicion.

Accepts F32, F16 and BF16, one safetensors file or an indexed set of them. Every size is derived from
config.json and compared with the files' headers before anything is allocated. What this model cannot
compute is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmtrain.errors import one_line
from swarmtrain.export import ExportError
from swarmtrain.layout import bf16_to_fp32
from swarmtrain.model_config import ModelConfig, parameter_specs
from swarmtrain.tensor_file import TensorEntry, TensorFileError, read_entries, read_into

_MAX_JSON_BYTES = 16 << 20
_SOURCE_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# What some writers store although it follows from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


def load_export(directory: Path) -> tuple[dict[str, NDArray[np.float32]], ModelConfig]:
    """Returns the weights in FP32, in `parameter_specs` order, and the model's configuration.

    Raises `ExportError`, one line, for anything missing, malformed, unsupported or not finite.
    """
    directory = Path(directory)
    try:
        config = _model_config(_read_json(directory / "config.json"), directory)
        found = _find_tensors(directory)
        _check_tensors(found, config, directory)
        state: dict[str, NDArray[np.float32]] = {}
        for name, shape in parameter_specs(config):
            path, entry = found[name]
            array = np.empty(shape, dtype=_SOURCE_DTYPES[entry.dtype])
            read_into(path, {name: (entry, array.data)})
            state[name] = bf16_to_fp32(array) if entry.dtype == "BF16" else array.astype(np.float32, copy=False)
            if not np.isfinite(state[name]).all():
                raise ExportError(f"{path}: {name} holds a value that is not finite")
    except OSError as error:
        where = error.filename or directory
        raise ExportError(f"{where}: {one_line(error.strerror or str(error))}") from error
    except TensorFileError as error:
        raise ExportError(f"{directory}: {error}") from error
    return state, config


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    try:
        value = json.loads(text) if len(text) <= _MAX_JSON_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ExportError(f"{path}: not a JSON object of at most {_MAX_JSON_BYTES >> 20} MiB")
    return value


def _model_config(values: dict[str, Any], directory: Path) -> ModelConfig:
    """Translates Hugging Face's names; raises `ExportError` for what this model does not compute."""
    where = directory / "config.json"
    if values.get("model_type") != "llama":
        raise ExportError(f"{where}: model_type {_quoted(values.get('model_type'))}; only llama is supported")
    # From transformers 5 on the rotary settings stand in a table of their own.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ExportError(f"{where}: rope_parameters must be a table")
    required = {
        "hidden_act": (values.get("hidden_act", "silu"), "silu"),
        "attention_bias": (values.get("attention_bias", False), False),
        "mlp_bias": (values.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for key, (found, wanted) in required.items():
        if found != wanted:
            raise ExportError(f"{where}: {key} {_quoted(found)} is not supported, only {wanted!r}")
    kv_heads = values.get("num_key_value_heads")
    try:
        config = ModelConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_attention_heads"] if kv_heads is None else kv_heads,
            context_length=values["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ExportError(f"{where}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ExportError(f"{where}: {one_line(str(error))}") from error
    if values.get("head_dim") not in (None, config.head_size):
        raise ExportError(f"{where}: head_dim {_quoted(values['head_dim'])} is not hidden_size / num_attention_heads")
    return config


def _find_tensors(directory: Path) -> dict[str, tuple[Path, TensorEntry]]:
    """Returns name to file and entry, from the one file or from the files that an index names."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        path = directory / "model.safetensors"
        return {name: (path, entry) for name, entry in read_entries(path).items()}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise ExportError(f"{index}: no weight_map from names to files")
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise ExportError(f"{index}: {_quoted(file_name)} is not the name of a safetensors file beside it")
        entries = read_entries(directory / file_name)
        for name, entry in entries.items():
            if weight_map.get(name) == file_name:
                found[name] = (directory / file_name, entry)
    return found


def _check_tensors(found: dict[str, tuple[Path, TensorEntry]], config: ModelConfig, directory: Path) -> None:
    specs = dict(parameter_specs(config))
    for name, shape in specs.items():
        if name not in found:
            raise ExportError(f"{directory}: {name} is missing from the safetensors")
        path, entry = found[name]
        if entry.shape != shape:
            raise ExportError(f"{path}: {name} has shape {entry.shape}, config.json says {shape}")
        if entry.dtype not in _SOURCE_DTYPES:
            raise ExportError(f"{path}: {name} is {entry.dtype}; supported are F32, F16 and BF16")
    tied_copy = {"lm_head.weight"} if config.tied_embeddings else set()
    for name in sorted(found.keys() - specs.keys() - tied_copy):
        if not name.endswith(_DERIVED_SUFFIXES):
            raise ExportError(f"{found[name][0]}: {_quoted(name)} does not belong to a Llama model of this size")


def _quoted(value: object) -> str:
    return one_line(repr(value), 80)
