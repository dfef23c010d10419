"""The examples run as their README says, in a short form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmtrain.export import ExportCard, export_model
from swarmtrain.genesis import genesis_state
from swarmtrain.model_config import ModelConfig
from swarmtrain.pretrained import load_export

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.processes


def test_finetune(tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        context_length=64,
    )
    card = ExportCard(
        run_name="base",
        run_id=bytes(32),
        peers=1,
        tokens=0,
        merge="untrained",
        spread=None,
        validation_loss=None,
        command="a test",
        swarmtrain_version="0",
    )
    export_model(tmp_path / "base", genesis_state(config, 1), config, card)
    script = ROOT / "examples" / "finetune" / "finetune.py"
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            "--model",
            str(tmp_path / "base"),
            "--out",
            str(tmp_path / "out"),
            "--steps",
            "40",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "snapshots arrived as patches" in done.stdout
    assert "merged" in done.stdout
    state, found = load_export(tmp_path / "out" / "peer-1" / "model")
    assert found == config
    before = genesis_state(config, 1)
    assert any((state[name] != before[name]).any() for name in before)


def test_finetune_says_what_is_wrong_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    script = ROOT / "examples" / "finetune" / "finetune.py"
    done = subprocess.run(
        [sys.executable, str(script), "--model", str(tmp_path / "empty"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
