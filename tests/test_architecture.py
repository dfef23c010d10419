"""The direction of imports, the absence of pickle and eval, and what must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "swarmtrain": ROOT / "swarmtrain",
    "swarm_peer": ROOT / "peer" / "swarm_peer",
    "swarm_compression": ROOT / "compression" / "swarm_compression",
}
MODULES = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]

# Modules of swarmtrain that run torch; everything else is the command line's or the node process's and must not.
TORCH_SIDE = {
    "checkpoint",
    "evaluation",
    "mixing",
    "model",
    "replica",
    "sampling",
    "tensor_diff",
    "trainer",
    "trainer_state",
}

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "hivemind"}
# The one module that may: a process of its own, never imported by the node.
HIVEMIND_SIDE = PACKAGES["swarmtrain"] / "hivemind_bridge" / "child.py"
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "numpy.load", "np.load", "__import__"}


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield node.module or "", node.lineno


def imported_at_module_level(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: not what stands in functions or under TYPE_CHECKING."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *node.finalbody]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def identify(case: object) -> str:
    return str(case.relative_to(ROOT)) if isinstance(case, Path) else ""


@pytest.mark.parametrize(("package", "path"), MODULES, ids=identify)
def test_imports_point_downwards(package: str, path: Path) -> None:
    allowed = set(PACKAGES) if package == "swarmtrain" else {package}
    for name, line in imported(parse(path)):
        top = name.partition(".")[0]
        assert top not in PACKAGES or top in allowed, f"{path}:{line} imports {name}"


@pytest.mark.parametrize(("package", "path"), MODULES, ids=identify)
def test_nothing_unpickles_or_evaluates(package: str, path: Path) -> None:
    tree = parse(path)
    for name, line in imported(tree):
        top = name.partition(".")[0]
        is_allowed = top == "hivemind" and path == HIVEMIND_SIDE
        assert top not in FORBIDDEN_IMPORTS or is_allowed, f"{path}:{line} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in FORBIDDEN_CALLS, f"{path}:{node.lineno} calls {called}"
            loose = any(keyword.arg == "allow_pickle" for keyword in node.keywords)
            assert not loose, f"{path}:{node.lineno} mentions allow_pickle"


@pytest.mark.parametrize(
    "path", [p for _, p in MODULES if p.parent != PACKAGES["swarmtrain"] or p.stem not in TORCH_SIDE], ids=identify
)
def test_only_the_trainer_side_imports_torch(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported_at_module_level(parse(path))}
    assert "torch" not in tops, f"{path} imports torch; if it belongs to the trainer, list it in TORCH_SIDE"


def loaded_modules(*statements: str) -> set[str]:
    code = ";".join([*statements, "import sys", "print(*sys.modules)"])
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in answer.stdout.split()}


def test_the_node_side_loads_no_torch() -> None:
    names = [f"swarm_peer.{path.stem}" for path in PACKAGES["swarm_peer"].glob("[a-z]*.py")]
    names += ["swarm_compression", "swarmtrain.cli", "swarmtrain.manifest", "swarmtrain.runfile", "swarmtrain.invite"]
    names += ["swarmtrain.create", "swarmtrain.dashboard", "swarmtrain.hivemind_bridge.child"]
    for module in ("node", "bootstrap", "join", "monitor", "demo"):
        if (PACKAGES["swarmtrain"] / f"{module}.py").exists():
            names.append(f"swarmtrain.{module}")
    assert not loaded_modules(f"import {', '.join(names)}") & {"torch", "hivemind"}


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_stay_light(flag: str) -> None:
    statement = f"from swarmtrain.cli import cli; cli.main(['{flag}'], standalone_mode=False)"
    assert not loaded_modules(statement) & {"torch", "numpy", "trio", "cryptography", "msgspec", "rich"}


def test_every_package_is_typed() -> None:
    assert all((folder / "py.typed").exists() for folder in PACKAGES.values())
