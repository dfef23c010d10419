"""What a training peer shows on stderr: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarmtrain.status import Status

PLAIN_INTERVAL_S = 10.0
REDRAWS_PER_S = 4
BAR_WIDTH = 16
LINE_WIDTH = 80


class Progress:
    """A context manager; `say` prints a lasting line, the `show` methods the passing one."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = (
            Live(console=self._console, refresh_per_second=REDRAWS_PER_S, transient=True)
            if self._console.is_terminal
            else None
        )
        self._last_plain_s = -math.inf
        self._peers = 0

    def say(self, line: str) -> None:
        """Prints one lasting line, as it is: text may hold what looks like markup."""
        self._console.print(Text(line), soft_wrap=True)

    def show_transfer(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Shows how far a transfer is."""
        share = done_bytes / total_bytes if total_bytes else 1.0
        self._show(f"{what} {bar(share)} {done_bytes / 1e6:.1f}/{total_bytes / 1e6:.1f} MB")

    def show_training(self, status: Status, peers: int) -> None:
        """Shows how far training is; `peers` counts the other live ones."""
        self._show(training_line(status, peers))

    def _show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = time.monotonic()
            self._console.print(Text(line), soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def training_line(status: Status, peers: int) -> str:
    """Returns one line of at most 80 columns about a peer's training."""
    loss = "-" if math.isnan(status.loss) else f"{min(status.loss, 999.0):.3f}"
    text = (
        f" {brief(status.step)}/{brief(status.total_steps)} loss {loss} {brief(status.tokens_per_s)} tok/s"
        f" peers {brief(peers)} met {brief(status.exchanges)} net {status.exchange_share:.1%}"
        f" up {brief(status.bytes_sent)}B"
    )
    share = status.step / status.total_steps if status.total_steps else 0.0
    return bar(share, min(BAR_WIDTH, LINE_WIDTH - len(text) - 2)) + text


def brief(number: float) -> str:
    """Returns a number of at least 0 in at most five characters where it is below 10^18: 999, 9999, 10.0k, 123M."""
    if not math.isfinite(number):
        return "-"
    if number < 9_999.5:
        return f"{number:.0f}"
    units = "kMGTP"
    unit = 0
    number /= 1000
    while number >= 999.5 and unit < len(units) - 1:
        number, unit = number / 1000, unit + 1
    number = min(number, 9999)  # nobody measures more; a stranger may claim it
    return f"{number:.1f}{units[unit]}" if number < 99.95 else f"{number:.0f}{units[unit]}"


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Returns a progress bar that needs neither colour nor Unicode."""
    full = round(width * min(1.0, max(0.0, share)))
    return "[" + "#" * full + "." * (width - full) + "]"
