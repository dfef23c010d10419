"""Initial weights that a creator brings: a folder with ``model.safetensors`` and ``config.json``.

Reads the sizes from the config and checks every tensor's name, shape and type against the model's parameter list, from
the safetensors header alone: no weights are loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from swarmtrain.errors import ExitCode, UserError, one_line
from swarmtrain.manifest import ModelSection
from swarmtrain.model_config import parameter_specs
from swarmtrain.tensor_file import TensorFileError, read_entries

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"

_MAX_CONFIG_BYTES = 1 << 20
_FLOAT_TYPES = ("F32", "BF16", "F16")

# The names that a Llama config uses, and ours.
_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}


@dataclass(frozen=True, slots=True)
class GenesisFolder:
    """A checked folder: the weights file and the model that it fits."""

    weights: Path
    model: ModelSection


def open_genesis_folder(folder: Path, model: ModelSection | None) -> GenesisFolder:
    """Checks ``folder`` against ``model``, or takes the model's sizes from its config where ``model`` is None.

    Raises:
        UserError: exit code 7, one line that names the file and what does not fit.
    """
    config = _read_config(folder / CONFIG_FILE) if model is None else model
    weights = folder / WEIGHTS_FILE
    found = _read_header(weights)
    wanted = dict(parameter_specs(config.config()))
    for name, shape in wanted.items():
        if name not in found:
            raise _bad(weights, f"has no tensor {name}")
        if found[name] != shape:
            raise _bad(weights, f"tensor {name} has shape {list(found[name])}, the model needs {list(shape)}")
    for name in found:
        if name not in wanted:
            raise _bad(weights, f"has a tensor that the model does not know: {name}")
    return GenesisFolder(weights, config)


def _read_config(path: Path) -> ModelSection:
    values = _object(path, _read(path, _MAX_CONFIG_BYTES))
    if isinstance(values.get("rope_parameters"), dict):  # where newer configs keep it
        values = {**values["rope_parameters"], **values}
    values = {ours: values[theirs] for theirs, ours in _CONFIG_KEYS.items() if theirs in values}
    values.setdefault("num_kv_heads", values.get("num_heads"))
    try:
        return msgspec.convert(values, ModelSection)
    except msgspec.ValidationError as error:
        raise _bad(path, one_line(str(error), 200)) from None


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        entries = read_entries(path)
    except TensorFileError as error:
        raise _bad(path, str(error)) from None
    except OSError as error:
        raise _bad(path, error.strerror or "cannot be read") from None
    for name, entry in entries.items():
        if entry.dtype not in _FLOAT_TYPES:
            raise _bad(path, f"tensor {name} has type {entry.dtype}; only {', '.join(_FLOAT_TYPES)} can be trained")
    return {name: tuple(entry.shape) for name, entry in entries.items()}


def _object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad(path, "is not valid JSON") from None
    if not isinstance(values, dict):
        raise _bad(path, "is not a JSON object")
    return values


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise _bad(path, error.strerror or "cannot be read") from None
    if len(data) > limit:
        raise _bad(path, f"is larger than {limit} bytes")
    return data


def _bad(path: Path, problem: str) -> UserError:
    return UserError(f"{path}: {one_line(problem, 300)}", ExitCode.BAD_FOLDER)
