"""What a user is told when something goes wrong: one line and a documented exit code.

Code anywhere in this package raises :class:`UserError` (or a subclass) for everything a user can cause or
mend. The command line's error boundary prints the message as one line on stderr and exits with the code.
Anything else that escapes is a defect of ours: one line naming the log file, which holds the traceback.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The process's exit codes. Scripts rely on these numbers: add, never renumber."""

    OK = 0
    ERROR = 1
    USAGE = 2  # a wrong option, argument, run file or invite link
    NO_PEER = 3  # none of the given peers could be reached
    NO_RUN = 4  # run not found, or its name is ambiguous
    INCOMPATIBLE = 5  # version, model, data or manifest differ
    NO_ROOM = 6  # not enough disk or memory
    BAD_FOLDER = 7  # a checkpoint or output folder that cannot be used
    PORT_BUSY = 8
    REFUSED = 9  # a peer of the run refused us
    NOT_ADMITTED = 10  # the run admits invited or listed peers only, and this peer is none of them
    INTERRUPTED = 130  # Ctrl-C
    TERMINATED = 143  # SIGTERM


class UserError(Exception):
    """An error to be shown as one line. ``message`` says what is wrong and, where known, what to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Incompatible(UserError):
    """Two sides differ in a field that must be equal; the message names the field and both values."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.INCOMPATIBLE)


class ManifestError(Incompatible):
    """A run manifest that is malformed, unsigned, of another version, or describes an impossible run."""


class RunFileError(UserError):
    """A run file that cannot be used; the message names file, line and key."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class InviteError(UserError):
    """An invite link or a run's name that cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class NotAdmitted(UserError):
    """This peer may not take part in the run; the message names run, reason and remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.NOT_ADMITTED)


def first_user_error(error: BaseException) -> UserError | None:
    """Returns the first :class:`UserError` inside ``error``, looking into exception groups, or None."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = first_user_error(inner)
            if found is not None:
                return found
    return None


def contains(error: BaseException, kind: type[BaseException]) -> bool:
    """True if ``error`` is of ``kind`` or is an exception group that holds one."""
    if isinstance(error, kind):
        return True
    return isinstance(error, BaseExceptionGroup) and any(contains(inner, kind) for inner in error.exceptions)


def one_line(text: str, limit: int = 400) -> str:
    """Returns ``text`` fit for a terminal: no control characters, one line, at most ``limit`` characters.

    Messages may quote what a stranger sent, so escape sequences must not reach the terminal.
    """
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
