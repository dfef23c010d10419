"""What is inside the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from swarmtrain import __version__

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"swarmtrain", "swarm_peer", "swarm_compression", f"swarmtrain-{__version__}.dist-info"}
    for package, folder in (
        ("swarmtrain", ROOT / "swarmtrain"),
        ("swarm_peer", ROOT / "peer" / "swarm_peer"),
        ("swarm_compression", ROOT / "compression" / "swarm_compression"),
    ):
        modules = {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
        assert modules <= set(wheel.namelist())
        assert f"{package}/py.typed" in wheel.namelist()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    folder = f"swarmtrain-{__version__}.dist-info"
    metadata = wheel.read(f"{folder}/METADATA").decode()
    assert f"Version: {__version__}\n" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "swarmtrain = swarmtrain.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()


def test_the_changelog_knows_the_version_or_has_unreleased_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in text or "## [Unreleased]" in text
