"""Run files: defaults, friendly keys, and complaints that name place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.errors import ExitCode, RunFileError
from swarmtrain.manifest import DataSection, MixerSection, ModelSection, OptimizerSection, RoundSection
from swarmtrain.runfile import TEMPLATE, RunFile, load_run_file, parse_run_file

PATH = Path("folder/run.toml")


def parse(text: str) -> RunFile:
    return parse_run_file(text, PATH)


def complaint(text: str) -> str:
    with pytest.raises(RunFileError) as caught:
        parse(text)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.message.isprintable()
    return caught.value.message


def test_a_name_is_enough() -> None:
    run = parse('name = "my-run"')
    assert (run.name, run.model, run.data) == ("my-run", ModelSection(), DataSection())
    assert run.optimizer == OptimizerSection()
    assert run.round == RoundSection(inner_steps=20)
    assert run.mixer == MixerSection()
    assert (run.genesis_seed, run.genesis_weights, run.validation_text) == (0, None, None)


def test_the_template_says_the_defaults() -> None:
    written = parse(TEMPLATE)
    plain = parse('name = "my-run"')
    for field in ("model", "tokenizer", "data", "optimizer", "round", "mixer", "genesis_seed", "validation_text"):
        assert getattr(written, field) == getattr(plain, field), field
    assert max(map(len, TEMPLATE.splitlines())) <= 110


def test_keys_may_have_dashes_or_underscores() -> None:
    dashes = parse('name = "a"\n[optimizer]\nlearning-rate = 2e-4\ntotal-steps = 9\nwarmup-steps = 1')
    underscores = parse('name = "a"\n[optimizer]\nlearning_rate = 2e-4\ntotal_steps = 9\nwarmup_steps = 1')
    assert dashes == underscores
    assert dashes.optimizer.learning_rate == 2e-4


def test_files_are_named_relative_to_the_run_file() -> None:
    run = parse('name = "a"\n[validation]\ntext = "held.txt"\n[genesis]\nweights = "../demo"')
    assert run.validation_text == Path("folder/held.txt")
    assert run.genesis_weights == Path("folder/../demo")
    assert run.model is None, "the sizes come from the weights' own config"
    assert run.genesis_seed is None


def test_whole_numbers_are_numbers_too() -> None:
    assert parse('name = "a"\n[round]\nseconds = 60').round == RoundSection(seconds=60.0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["name is missing", 'name = "my-run"']),
        ('name = "My Run"', ["line 1: name: 'My Run'", "a-z"]),
        ("name = 3", ["line 1: name: 3"]),
        ('name = "a"\nnmae = 1', ["line 2: nmae: unknown key or section; did you mean name?"]),
        ('name = "a"\n[optimiser]\nlr = 1', ["line 2: optimiser: ", "did you mean optimizer?"]),
        ('name = "a"\n[optimizer]\nlearning-rat = 1', ["line 3: [optimizer] learning-rat: unknown key", "rate?"]),
        ('name = "a"\n[optimizer]\n\nlr = 1e-3', ["line 4: [optimizer] lr: unknown key; did you mean learning-rate?"]),
        ('name = "a"\n[model]\nzzz = 1', ["[model] zzz: unknown key; known here: vocab-size, hidden-size"]),
        ('name = "a"\ntotal-steps = 5', ["line 2: total-steps: ", "[optimizer] total-steps?"]),
        ('name = "a"\n[model]\nhidden-size = "big"', ["line 3: [model] hidden-size: 'big'", "Expected int, got str"]),
        ('name = "a"\n[model]\nhidden-size = 100\nnum-heads = 8', ["line 3: [model] hidden-size:", "multiple of"]),
        ('name = "a"\n[model]\nvocab-size = 255', ["line 3: [model] vocab-size: 255 is too small"]),
        ('name = "a"\n[model]\nnum-layers = true', ["line 3: [model] num-layers: True"]),
        ('name = "a"\n[optimizer]\nlearning-rate = nan', ["line 3: [optimizer] learning-rate: ", "= nan: must be"]),
        ('name = "a"\n[optimizer]\nbetas = [0.9]', ["line 3: [optimizer] betas"]),
        ('name = "a"\n[optimizer]\nseed = 1\nbatch-size = 2\nbatch_size = 3', ["line 4", "given twice"]),
        ('name = "a"\nmodel = 3', ["line 2: model: is a section; write [model]"]),
        ('name = "a"\n[[model]]\nnum-layers = 1', ["model: is a section"]),
        ('name = "a"\n[mixer]\nkind = "mean"', ["line 3: [mixer] kind: 'mean'"]),
        ('name = "a"\n[mixer]\nkind = "noloco"\ngamma = 1.7', ["line 4: [mixer] gamma", "1.7", "diverge"]),
        ('name = "a"\n[round]\nseconds = 1\ninner-steps = 2', ["line 2: [round]", "not in both"]),
        ('name = "a"\n[round]', ["line 2: [round]", "inner_steps or in seconds"]),
        ('name = "a"\n[genesis]\nseed = 1\nweights = "w"', ["line 4: [genesis] weights", "one of the two"]),
        ('name = "a"\noptimizer.lr = 1', ["line 2: [optimizer] lr: unknown key; did you mean learning-rate?"]),
        ('name = "a"\n[data]\nkind = "named"', ["line 2: [data]", "64 hex digits"]),
        ('name = "a"\nbroken', ["line 2: not valid TOML"]),
        ('name = "a"\nname = "b"', ["not valid TOML"]),
        ('name = "a"\n"\\u001b[31m" = 1', ["unknown key or section"]),
        ("a = " + "[" * 5000, ["folder/run.toml"]),
    ],
)  # fmt: skip
def test_complaints_name_line_key_and_remedy(text: str, parts: list[str]) -> None:
    message = complaint(text)
    assert message.startswith("folder/run.toml")
    for part in parts:
        assert part in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"no such file; 'swarmtrain create --template > run\.toml'"):
        load_run_file(tmp_path / "run.toml")
    with pytest.raises(RunFileError, match="Is a directory"):
        load_run_file(tmp_path)
    (tmp_path / "latin.toml").write_bytes('name = "a"\n# caf\xe9'.encode("latin-1"))
    with pytest.raises(RunFileError, match="line 2: not UTF-8 text"):
        load_run_file(tmp_path / "latin.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(RunFileError, match="larger than"):
        load_run_file(tmp_path / "huge.toml")
    (tmp_path / "bom.toml").write_bytes('name = "a"'.encode("utf-8-sig"))
    assert load_run_file(tmp_path / "bom.toml").name == "a"


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_text_escapes_as_another_error(data: st.DataObject) -> None:
    lines = TEMPLATE.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        key = lines[index].partition("=")[0]
        value = data.draw(st.sampled_from(["", "-1", "1e400", "[]", "{}", '"x"', "2000-01-01", "[[1]]", "nan"]))
        lines[index] = data.draw(st.sampled_from([f"{key}= {value}\n", data.draw(st.text(max_size=20)) + "\n"]))
    message = ""
    try:
        parse("".join(lines))
    except RunFileError as error:
        message = error.message
    assert message == "" or message.isprintable()
