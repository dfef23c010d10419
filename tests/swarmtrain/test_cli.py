"""The command line's edge: help, suggestions, environment, and the one error boundary."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from swarm_peer.errors import AddressInUse, ConnectionRefused, IdentityFileError, Refusal

from swarmtrain import __version__
from swarmtrain.cli import cli, run
from swarmtrain.documents import DataError
from swarmtrain.errors import ExitCode, UserError, first_user_error, one_line
from swarmtrain.logfile import KEPT_LOG_FILES, open_log
from swarmtrain.options import BootstrapOptions, ExportOptions, JoinOptions, MonitorOptions

NAMES = ["demo", "create", "bootstrap", "join", "monitor", "doctor", "export", "patch"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replaces the modules behind the commands by ones that take note of their options."""
    seen: list[object] = []
    modules = {name: name for name in ("join", "bootstrap", "monitor", "demo")} | {"export": "export_run"}
    for name, module_name in modules.items():
        module = types.ModuleType(f"swarmtrain.{module_name}")
        setattr(module, f"run_{name}", seen.append)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def invoke(*arguments: str, state: Path | None = None, **env: str) -> tuple[int, str]:
    options = ["--state", str(state)] if state else []
    result = CliRunner(env=env).invoke(cli, [*options, *arguments], prog_name="swarmtrain")
    return result.exit_code, result.output


def test_version() -> None:
    assert invoke("--version") == (0, f"swarmtrain {__version__}\n")


@pytest.mark.parametrize("arguments", [[], *([name] for name in NAMES), ["patch", "diff"]])
def test_help_fits_80_columns_and_teaches(arguments: list[str]) -> None:
    code, text = invoke(*arguments, "--help")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert arguments == [] or "Usage: swarmtrain " + " ".join(arguments) in text
    if arguments and arguments[0] in ("create", "bootstrap", "join", "monitor", "export"):
        assert "Examples:" in text


