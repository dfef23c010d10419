"""The page of reported failures names tests; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reported-failures.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))))
CASES = re.split(r"\n\n(?=\*\*C\d\d)", PAGE.read_text(encoding="utf-8"))[1:]


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_named_test_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_case_names_a_test() -> None:
    assert len(CASES) == 27
    assert [case.splitlines()[0] for case in CASES if "`tests/" not in case] == []
