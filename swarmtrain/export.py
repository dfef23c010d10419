"""The result of a run as an ordinary Hugging Face folder, and such a folder as the start of a run.

Written: config.json, generation_config.json, model.safetensors, tokenizer files, README.md (the model card)
and swarmtrain.json (the card's figures for programs). The folder appears complete or not at all.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from swarm_compression import state_hash

from swarmtrain.durable import sync_folder, write_durably
from swarmtrain.errors import ExitCode, UserError, one_line
from swarmtrain.layout import fp32_to_bf16
from swarmtrain.model_config import ModelConfig, parameter_count, parameter_specs
from swarmtrain.tensor_file import RawTensor, encode_tensors
from swarmtrain.tokenizer import EOS_ID, tokenizer_files

FORMAT_VERSION = 1
_MARK = "swarmtrain.json"
_MAX_MARK_BYTES = 1 << 16

ModelState = Mapping[str, NDArray[np.float32]]


class ExportError(UserError):
    """A model folder that cannot be written or read; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_FOLDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCard:
    """How the model was made, for its card. Figures that were not measured are None."""

    run_name: str
    run_id: bytes
    peers: int
    tokens: int
    merge: str  # in words: which replicas were merged, and how
    spread: float | None  # relative distance of the merged replicas from their mean
    validation_loss: float | None  # nats per token
    command: str
    swarmtrain_version: str


def export_model(
    directory: Path,
    state: ModelState,
    config: ModelConfig,
    card: ExportCard,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Writes `state` (name to FP32 array, as `parameter_specs` lists them) as a Hugging Face folder.

    Replaces an earlier export of the same run, and nothing else. Raises `ExportError` for a folder that
    holds other things and for a disk that is full, `ValueError` for a state that does not fit `config`.
    """
    _check_state(state, config)
    directory = Path(directory).absolute()
    _refuse_foreign(directory, card.run_id)
    files: dict[str, bytes] = {
        "config.json": _json(_hugging_face_config(config, dtype)),
        "generation_config.json": _json(
            {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "do_sample": True}
        ),
        "README.md": _model_card(card, config).encode(),
        _MARK: _json(_mark(card, state)),
        **tokenizer_files(config.context_length),
    }
    tensors = {name: _raw(state[name], dtype) for name, _ in parameter_specs(config)}
    work: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        new = work / "new"
        new.mkdir()
        for name, text in files.items():
            write_durably(new / name, [text])
        write_durably(new / "model.safetensors", encode_tensors(tensors, {"format": "pt"}))
        if directory.exists():
            directory.rename(work / "old")
        new.rename(directory)
        sync_folder(directory.parent)
    except OSError as error:
        raise ExportError(f"{directory}: cannot write the model: {one_line(error.strerror or str(error))}") from error
    finally:
        if work is not None:
            if (work / "old").exists() and not directory.exists():
                (work / "old").rename(directory)
            shutil.rmtree(work, ignore_errors=True)


def state_digest(state: ModelState) -> bytes:
    """Returns the state hash (32 bytes) over names, shapes and FP32 bytes, in whatever order they stand."""
    return state_hash({name: np.asarray(array, dtype="<f4") for name, array in state.items()})


def _check_state(state: ModelState, config: ModelConfig) -> None:
    specs = dict(parameter_specs(config))
    if state.keys() != specs.keys():
        raise ValueError(f"the state does not fit the model: {sorted(state.keys() ^ specs.keys())[0]}")
    for name, shape in specs.items():
        if state[name].shape != shape or state[name].dtype != np.float32:
            raise ValueError(f"{name} is {state[name].dtype} {state[name].shape}, not float32 {shape}")


def _refuse_foreign(directory: Path, run_id: bytes) -> None:
    """Raises `ExportError` unless `directory` is missing, empty, or just an export of the same run."""
    try:
        if not directory.exists():
            return
        if not directory.is_dir():
            raise ExportError(f"{directory}: is a file; name a folder for the model")
        names = {path.name for path in directory.iterdir()}
        if not names:
            return
        mark = json.loads((directory / _MARK).read_bytes()[:_MAX_MARK_BYTES]) if _MARK in names else None
    except OSError as error:
        raise ExportError(f"{directory}: {one_line(error.strerror or str(error))}") from error
    except (ValueError, RecursionError):
        mark = None
    if not isinstance(mark, dict) or mark.get("run_id") != run_id.hex():
        raise ExportError(f"{directory}: not empty and not an export of this run; name another folder")
    written = {"config.json", "generation_config.json", "README.md", "model.safetensors", _MARK}
    foreign = sorted(names - written - tokenizer_files(1).keys())
    if foreign:
        raise ExportError(
            f"{directory}: holds {one_line(foreign[0], 80)} beside the earlier export; name another folder"
        )


def _hugging_face_config(config: ModelConfig, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_length,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def _raw(array: NDArray[np.float32], dtype: str) -> RawTensor:
    if dtype == "bfloat16":
        return RawTensor("BF16", array.shape, np.ascontiguousarray(fp32_to_bf16(array)).data)
    return RawTensor("F32", array.shape, np.ascontiguousarray(array, dtype="<f4").data)


def _mark(card: ExportCard, state: ModelState) -> dict[str, object]:
    return {
        "format": FORMAT_VERSION,
        "run_name": card.run_name,
        "run_id": card.run_id.hex(),
        "state_digest": state_digest(state).hex(),
        "peers": card.peers,
        "tokens": card.tokens,
        "merge": card.merge,
        "spread": card.spread,
        "validation_loss": card.validation_loss,
        "command": card.command,
        "swarmtrain_version": card.swarmtrain_version,
    }


def _json(value: dict[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _model_card(card: ExportCard, config: ModelConfig) -> str:
    loss = "not measured" if card.validation_loss is None else f"{card.validation_loss:.4f} nats per token"
    spread = "not measured" if card.spread is None else f"{card.spread:.2%}"
    rows = {
        "Run": f"{_plain(card.run_name)} (`{card.run_id.hex()}`)",
        "Trained by": f"{card.peers} {'peer' if card.peers == 1 else 'peers'}",
        "Tokens trained on, all peers together": f"{card.tokens:,}",
        "Merge": _plain(card.merge),
        "Spread of the merged replicas": f"{spread} (mean distance from their average, relative to it)",
        "Validation loss": loss,
        "Parameters": f"{parameter_count(config):,}",
        "Context": f"{config.context_length:,} tokens",
        "Made with": f"swarmtrain {_plain(card.swarmtrain_version)}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- swarmtrain
---

# {_plain(card.run_name)}

A language model that several peers trained together with swarmtrain, over ordinary internet links: each trained
its own replica and kept mixing it with one other peer's at a time.

| | |
|---|---|
{table}

Load it:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

Made by:

```
{one_line(card.command, 2000).replace("```", "'''")}
```
"""


def _plain(text: str) -> str:
    """Returns text that cannot break out of a Markdown table cell: names may come from strangers."""
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>#" else letter for letter in one_line(text))
