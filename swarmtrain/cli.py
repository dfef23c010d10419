"""The command line's edge: the group of commands and the one place where errors become exit codes.

Light on purpose: ``--version`` and ``--help`` import click and nothing heavy. What a command does lives in a module
of its own, imported when the command is called.
"""

from __future__ import annotations

import difflib
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click

from swarmtrain import __version__
from swarmtrain.commands import COMMANDS
from swarmtrain.errors import ExitCode, UserError, contains, first_user_error, one_line
from swarmtrain.logfile import open_log, state_folder

_ENV_PREFIX = "SWARMTRAIN"


class _Group(click.Group):
    """Commands in the order of a run's life, and a suggestion for a misspelt one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = difflib.get_close_matches(name.lower(), list(self.commands), 1, 0.5)
            hint = f" Did you mean {close[0]!r}?" if close else f" Commands: {', '.join(self.commands)}."
            ctx.fail(f"No such command {one_line(name, 40)!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 80,
        "auto_envvar_prefix": _ENV_PREFIX,
    },
    epilog="""\b
Try it on this machine alone:
  swarmtrain demo
\b
Train with a friend:
  swarmtrain create run.toml         you, once: sign the run
  swarmtrain bootstrap my-run.run    you, where others can reach it: serve it
  swarmtrain join 'swarm://…'        all: train (bootstrap prints this line)

Every option can also be set as SWARMTRAIN_COMMAND_OPTION, for example
SWARMTRAIN_JOIN_DEVICE=cpu. Exit codes: docs/troubleshooting.md.""",
)
@click.version_option(__version__, "-V", "--version", prog_name="swarmtrain", message="%(prog)s %(version)s")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for your identity key and the log files.  [default: ~/.local/state/swarmtrain]",
)
@click.option("-v", "--verbose", count=True, help="Show the log on stderr; twice for details.")
@click.pass_context
def cli(ctx: click.Context, state: Path | None, verbose: int) -> None:
    """Train one language model together, over ordinary internet links.

    Every peer trains its own replica at its own speed and keeps meeting one other peer at a time to bring the two
    replicas together. No server, nobody waits, anybody may leave at any time.
    """
    ctx.obj = {"state": state or state_folder()}


for _command in COMMANDS:
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits. No exception gets past here, and no traceback reaches the terminal."""
    sys.exit(run(lambda: cli.main(args=arguments, prog_name="swarmtrain", standalone_mode=False)))


def run(action: Callable[[], object]) -> int:
    """Calls ``action`` and returns the process's exit code, after telling the user about any error in one line.

    A :class:`UserError`, also inside an exception group, gives its message and code; Ctrl-C gives 130; an
    unexpected exception gives one line that names the log file, which gets the traceback.
    """
    _warn_of_unknown_variables()
    logging.getLogger().addHandler(logging.NullHandler())  # else tracebacks go to stderr before a log is open
    try:
        result = action()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _say("stopped", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`: that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else (ExitCode.OK if stop.code is None else ExitCode.ERROR)
    except BaseException as error:
        return _report(error)
    return result if isinstance(result, int) else ExitCode.OK


def _report(error: BaseException) -> int:
    known = first_user_error(error) or _translate(error)
    if known is not None:
        logging.getLogger("swarmtrain").info("ends with an error", exc_info=error)
        stopped = known.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        return _say(known.message if stopped else f"error: {known.message}", known.exit_code)
    if contains(error, KeyboardInterrupt):
        return _say("stopped", ExitCode.INTERRUPTED)
    where = _log_file() or open_log(state_folder(), "error")
    logging.getLogger("swarmtrain").critical("unexpected error", exc_info=error)
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    summary = one_line(f"{type(first).__name__}: {first}", 200)
    details = f"; details are in {where}" if where else " (no log file could be written)"
    return _say(f"internal error: {summary}{details}", ExitCode.ERROR)


def _translate(error: BaseException) -> UserError | None:
    """Returns the user's error for what other packages raise, looking into exception groups, else None.

    Finds the peer package's types among the loaded modules: if it was never imported, it raised nothing.
    """
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_translate, error.exceptions)), None)
    peer = sys.modules.get("swarm_peer.errors")
    if peer is not None and isinstance(error, peer.PeerError):
        codes = (
            (peer.AddressInUse, ExitCode.PORT_BUSY),
            (peer.ConnectError, ExitCode.NO_PEER),
            (peer.Refusal, ExitCode.REFUSED),
            (peer.IdentityFileError, ExitCode.BAD_FOLDER),
        )
        return UserError(str(error), next((code for kind, code in codes if isinstance(error, kind)), ExitCode.ERROR))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return UserError(f"{error.filename}: {error.strerror}", ExitCode.ERROR)
    if isinstance(error, MemoryError):
        return UserError("out of memory", ExitCode.NO_ROOM)
    return None


def _say(message: str, code: ExitCode) -> int:
    click.echo(f"swarmtrain: {one_line(message, 2000)}", err=True)
    return code


def _log_file() -> str | None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.handlers.RotatingFileHandler):
            return handler.baseFilename
    return None


def _warn_of_unknown_variables() -> None:
    """A misspelt variable that is silently ignored is worse than none: says so."""
    known = {f"{_ENV_PREFIX}_{(option.name or '').upper()}" for option in cli.params}
    for name, command in cli.commands.items():
        commands = {"": command}
        if isinstance(command, click.Group):
            commands |= {f"{sub}_": inner for sub, inner in command.commands.items()}
        for prefix, inner in commands.items():
            known |= {f"{_ENV_PREFIX}_{name}_{prefix}{option.name or ''}".upper() for option in inner.params}
            known |= {option.envvar for option in inner.params if isinstance(option.envvar, str)}
    for variable in sorted(os.environ):
        if variable.startswith(f"{_ENV_PREFIX}_") and variable not in known:
            close = difflib.get_close_matches(variable, known, 1, 0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            click.echo(f"swarmtrain: environment variable {variable} is not known and ignored{hint}", err=True)


if __name__ == "__main__":
    main()
