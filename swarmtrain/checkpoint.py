"""Checkpoints: tensors in a safetensors file and everything else in one JSON file, two generations of them.

A generation is complete when its JSON file stands under its name: that is written last and holds the digest
of the tensor file. A crash or a full disk at any instant leaves the previous generation untouched; damage
found on reading leads back to it. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from swarmtrain.durable import TEMPORARY_SUFFIX, write_durably
from swarmtrain.errors import ExitCode, UserError, one_line
from swarmtrain.tensor_file import RawTensor, TensorFileError, encode_tensors, read_entries, read_into

FORMAT_VERSION = 1
_NAME = re.compile(r"checkpoint-(\d{8,12})\.(json|safetensors)")
_MAX_JSON_BYTES = 64 << 20

_TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}

_log = logging.getLogger("swarmtrain.checkpoint")


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_FOLDER)


def save_checkpoint(directory: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Writes a new generation and removes all but the newest `keep`; returns its JSON file.

    Tensors may lie on any device and may be views of one another: each is stored whole. `meta` must be
    plain JSON (no tuple keys, no NaN). The caller sees to it that they do not change meanwhile. Raises
    `CheckpointError`.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    json.dumps(meta, allow_nan=False)  # an impossible `meta` fails before anything is written
    generation = max(_generations(directory), default=0) + 1
    data_path = directory / f"checkpoint-{generation:08d}.safetensors"
    json_path = data_path.with_suffix(".json")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("checkpoint-*" + TEMPORARY_SUFFIX):
            leftover.unlink(missing_ok=True)
        digest = blake3()
        write_durably(data_path, _hashed(tensors, digest))
        envelope = {"format": FORMAT_VERSION, "tensors_blake3": digest.hexdigest(), "meta": meta}
        write_durably(json_path, [json.dumps(envelope, indent=1, allow_nan=False).encode() + b"\n"])
    except OSError as error:
        with suppress(OSError):
            data_path.unlink()
        raise CheckpointError(f"{directory}: cannot write the checkpoint: {_reason(error)}") from error
    _remove_old(directory, keep)
    return json_path


def load_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors (on the CPU) and meta of the newest generation that is whole.

    A damaged newer one is passed over with a warning in the log. Raises `CheckpointError` if there is none.
    """
    generations = sorted(_generations(directory), reverse=True)
    if not generations:
        raise CheckpointError(f"{directory}: no checkpoint in this folder")
    complaints = []
    for generation in generations:
        json_path = directory / f"checkpoint-{generation:08d}.json"
        try:
            loaded = _read_generation(json_path)
        except (TensorFileError, OSError) as error:
            complaints.append(f"{json_path.stem}: {_reason(error)}")
            continue
        for complaint in complaints:
            _log.warning("%s: damaged, going back to the one before it", complaint)
        return loaded
    raise CheckpointError(f"{directory}: no usable checkpoint; {'; '.join(complaints)}")


def has_checkpoint(directory: Path) -> bool:
    """Returns whether `directory` holds at least one complete generation, whole or damaged."""
    return bool(_generations(directory))


def _generations(directory: Path) -> list[int]:
    """Returns the numbers of complete generations, those with a JSON file."""
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot read the folder: {_reason(error)}") from error
    found = [_NAME.fullmatch(name) for name in names]
    return [int(match[1]) for match in found if match is not None and match[2] == "json"]


def _hashed(tensors: Mapping[str, Tensor], digest: blake3) -> Iterator[bytes | memoryview]:
    raw = {name: _raw(tensor) for name, tensor in tensors.items()}
    for piece in encode_tensors(raw):
        digest.update(piece)
        yield piece


def _raw(tensor: Tensor) -> RawTensor:
    dtype = _DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"a checkpoint cannot hold {tensor.dtype}")
    flat = tensor.detach().cpu().contiguous().flatten()
    return RawTensor(dtype, tuple(tensor.shape), _bytes_of(flat))


def _bytes_of(flat: Tensor) -> memoryview:
    """Returns a writable view of a flat, contiguous CPU tensor's memory."""
    if flat.numel() == 0:
        return memoryview(b"")
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def _read_generation(json_path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Raises `TensorFileError` or `OSError` for any damage."""
    with json_path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    try:
        envelope = json.loads(text) if len(text) <= _MAX_JSON_BYTES else None
    except (ValueError, RecursionError) as error:
        raise TensorFileError("the JSON file is damaged") from error
    if not isinstance(envelope, dict) or not isinstance(envelope.get("meta"), dict):
        raise TensorFileError("the JSON file is damaged")
    if envelope.get("format") != FORMAT_VERSION:
        raise TensorFileError(f"format {envelope.get('format')!r}; this version reads {FORMAT_VERSION}")
    data_path = json_path.with_suffix(".safetensors")
    entries = read_entries(data_path)
    if blake3().update_mmap(data_path).hexdigest() != envelope.get("tensors_blake3"):
        raise TensorFileError("the tensor file's digest is not the one that was written")
    flats: dict[str, Tensor] = {}
    for name, entry in entries.items():
        dtype = _TORCH_DTYPES[entry.dtype]
        flats[name] = torch.empty((entry.stop - entry.start) // dtype.itemsize, dtype=dtype)
    read_into(data_path, {name: (entry, _bytes_of(flats[name])) for name, entry in entries.items()})
    return {name: flats[name].view(entry.shape) for name, entry in entries.items()}, envelope["meta"]


def _remove_old(directory: Path, keep: int) -> None:
    kept = set(sorted(_generations(directory))[-keep:])
    for path in list(directory.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) not in kept:
            try:
                path.unlink()
            except OSError as error:  # the new generation stands; an old one in the way is no reason to fail
                _log.warning("%s: cannot remove the old checkpoint: %s", path, _reason(error))


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or str(error))
