"""The run file: what a creator writes in TOML, turned into the checked sections of a manifest.

Everything but the name has a default. Keys may be written with ``-`` or ``_``. Every complaint is one line that
names the file, the line and the key; a misspelt key gets a suggestion.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from swarmtrain.errors import RunFileError, one_line
from swarmtrain.manifest import (
    AdmissionSection,
    DataSection,
    FieldError,
    MixerSection,
    ModelSection,
    OptimizerSection,
    RoundSection,
    TokenizerSection,
)
from swarmtrain.naming import NAME_RULE, is_run_name
from swarmtrain.tokenizer import VOCAB_SIZE

MAX_RUN_FILE_BYTES = 1 << 20
DEFAULT_INNER_STEPS = 20

# What people type out of habit, and what it is called here.
_HABITS = {
    "lr": "learning-rate",
    "max-lr": "learning-rate",
    "max-steps": "total-steps",
    "steps": "total-steps",
    "gradient-accumulation-steps": "grad-accumulation",
    "per-device-train-batch-size": "batch-size",
    "max-grad-norm": "grad-clip",
    "clip": "grad-clip",
    "layers": "num-layers",
    "num-hidden-layers": "num-layers",
    "num-attention-heads": "num-heads",
    "num-key-value-heads": "num-kv-heads",
    "max-position-embeddings": "context-length",
    "block-size": "context-length",
    "h": "inner-steps",
    "local-steps": "inner-steps",
    "momentum": "alpha",
    "outer-lr": "beta",
    "type": "kind",
    "path": "text",
    "hash": "content-hash",
    "members": "peers",
}


class ValidationSource(msgspec.Struct, frozen=True, kw_only=True):
    """``[validation]``: a text file beside the run file; None takes held-out text of Python's own help."""

    text: str | None = None


class GenesisSource(msgspec.Struct, frozen=True, kw_only=True):
    """``[genesis]``: a seed, or a folder with ``model.safetensors`` and ``config.json``."""

    seed: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.weights is not None:
            raise FieldError("genesis.weights", self.weights, "given without genesis.seed: one of the two")


class _Root(msgspec.Struct, frozen=True, kw_only=True):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A checked run file. ``model`` is None where the sizes come from the genesis weights' own config."""

    path: Path
    name: str
    model: ModelSection | None
    tokenizer: TokenizerSection
    data: DataSection
    optimizer: OptimizerSection
    round: RoundSection
    mixer: MixerSection
    validation_text: Path | None
    genesis_seed: int | None
    genesis_weights: Path | None
    admission: AdmissionSection


S = TypeVar("S", bound=msgspec.Struct)


def load_run_file(path: Path) -> RunFile:
    """Reads and checks the run file at ``path``.

    Raises:
        RunFileError: with one line that names the file, the line and the key.
    """
    return parse_run_file(_read(path), path)


def parse_run_file(text: str, path: Path) -> RunFile:
    """Checks the text of a run file. ``path`` serves messages and relative file names; it is not read."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, at, place = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", place)
        number = line[1] if line else len(text.splitlines())  # else "at end of document"
        where = f"{path}, line {number}" if at else str(path)
        raise RunFileError(f"{where}: not valid TOML: {one_line(message, 200)}") from None
    except RecursionError:
        raise RunFileError(f"{path}: nested too deeply") from None
    return _Reader(path, text, document).run_file()


class _Reader:
    """Turns the parsed document into sections, knowing where each key stands."""

    _SECTIONS = ("model", "tokenizer", "data", "validation", "optimizer", "round", "mixer", "genesis", "admission")

    def __init__(self, path: Path, text: str, document: Mapping[str, Any]) -> None:
        self._path = path
        self._lines = _key_lines(text)
        self._document = document

    def run_file(self) -> RunFile:
        known = ("name", *self._SECTIONS)
        for key in self._document:
            if key not in known:
                self._unknown("", key, known)
        name = self._name()
        round_given = "round" in self._document
        round_section = self._section("round", RoundSection) if round_given else None
        genesis = self._section("genesis", GenesisSource)
        validation = self._section("validation", ValidationSource)
        keeps_model = genesis.weights is None or "model" in self._document
        model = self._section("model", ModelSection) if keeps_model else None
        if model is not None and model.vocab_size < VOCAB_SIZE:
            problem = f"{model.vocab_size} is too small; the byte tokenizer has {VOCAB_SIZE} tokens"
            self._fail("model", "vocab-size", problem)
        return RunFile(
            path=self._path,
            name=name,
            model=model,
            tokenizer=self._section("tokenizer", TokenizerSection),
            data=self._section("data", DataSection),
            optimizer=self._section("optimizer", OptimizerSection),
            round=round_section or RoundSection(inner_steps=DEFAULT_INNER_STEPS),
            mixer=self._section("mixer", MixerSection),
            validation_text=self._beside(validation.text),
            genesis_seed=None if genesis.weights is not None else (genesis.seed or 0),
            genesis_weights=self._beside(genesis.weights),
            admission=self._section("admission", AdmissionSection),
        )

    def _name(self) -> str:
        name = self._document.get("name")
        if name is None:
            raise RunFileError(f'{self._path}: name is missing; begin the file with name = "my-run"')
        if not isinstance(name, str) or not is_run_name(name):
            self._fail("", "name", f"{one_line(repr(name), 80)} is no name for a run; use {NAME_RULE}")
        return name

    def _section(self, name: str, kind: type[S]) -> S:
        table = self._document.get(name, {})
        if not isinstance(table, dict):
            self._fail("", name, f"is a section; write [{name}] on a line of its own and its keys below")
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        values: dict[str, object] = {}
        for key, value in table.items():
            field = fields.get(key.replace("-", "_"))
            if field is None:
                self._unknown(name, key, fields)
            if field.name in values:
                self._fail(name, key, "given twice, once with '-' and once with '_'")
            try:
                values[field.name] = msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                problem = one_line(str(error).replace("`", ""), 200)
                self._fail(name, key, f"{one_line(repr(value), 80)} does not fit: {problem}")
        try:
            return kind(**values)
        except FieldError as error:
            self._fail(name, error.field.partition(".")[2].replace("_", "-"), one_line(str(error)))
        except ValueError as error:
            # The model's sizes do not fit together: the message names the first field concerned.
            named = [key for key in values if re.search(rf"\b{key}\b", str(error))]
            self._fail(name, named[0].replace("_", "-") if named else "", one_line(str(error)))

    def _beside(self, name: str | None) -> Path | None:
        return None if name is None else self._path.parent / Path(name).expanduser()

    def _unknown(self, section: str, key: str, known: Mapping[str, object] | tuple[str, ...]) -> NoReturn:
        plain = key.replace("_", "-")
        names = [name.replace("_", "-") for name in known]
        habit = _HABITS.get(plain.lower())
        close = [habit] if habit in names else difflib.get_close_matches(plain.lower(), names, 1, 0.6)
        if not close and not section:
            close = [f"[{s}] {plain}" for s, fields in _SECTION_FIELDS.items() if plain in fields][:1]
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(names)}"
        self._fail(section, key, f"unknown {'key' if section else 'key or section'}; {hint}")

    def _fail(self, section: str, key: str, problem: str) -> NoReturn:
        line = self._line(section, key)
        where = f"{self._path}, line {line}" if line else str(self._path)
        title = " ".join(part for part in (f"[{section}]" if section else "", one_line(key, 60)) if part)
        raise RunFileError(f"{where}: {title}: {problem}")

    def _line(self, section: str, key: str) -> int | None:
        spellings = [(section, key.replace("_", "-")), (section, ""), (key, "")]
        return next((self._lines[s] for s in spellings if s in self._lines), None)


_SECTION_FIELDS = {
    name: [field.name.replace("_", "-") for field in msgspec.structs.fields(kind)]
    for name, kind in (
        ("model", ModelSection),
        ("data", DataSection),
        ("validation", ValidationSource),
        ("optimizer", OptimizerSection),
        ("round", RoundSection),
        ("mixer", MixerSection),
        ("genesis", GenesisSource),
        ("admission", AdmissionSection),
    )
}

_TABLE_LINE = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]")
_KEY_LINE = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*(?:\.\s*["']?([A-Za-z0-9_-]+)["']?\s*)?=""")


