"""Promises of SECURITY.md that hold for all packages at once, and what is quoted from strangers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_peer.errors import NotAMember, ProtocolError, Refusal, sanitise

from swarmtrain.errors import one_line

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "swarmtrain", ROOT / "peer" / "swarm_peer", ROOT / "compression" / "swarm_compression")
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\nname\u202e\u2028 " + "A" * 5000


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Call):
                yield path, node


def test_every_signature_has_a_domain_of_its_own() -> None:
    domains: dict[object, str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if any(name.endswith("_DOMAIN") for name in names):
                assert isinstance(node.value, ast.Constant)
                assert node.value.value not in domains, f"{path} and {domains[node.value.value]} share a domain"
                domains[node.value.value] = str(path)
    assert len(domains) >= 5
    assert all("\0" not in name for name in domains if isinstance(name, str))


def test_identities_sign_with_a_named_domain_only() -> None:
    signing = [
        (path, call) for path, call in calls() if ast.unparse(call.func).endswith(".sign") and len(call.args) == 2
    ]
    for path, call in signing:
        if path.name in ("tls.py", "identity.py"):  # the certificate's own signature; the method itself
            continue
        assert ast.unparse(call.args[0]).endswith("_DOMAIN"), f"{path}:{call.lineno}"
    assert len(signing) >= 5


def test_nothing_runs_a_shell() -> None:
    for path, call in calls():
        assert ast.unparse(call.func) not in ("os.system", "os.popen", "subprocess.getoutput"), f"{path}:{call.lineno}"
        for keyword in call.keywords:
            assert keyword.arg != "shell", f"{path}:{call.lineno}"


@pytest.mark.parametrize(
    "text",
    [
        sanitise(HOSTILE),
        one_line(HOSTILE),
        str(Refusal(HOSTILE, HOSTILE)),
        str(ProtocolError("oversized-frame", HOSTILE)),
        str(NotAMember(bytes(32), "no-invite", HOSTILE)),
    ],
)
def test_what_a_stranger_says_reaches_no_terminal_as_it_is(text: str) -> None:
    assert text.isprintable()
    assert "\n" not in text
    assert len(text) <= 500
