"""`swarmtrain patch diff | apply | info` on small safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click import UsageError
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


def test_a_patch_with_a_history_needs_it_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(20_000).astype(np.float16)
    drift = np.where(rng.random(20_000) < 0.3, rng.choice([-1, 1], 20_000), 0).astype(np.int16)
    paths = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for n, path in enumerate(paths):
        save_file({"a": (weights.view(np.int16) + np.int16(n) * drift).view(np.float16)}, path)
    before, old, new = paths
    out, plain, target = tmp_path / "p.swc", tmp_path / "plain.swc", tmp_path / "again.safetensors"
    run("diff", old, new, "--history", before, "-o", out)
    run("diff", old, new, "--level", "best", "-o", plain)
    assert out.stat().st_size < plain.stat().st_size / 2
    with pytest.raises(Incompatible, match=r"needs the weights before .*--history"):
        run("apply", old, out, "-o", target)
    with pytest.raises(Incompatible, match=r"2\.safetensors has"):
        run("apply", old, out, "--history", new, "-o", target)
    assert not target.exists()
    run("apply", old, out, "--history", before, "-o", target)
    assert target.read_bytes() == new.read_bytes()
    rows = [json.loads(run("info", path, "--json")) for path in (out, plain)]
    assert len(rows[0]["needs_history"]) == 64
    assert rows[1]["needs_history"] is None
    for options in (["--level", "fast"], ["--absolute"]):
        with pytest.raises(UsageError, match="--history goes with"):
            run("diff", old, new, "--history", before, "-o", out, *options)
    other = {"a": np.zeros(20_000, np.int16)}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(Incompatible, match="tensor 'a'"):
        run("apply", old, out, "--history", tmp_path / "other.safetensors", "-o", target)


def test_an_absolute_patch_may_be_applied_twice(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out, target = tmp_path / "p.swc", tmp_path / "again.safetensors"
    run("diff", old, new, "--absolute", "--level", "fast", "-o", out)
    run("apply", new, out, "-o", target)
    assert target.read_bytes() == new.read_bytes()