def _key_lines(text: str) -> dict[tuple[str, str], int]:
    """Returns where each (section, key) stands; keys in their ``-`` spelling, "" for the section's own line.

    The standard library's parser does not keep positions. A line scan finds every key that people write.
    """
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if table := _TABLE_LINE.match(line):
            section = table[1]
            lines.setdefault((section, ""), number)
        elif key := _KEY_LINE.match(line):
            first, second = key[1], key[2]
            place = (first, second) if second and not section else (section, first)
            lines.setdefault((place[0], place[1].replace("_", "-")), number)
    return lines


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_RUN_FILE_BYTES + 1)
    except FileNotFoundError:
        raise RunFileError(
            f"{path}: no such file; 'swarmtrain create --template > {path.name}' writes one to start from"
        ) from None
    except OSError as error:
        raise RunFileError(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_RUN_FILE_BYTES:
        raise RunFileError(f"{path}: larger than {MAX_RUN_FILE_BYTES} bytes; is this a run file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RunFileError(f"{path}, line {line}: not UTF-8 text") from None


TEMPLATE = """\
# A run file: what every peer of this run will train, in one place.
#     swarmtrain create run.toml
# signs it and prints the commands to go on with. Everything but the name has the default shown here.

name = "my-run"                # a-z, 0-9 and '-'; people type this to join

[model]                        # a decoder-only transformer of the Llama family, about 1 million weights
vocab-size = 256               # the byte tokenizer's; larger is allowed
hidden-size = 128
intermediate-size = 352
num-layers = 4
num-heads = 4
num-kv-heads = 4
context-length = 128
rope-theta = 10000.0
norm-eps = 1e-5
tied-embeddings = true

[tokenizer]
kind = "bytes"                 # one token per byte

[data]
kind = "python"                # "python": the text that ships with each peer's Python
                               # "own": what each peer names with --data
                               # "named": one data set, equal for all, with its content-hash

[validation]
# text = "validation.txt"      # at most 64 KiB, travels with the run; default: held-out Python help

[optimizer]                    # AdamW, linear warm-up, cosine decay
learning-rate = 1e-3
betas = [0.9, 0.95]
weight-decay = 0.1
grad-clip = 1.0
warmup-steps = 20
min-lr-ratio = 0.1
batch-size = 8                 # sequences per peer and inner step
grad-accumulation = 1
total-steps = 400              # inner steps of the whole run
seed = 0

[round]                        # a round ends with an outer step and one exchange
inner-steps = 20               # or: seconds = 60.0, so that slow peers do fewer steps

[mixer]
kind = "matched"               # or "noloco", the paper's form, which needs a gamma
alpha = 0.5                    # outer momentum; 0 for short fine-tunes (with beta = 1)
beta = 0.7                     # outer step size
staleness-cutoff = 4           # rounds

[genesis]                      # the initial weights
seed = 0                       # or: weights = "folder" with model.safetensors and config.json

[admission]                    # who may join
mode = "invite"                # "invite": whom you, or those that you let, invite with 'swarmtrain invite'
                               # "allowlist": peers = ["64-digit peer id", ...]
                               # "open": everybody who finds it
"""
