"""`swarmtrain patch diff | apply | info` on small safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from swarmtrain.errors import Incompatible, UserError
from swarmtrain.patch import patch


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    old = {"a": rng.standard_normal((50, 40)).astype(np.float16), "b": np.arange(10), "c": np.zeros((), np.float32)}
    new = {name: array.copy() for name, array in old.items()}
    new["a"].view(np.uint16)[::7] += 1
    save_file(old, tmp_path / "old.safetensors", {"format": "pt"})
    save_file(new, tmp_path / "new.safetensors", {"format": "pt"})
    return tmp_path / "old.safetensors", tmp_path / "new.safetensors"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(patch, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False)
    return result.output


def test_diff_apply_and_info(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out, again = tmp_path / "p.swc", tmp_path / "again.safetensors"
    assert "elements differ" in run("diff", old, new, "-o", out)
    assert "verified" in run("apply", old, out, "-o", again)
    assert again.read_bytes() == new.read_bytes()
    assert load_file(again).keys() == load_file(new).keys()
    rows = json.loads(run("info", out, "--json"))
    assert rows["codec"] == "patch"
    assert rows["changed_tensors"] == 1
    assert "result hash" in run("info", out)


def test_nothing_is_left_behind_by_a_wrong_base_or_damage(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out, target = tmp_path / "p.swc", tmp_path / "again.safetensors"
    run("diff", old, new, "-o", out)
    other = load_file(old)
    other["b"] += 1
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(Incompatible, match="hash"):
        run("apply", tmp_path / "other.safetensors", out, "-o", target)
    damaged = bytearray(out.read_bytes())
    damaged[-20] ^= 4
    out.write_bytes(damaged)
    with pytest.raises(UserError, match="cannot be used"):
        run("apply", old, out, "-o", target)
    assert {path.name for path in tmp_path.iterdir()} == {
        "old.safetensors",
        "new.safetensors",
        "other.safetensors",
        "p.swc",
    }


def test_files_with_different_tensors_are_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, _ = files
    state = load_file(old)
    del state["b"]
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(Incompatible, match="'b'"):
        run("diff", old, tmp_path / "less.safetensors", "-o", tmp_path / "p.swc")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be used"):
        run("info", tmp_path / "junk")
    with pytest.raises(UserError, match="safetensors"):
        run("diff", tmp_path / "junk", old, "-o", tmp_path / "p.swc")


def test_an_absolute_patch_may_be_applied_twice(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out, target = tmp_path / "p.swc", tmp_path / "again.safetensors"
    run("diff", old, new, "--absolute", "--level", "fast", "-o", out)
    run("apply", new, out, "-o", target)
    assert target.read_bytes() == new.read_bytes()
