"""An exported folder is complete, reads back exactly, and replaces only an export of the same run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from swarmtrain.export import ExportCard, ExportError, export_model, state_digest
from swarmtrain.genesis import genesis_state
from swarmtrain.layout import bf16_to_fp32, fp32_to_bf16
from swarmtrain.model import LanguageModel, load_weights
from swarmtrain.model_config import ModelConfig, parameter_specs
from swarmtrain.pretrained import load_export

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    context_length=8,
    rope_theta=5000.0,
    norm_eps=1e-6,
)
CARD = ExportCard(
    run_name="demo",
    run_id=bytes(range(32)),
    peers=4,
    tokens=1_234_567,
    merge="token-weighted mean of 4 replicas",
    spread=0.0123,
    validation_loss=1.98765,
    command="swarmtrain export --run-id demo",
    swarmtrain_version="0.1.0",
)
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "swarmtrain.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
State = dict[str, NDArray[np.float32]]


@pytest.fixture
def state() -> State:
    return genesis_state(CONFIG, 1)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_reads_back_exactly(tmp_path: Path, tied: bool) -> None:
    config = replace(CONFIG, tied_embeddings=tied)
    state = genesis_state(config, 2)
    export_model(tmp_path / "out", state, config, CARD)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == FILES
    loaded, found = load_export(tmp_path / "out")
    assert found == config
    assert list(loaded) == [name for name, _ in parameter_specs(config)]
    assert state_digest(loaded) == state_digest(state)
    load_weights(LanguageModel(config), {name: torch.from_numpy(array) for name, array in loaded.items()})


def test_bfloat16_is_rounded_once(tmp_path: Path, state: State) -> None:
    export_model(tmp_path / "out", state, CONFIG, CARD, dtype="bfloat16")
    loaded, _ = load_export(tmp_path / "out")
    for name, array in state.items():
        assert np.array_equal(loaded[name], bf16_to_fp32(fp32_to_bf16(array)))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_card_says_how_the_model_was_made(tmp_path: Path, state: State) -> None:
    card = replace(CARD, run_name="a|b", validation_loss=None, command="x ``` \x1b[31m\n# y")
    export_model(tmp_path / "out", state, CONFIG, card)
    text = (tmp_path / "out" / "README.md").read_text()
    for part in ("1,234,567", "4 peers", "1.23%", CARD.run_id.hex(), "not measured", "token-weighted mean"):
        assert part in text
    assert r"a\|b" in text
    assert "\x1b" not in text
    assert "\n# y" not in text
    assert text.count("```") == 4
    mark = json.loads((tmp_path / "out" / "swarmtrain.json").read_text())
    assert mark["run_id"] == CARD.run_id.hex()
    assert mark["state_digest"] == state_digest(state).hex()
    assert mark["validation_loss"] is None


def test_only_an_export_of_the_same_run_is_replaced(tmp_path: Path, state: State) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_model(out, state, CONFIG, CARD)  # an empty folder is fine
    export_model(out, genesis_state(CONFIG, 9), CONFIG, replace(CARD, peers=5))
    assert names(tmp_path) == ["out"]
    assert json.loads((out / "swarmtrain.json").read_text())["peers"] == 5
    with pytest.raises(ExportError, match="not an export of this run"):
        export_model(out, state, CONFIG, replace(CARD, run_id=bytes(32)))
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"holds notes\.txt beside"):
        export_model(out, state, CONFIG, CARD)
    assert json.loads((out / "swarmtrain.json").read_text())["peers"] == 5


@pytest.mark.parametrize("mark", [None, "", "[" * 60_000, "[]", "{}"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, state: State, mark: str | None) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    if mark is not None:
        (tmp_path / "swarmtrain.json").write_text(mark)
    with pytest.raises(ExportError, match="not empty") as caught:
        export_model(tmp_path, state, CONFIG, CARD)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_file_in_the_way_is_refused(tmp_path: Path, state: State) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ExportError, match="is a file"):
        export_model(tmp_path / "out", state, CONFIG, CARD)
    with pytest.raises(ExportError):
        export_model(tmp_path / "out" / "deeper", state, CONFIG, CARD)


def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(tmp_path / "out", state, CONFIG, CARD)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ExportError, match="No space left on device"):
        export_model(tmp_path / "out", genesis_state(CONFIG, 5), CONFIG, CARD)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_state_that_does_not_fit_is_a_defect(tmp_path: Path, state: State) -> None:
    with pytest.raises(ValueError, match="float64"):
        export_model(tmp_path / "out", state | {"model.norm.weight": np.ones(16)}, CONFIG, CARD)  # type: ignore[arg-type]
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        export_model(tmp_path / "out", state, CONFIG, CARD)
    assert names(tmp_path) == []


def test_the_digest_ignores_order_and_sees_every_bit(state: State) -> None:
    digest = state_digest(state)
    assert state_digest(dict(reversed(state.items()))) == digest
    state["model.norm.weight"][3] = np.nextafter(np.float32(1), np.float32(2))
    assert state_digest(state) != digest


# Folders of others


@pytest.fixture
def folder(tmp_path: Path, state: State) -> Path:
    export_model(tmp_path / "model", state, CONFIG, CARD)
    return tmp_path / "model"


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], state: State) -> None:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_and_harmless_extras_are_accepted(folder: Path, state: State, dtype: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in state.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    loaded, _ = load_export(folder)
    for name in state:
        assert np.array_equal(loaded[name], tensors[name].float().numpy())


def test_an_indexed_set_of_files_is_accepted(folder: Path, state: State) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, name in enumerate(state):
        weight_map[name] = f"model-{number % 2}.safetensors"
    for file_name in set(weight_map.values()):
        part = {name: torch.from_numpy(state[name]) for name in state if weight_map[name] == file_name}
        save_file(part, folder / file_name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert state_digest(load_export(folder)[0]) == state_digest(state)
    for bad in ("../model-0.safetensors", "/etc/passwd", "model.bin", ""):
        index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": bad}}))
        with pytest.raises(ExportError, match="not the name of a safetensors file"):
            load_export(folder)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ExportError, match="no weight_map"):
        load_export(folder)


def test_rotary_settings_of_newer_writers_are_read(folder: Path) -> None:
    change_config(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert load_export(folder)[1].rope_theta == 123.0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'; only llama"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3'"),
        ({"rope_parameters": [1]}, "rope_parameters must be a table"),
        ({"rope_theta": "x"}, "could not convert"),
        ({"head_dim": 12}, "head_dim 12 is not"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 10**12}, "num_layers must be a whole number from 1 to 512"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.* does not belong"),
        ({"intermediate_size": 48}, "config.json says"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_what_the_model_cannot_compute_is_named(folder: Path, values: dict[str, object], complaint: str) -> None:
    change_config(folder, **values)
    with pytest.raises(ExportError, match=complaint) as caught:
        load_export(folder)
    assert "\n" not in str(caught.value)


def test_values_that_are_not_finite_are_refused(folder: Path, state: State) -> None:
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("inf")), state)
    with pytest.raises(ExportError, match=r"model\.norm\.weight holds a value that is not finite"):
        load_export(folder)


def test_other_dtypes_are_refused(folder: Path, state: State) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16).double()}), state)
    with pytest.raises(ExportError, match="is F64; supported are F32, F16 and BF16"):
        load_export(folder)


def test_missing_and_broken_files_are_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"config\.json: No such file"):
        load_export(tmp_path)
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ExportError, match="cut off in its header"):
        load_export(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"model\.safetensors: No such file"):
        load_export(folder)
    (folder / "config.json").write_text("[" * 99_999)
    with pytest.raises(ExportError, match="not a JSON object"):
        load_export(folder)


@pytest.mark.filterwarnings("default")  # the warnings of another library are not ours to mend
def test_transformers_loads_the_folder_with_equal_logits_and_ids(
    folder: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = LanguageModel(CONFIG)
    load_weights(model, {name: torch.from_numpy(array) for name, array in state.items()})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(8).view(1, 8) * 31
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    assert list(dict(theirs.named_parameters())) == list(state)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("def f():\n\treturn  1", "ä € 😀\0Ā<eos>", ""):
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