def test_help_lists_the_commands_in_the_order_of_use() -> None:
    _, text = invoke("--help")
    places = [text.index(f"\n  {name}") for name in NAMES]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["jion"], "Did you mean 'join'?"),
        (["xyzzy"], "Commands: demo, create"),
        (["join", "--run-di", "a"], "--run-id"),
        (["join"], "Give either an invite link"),
        (["join", "--run-id", "Bad Name"], "not a run's name"),
        (["join", "swarm://short"], "invite link"),
        (["join", "--run-id", "a", "--peer", "nowhere"], "no address"),
        (["join", "--run-id", "a", "--peer", "host:0"], "port 0"),
        (["join", "--run-id", "a", "--device", "tpu"], "'tpu' is not one of"),
        (["bootstrap", "--listen", "7766"], "no address"),
        (["bootstrap", "--announce", "198.51.100.7:0"], "port from 1 to 65535"),
        (["bootstrap", "--announce", "peer.example.org"], "port from 1 to 65535"),
        (["bootstrap", "--announce", "[::1]:99999"], "port from 1 to 65535"),
        (["join", "--run-id", "a", "--announce", "0.0.0.0:7766"], "a real host"),
        (["export", "--checkpoint", "x", "--run-id", "a"], "not both"),
        (["export"], "Give either"),
        (["join", "--run-id", "a", "--dht", "hivemind"], "--initial-peers MULTIADDR go together"),
        (["bootstrap", "--initial-peers", "/ip4/1.2.3.4/tcp/1/p2p/" + "Q" * 46], "go together"),
        (["monitor", "--run-id", "a", "--dht", "hivemind", "--initial-peers", "host:1"], "is no multiaddress"),
        (["join", "--run-id", "a", "--dht", "ipfs"], "'ipfs' is not one of"),
        (["create"], "--template"),
        (["demo", "--peers", "1"], "not in the range"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_to_do(arguments: list[str], says: str, tmp_path: Path) -> None:
    code, text = invoke(*arguments, state=tmp_path)
    assert code == ExitCode.USAGE
    assert says in text


def test_options_arrive_as_they_were_given(calls: list[object], tmp_path: Path) -> None:
    invoke(
        "join", "--run-id", "my-run", "--peer", "a:1", "--peer", "b:2", "--device", "cpu", "--data", "x", state=tmp_path
    )
    invoke("bootstrap", "a.run", "b.run", "--announce", "me.example.org:1", state=tmp_path)
    invoke("monitor", "--run-id", "my-run", "--peer", "a:1", "--once", "--json", state=tmp_path)
    invoke("export", "--checkpoint", "runs/x", "--dtype", "bfloat16", state=tmp_path)
    join, bootstrap, monitor, export = calls
    assert isinstance(join, JoinOptions)
    assert (join.run, join.invite, join.peers, join.device) == ("my-run", None, ("a:1", "b:2"), "cpu")
    assert (join.data, join.out, join.listen, join.state) == ((Path("x"),), None, "[::]:0", tmp_path)
    assert join.log_file is not None
    assert join.log_file.parent == tmp_path / "logs"
    assert isinstance(bootstrap, BootstrapOptions)
    assert bootstrap.manifests == (Path("a.run"), Path("b.run"))
    assert (bootstrap.listen, bootstrap.announce) == ("[::]:7766", ("me.example.org:1",))
    assert isinstance(monitor, MonitorOptions)
    assert (monitor.once, monitor.json, monitor.interval_s) == (True, True, 1.0)
    assert isinstance(export, ExportOptions)
    assert (export.checkpoint, export.dtype) == (Path("runs/x"), "bfloat16")


def test_environment_variables_set_options(calls: list[object], tmp_path: Path) -> None:
    invoke("join", "--run-id", "a", "--peer", "a:1", state=tmp_path, SWARMTRAIN_JOIN_DEVICE="mps")
    (join,) = calls
    assert isinstance(join, JoinOptions)
    assert join.device == "mps"


def test_a_misspelt_environment_variable_is_not_ignored_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARMTRAIN_JOIN_DEVISE", "cpu")
    run(lambda: None)
    assert "did you mean SWARMTRAIN_JOIN_DEVICE?" in capsys.readouterr().err


def test_help_of_a_command_writes_no_files(tmp_path: Path) -> None:
    invoke("join", "--help", state=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def fails(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("no such run", ExitCode.NO_RUN), 4, "swarmtrain: error: no such run\n"),
        (UserError("two\nlines\x1b[31m"), 1, "swarmtrain: error: two lines [31m\n"),
        (ExceptionGroup("g", [ExceptionGroup("h", [UserError("deep", ExitCode.REFUSED)])]), 9, "error: deep"),
        (ExceptionGroup("g", [ValueError("x"), UserError("known", ExitCode.NO_PEER)]), 3, "error: known"),
        (UserError("stopped; saved in runs/a", ExitCode.INTERRUPTED), 130, "swarmtrain: stopped; saved in runs/a\n"),
        (UserError("terminated", ExitCode.TERMINATED), 143, "swarmtrain: terminated\n"),
        (KeyboardInterrupt(), 130, "swarmtrain: stopped\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "swarmtrain: stopped\n"),
        (click.Abort(), 130, "swarmtrain: stopped\n"),
        (AddressInUse("0.0.0.0:7766", 7766), 8, "port 7766 is in use"),
        (ConnectionRefused("a:1"), 3, "refused the connection"),
        (IdentityFileError("key file k is open to others"), 7, "error: key file k is open"),
        (ExceptionGroup("g", [Refusal("banned")]), 9, "refused: banned"),
        (DataError("x.txt: empty"), DataError("").exit_code, "swarmtrain: error: x.txt: empty\n"),
        (FileNotFoundError(2, "No such file or directory", "gone.txt"), 1, "error: gone.txt: No such file"),
        (MemoryError(), 6, "out of memory"),
        (SystemExit(5), 5, ""),
        (SystemExit(), 0, ""),
        (click.UsageError("bad"), 2, "Error: bad"),
    ],
)
def test_each_error_has_one_line_and_its_code(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lambda: fails(error)) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") <= 1
    assert "Traceback" not in captured.err


def test_a_defect_gives_one_line_and_its_traceback_goes_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = open_log(tmp_path, "join")
    assert log is not None
    assert run(lambda: fails(ExceptionGroup("tasks", [ZeroDivisionError("by zero")]))) == 1
    captured = capsys.readouterr()
    assert captured.err == f"swarmtrain: internal error: ZeroDivisionError: by zero; details are in {log}\n"
    text = log.read_text(encoding="utf-8")
    assert "Traceback" in text
    assert "test_cli.py" in text


def test_no_log_file_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    assert open_log(blocked, "join") is None
    run(lambda: fails(ZeroDivisionError("by zero")))
    assert "no log file could be written" in capsys.readouterr().err


def test_old_log_files_are_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(KEPT_LOG_FILES + 10):
        (folder / f"2000010{number:03}-join-1.log").write_text("")
    open_log(tmp_path, "join")
    assert len(list(folder.iterdir())) == KEPT_LOG_FILES


def test_verbose_talks_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_log(tmp_path, "join", verbosity=1)
    logging.getLogger("swarm_peer").info("hello")
    logging.getLogger("swarm_peer").debug("details")
    assert capsys.readouterr().err == "INFO swarm_peer: hello\n"


@pytest.mark.processes
def test_real_process_ends_without_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "swarmtrain.cli", "create", str(tmp_path / "none.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == ExitCode.USAGE
    assert ended.stdout == ""
    assert "no such file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_exit_codes_are_distinct_and_documented() -> None:
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"| {int(code)} |" in page


def test_one_line() -> None:
    assert one_line("a\n\tb\x00c") == "a b c"
    assert one_line("x" * 500, 10) == "x" * 9 + "…"
    assert first_user_error(ValueError()) is None
