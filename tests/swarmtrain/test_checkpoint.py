"""A checkpoint is whole or absent; damage leads back to the previous one."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from swarmtrain.checkpoint import CheckpointError, has_checkpoint, load_checkpoint, save_checkpoint
from swarmtrain.tensor_file import RawTensor, TensorFileError, encode_tensors, read_entries, read_into

TENSORS = {
    "values": torch.arange(6, dtype=torch.float32).view(2, 3),
    "snapshot": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "rng": torch.get_rng_state(),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
}
META = {"step": 7, "position": 123, "name": "run", "losses": [1.5, None]}


def data_file(directory: Path, generation: int) -> Path:
    return directory / f"checkpoint-{generation:08d}.safetensors"


def generations(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_everything_comes_back(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "deep" / "er", TENSORS, META)
    assert path.exists()
    tensors, meta = load_checkpoint(tmp_path / "deep" / "er")
    assert meta == META
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    tensors["values"].add_(1)  # loaded tensors are ordinary, writable memory
    torch.set_rng_state(tensors["rng"])


def test_the_library_reads_what_is_written_and_the_reverse(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, TENSORS, META)
    for name, tensor in load_file(data_file(tmp_path, 1)).items():
        assert torch.equal(tensor, TENSORS[name])
    save_file(TENSORS, tmp_path / "library.safetensors", metadata={"format": "pt"})
    for name, entry in read_entries(tmp_path / "library.safetensors").items():
        assert entry.shape == tuple(TENSORS[name].shape)
        assert entry.stop - entry.start == TENSORS[name].numel() * TENSORS[name].element_size()


def test_views_of_one_buffer_are_stored_whole(tmp_path: Path) -> None:
    flat = torch.arange(10, dtype=torch.float32)
    save_checkpoint(tmp_path, {"a": flat[:4].view(2, 2), "b": flat[2:], "t": flat.view(2, 5).T}, {})
    tensors, _ = load_checkpoint(tmp_path)
    assert tensors["a"].tolist() == [[0, 1], [2, 3]]
    assert tensors["b"].tolist() == list(range(2, 10))
    assert torch.equal(tensors["t"], flat.view(2, 5).T)


def test_two_generations_are_kept(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path / "absent")
    for step in range(4):
        save_checkpoint(tmp_path, TENSORS, {"step": step})
    assert has_checkpoint(tmp_path)
    assert generations(tmp_path) == [
        f"checkpoint-{number:08d}.{kind}" for number in (3, 4) for kind in ("json", "safetensors")
    ]
    assert load_checkpoint(tmp_path)[1] == {"step": 3}


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_last_byte, truncate, Path.unlink])
def test_damage_leads_back_to_the_previous_generation(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, TENSORS, {"step": 1})
    save_checkpoint(tmp_path, TENSORS, {"step": 2})
    assert callable(damage)
    damage(data_file(tmp_path, 2))
    with caplog.at_level(logging.WARNING):
        assert load_checkpoint(tmp_path)[1] == {"step": 1}
    assert "checkpoint-00000002: " in caplog.text
    # The next one is newer than the damaged one.
    save_checkpoint(tmp_path, TENSORS, {"step": 3})
    assert load_checkpoint(tmp_path)[1] == {"step": 3}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "meta": {}}', "[" * 99_999])
def test_a_damaged_json_file_is_passed_over(tmp_path: Path, text: str) -> None:
    save_checkpoint(tmp_path, TENSORS, {"step": 1})
    save_checkpoint(tmp_path, TENSORS, {"step": 2}).write_text(text)
    assert load_checkpoint(tmp_path)[1] == {"step": 1}


def test_no_usable_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        load_checkpoint(tmp_path / "absent")
    save_checkpoint(tmp_path, TENSORS, META)
    truncate(data_file(tmp_path, 1))
    with pytest.raises(CheckpointError, match="no usable checkpoint; checkpoint-00000001") as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_crash_before_the_json_file_leaves_the_previous_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, TENSORS, {"step": 1})
    synced = os.fsync

    def fail(descriptor: int) -> None:
        synced(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path, TENSORS, {"step": 2})
    monkeypatch.undo()
    assert generations(tmp_path) == ["checkpoint-00000001.json", "checkpoint-00000001.safetensors"]
    # What a power cut leaves: a part, and a tensor file whose JSON file never came.
    (tmp_path / "checkpoint-00000002.safetensors.part").write_bytes(b"half")
    data_file(tmp_path, 2).write_bytes(b"complete but alone")
    assert load_checkpoint(tmp_path)[1] == {"step": 1}
    save_checkpoint(tmp_path, TENSORS, {"step": 2})
    assert load_checkpoint(tmp_path)[1] == {"step": 2}
    assert len(generations(tmp_path)) == 4


def test_meta_that_is_not_json_fails_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_checkpoint(tmp_path, TENSORS, {"loss": float("nan")})
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, TENSORS, {"key": b"bytes"})
    assert generations(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        save_checkpoint(tmp_path / "file", TENSORS, META)


def header_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[" * 50_000,
        [1],
        {"a": 3},
        {"a": entry() | {"more": 1}},
        {"a": entry(dtype="Q8")},
        {"a": entry(dtype=["U8"])},
        {"a": entry(shape=[-4])},
        {"a": entry(shape=[4.0])},
        {"a": entry(shape=[1] * 9 + [4])},
        {"a": entry(shape=[1 << 40, 1 << 40])},
        {"a": entry(offsets=[0, 4, 4])},
        {"a": entry(offsets=[4, 0])},
        {"a": entry(), "b": entry()},  # overlap
        {"a": entry(offsets=[1, 5])},  # a gap
        {"a": entry(shape=[3], offsets=[0, 3])},  # trailing bytes
        {"a": entry(shape=[5], offsets=[0, 5])},  # beyond the end
        b'{"a": 1, "a": 2}',
        b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 4]}}',
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(TensorFileError):
        read_entries(header_file(tmp_path / "x", header, b"\0\1\2\3"))


def test_a_huge_header_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(TensorFileError, match="cut off in its header"):
        read_entries(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = {"a": RawTensor("F32", (2, 3), np.arange(6, dtype="<f4").data), "b": RawTensor("U8", (0,), memoryview(b""))}
    content = bytearray(b"".join(encode_tensors(raw, {"format": "pt"})))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        entries = read_entries(path)
        buffers = {name: (e, memoryview(bytearray(e.stop - e.start))) for name, e in entries.items()}
        read_into(path, buffers)
    except TensorFileError:
        pass
