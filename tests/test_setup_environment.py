"""The set-up script's decisions: which torch, what to say, when there is nothing to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "setup_environment.py"


@pytest.fixture
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("setup_environment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def item(name: str, version: str = "1.0", url: str = "https://example.org/x.whl") -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": url}}


CPU = [item("torch", "2.13.0+cpu"), item("numpy")]
CUDA = [item("torch", "2.13.0"), item("nvidia-cublas"), item("triton")]


class Index:
    """Stands for pip and the package indexes: answers each torch requirement with a plan or an error."""

    def __init__(self, script: types.ModuleType, answers: dict[str, Any]) -> None:
        self.script = script
        self.answers = answers
        self.asked: list[tuple[str, list[str]]] = []

    def resolve(self, requirements: list[str], options: list[str]) -> list[dict[str, Any]]:
        requirement = requirements[-1]
        self.asked.append((requirement, options))
        if requirement not in self.answers:
            raise self.script.SetupError(f"there is no {requirement}")
        plan: list[dict[str, Any]] = self.answers[requirement]
        return plan


@pytest.mark.parametrize(
    ("answers", "chosen", "requests"),
    [
        ({"torch==2.13.0": CPU}, CPU, 1),
        ({"torch==2.13.0": CUDA, "torch==2.13.0+cpu": CPU}, CPU, 2),
        ({"torch==2.13.0": CUDA, "torch>=2.4": CUDA}, CUDA, 3),
        ({"torch>=2.4": CPU}, CPU, 3),
        ({"torch==2.13.0": []}, [], 1),
    ],
)
def test_without_a_gpu_a_cpu_build_wins(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], chosen: Any, requests: int
) -> None:
    index = Index(script, answers)
    monkeypatch.setattr(script, "_resolve", index.resolve)
    plan, options = script._plan(["numpy"], "torch>=2.4", usual=False)
    assert plan == chosen
    assert len(index.asked) == requests
    assert options == index.asked[[answers.get(a) == chosen for a, _ in index.asked].index(True)][1]


def test_with_a_gpu_the_usual_build_is_taken(script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(script, {"torch>=2.4": CUDA})
    monkeypatch.setattr(script, "_resolve", index.resolve)
    assert script._plan(["numpy"], "torch>=2.4", usual=True) == (CUDA, [])


def test_no_torch_at_all_is_the_first_failure(script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_resolve", Index(script, {}).resolve)
    with pytest.raises(script.SetupError, match=r"there is no torch==2\.13\.0$"):
        script._plan(["numpy"], "torch>=2.4", usual=False)


def test_what_is_fetched_is_said(script: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "torch 2.whl"
    wheel.write_bytes(b"x" * 3_000_000)
    script._announce([item("torch", "2.13.0+cpu", wheel.as_uri())])
    text = capsys.readouterr().out
    assert "about to install 1 packages, 3 MB: under 1 MB from the network, 3 MB from this disk" in text
    assert "torch 2.13.0+cpu 3 MB" in text


def test_a_full_disk_is_said_before_anything_is_fetched(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "torch.whl"
    wheel.write_bytes(b"x" * 3_000_000)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1_000_000))
    with pytest.raises(script.SetupError, match="not enough disk: about 314 MB are needed"):
        script._announce([item("torch", "2.13.0+cpu", wheel.as_uri())])


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("x NewConnectionError y\nERROR: No matching distribution found for blake3>=1.0", "index cannot be reached"),
        ("ERROR: No matching distribution found for torch==9", "there is no torch==9 for Python 3"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: something else", "pip failed: ERROR: something else"),
    ],
)
def test_pip_failures_become_one_line(script: types.ModuleType, output: str, says: str) -> None:
    assert says in script._explain(output)


def test_a_stamp_of_this_state_means_nothing_to_do(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "VENV", tmp_path)
    monkeypatch.setattr(script, "STAMP", tmp_path / "stamp")
    program = script._in_venv("swarmtrain")
    program.parent.mkdir()
    program.write_text("")
    assert not script._is_done("k", False)
    script.STAMP.write_text('{"key": "k", "dev": false}')
    assert script._is_done("k", False)
    assert not script._is_done("k", True), "the tests need more"
    assert not script._is_done("changed", False)
    script.STAMP.write_text("half writ")
    assert not script._is_done("k", False)


def test_an_old_python_is_refused_in_one_line(script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "OLDEST_PYTHON", (9, 9))
    with pytest.raises(script.SetupError, match=r"and 9\.9 or newer is needed; name one"):
        script._require_python()


def test_it_runs_as_a_script() -> None:
    help_text = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--dev" in help_text
