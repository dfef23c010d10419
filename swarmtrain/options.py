"""The options of every command, as the command line hands them on.

One frozen dataclass per command, made once at the edge and passed down. Nothing here is read from the
environment, and importing this module imports neither numpy, trio nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from swarmtrain.rates import parse_rate

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DhtName = Literal["own", "hivemind"]
DtypeName = Literal["float32", "bfloat16"]

UploadRate = float | Literal["auto"] | None

DEFAULT_BOOTSTRAP_PORT = 7766


def upload_rate(text: str) -> UploadRate:
    """Click's type of ``--limit-up``: bytes per second, "auto", or None for "none"."""
    return "auto" if text == "auto" else download_rate(text)


def download_rate(text: str) -> float | None:
    """Click's type of ``--limit-down``: bytes per second, or None for "none"."""
    if text == "none":
        return None
    try:
        return parse_rate(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def relay_rate(text: str) -> float:
    """Click's type of ``--relay-limit``: bytes per second, 0 for "0" and "none"."""
    return 0.0 if text in ("0", "none") else download_rate(text) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """What every command has: where this user's identity and logs are kept."""

    state: Path  # folder with the identity key file and the log files
    log_file: Path | None = None  # None: no log file could be opened


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateOptions(CommonOptions):
    """``swarmtrain create``."""

    run_file: Path
    out: Path = Path(".")  # folder for NAME.run and NAME.blobs/
    peers: tuple[str, ...] = ()  # entry points to put into the invite link
    identity: Path | None = None  # None: the default key in the state folder
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteOptions(CommonOptions):
    """``swarmtrain invite``. The first of ``peers`` redeems the invite."""

    run: Path  # NAME.run, or the --out folder of a join
    peers: tuple[str, ...] = ()
    expires: str = "7d"
    member_for: str = "365d"
    uses: int = 1
    may_invite: bool = False
    connect_timeout: float = 10.0
    identity: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeOptions(CommonOptions):
    """``swarmtrain revoke``."""

    run: Path
    peer_ids: tuple[str, ...]
    peers: tuple[str, ...] = ()
    identity: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions(CommonOptions):
    """``swarmtrain bootstrap``."""

    manifests: tuple[Path, ...] = ()  # signed manifests (NAME.run) to serve
    listen: str = f"[::]:{DEFAULT_BOOTSTRAP_PORT}"
    announce: tuple[str, ...] = ()
    interface: str | None = None
    connect_timeout: float = 10.0
    limit_up: UploadRate = "auto"  # bytes per second
    limit_down: float | None = None
    relay_limit: float = 1.25e6  # bytes per second; 0: relays nothing
    max_connections: int | None = None  # None: as many as the open files allow
    lan: bool = True
    portmap: bool = True
    peers: tuple[str, ...] = ()  # other bootstrap peers to join
    dht: DhtName = "own"
    initial_peers: tuple[str, ...] = ()  # multiaddresses, for dht="hivemind"
    identity: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions(CommonOptions):
    """``swarmtrain join``. Exactly one of ``run`` and ``invite`` is given."""

    run: str | None = None  # NAME, NAME@fingerprint or the 64-digit run id
    invite: str | None = None
    peers: tuple[str, ...] = ()  # [PEERID@]HOST:PORT
    dht: DhtName = "own"
    initial_peers: tuple[str, ...] = ()
    listen: str = "[::]:0"
    announce: tuple[str, ...] = ()
    interface: str | None = None
    connect_timeout: float = 10.0
    limit_up: UploadRate = "auto"  # bytes per second
    limit_down: float | None = None
    relay_limit: float = 1.25e6  # bytes per second; 0: relays nothing
    max_connections: int | None = None  # None: as many as the open files allow
    lan: bool = True
    portmap: bool = True
    device: DeviceName = "auto"
    data: tuple[Path, ...] = ()
    out: Path | None = None  # None: runs/NAME
    resume: bool = False
    identity: Path | None = None
    threads: int | None = None  # torch's threads; None: the cores this process may use
    checkpoint_s: float = 300.0
    relay_only: bool = False  # listens on nothing and is found through relays
    linger_s: float = 60.0  # how long to go on serving weights after the last step
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(CommonOptions):
    """``swarmtrain doctor``."""

    invite: str | None = None
    peers: tuple[str, ...] = ()
    listen: str = "[::]:0"
    announce: tuple[str, ...] = ()
    interface: str | None = None
    connect_timeout: float = 10.0
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions(CommonOptions):
    """``swarmtrain monitor``."""

    run: str | None = None
    invite: str | None = None
    peers: tuple[str, ...] = ()
    connect_timeout: float = 10.0
    dht: DhtName = "own"
    initial_peers: tuple[str, ...] = ()
    once: bool = False
    json: bool = False
    interval_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(CommonOptions):
    """``swarmtrain export``. One of ``run``, ``invite`` and ``checkpoint`` is given."""

    run: str | None = None
    invite: str | None = None
    checkpoint: Path | None = None
    peers: tuple[str, ...] = ()
    connect_timeout: float = 10.0
    out: Path | None = None  # None: exported/NAME
    dtype: DtypeName = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(CommonOptions):
    """``swarmtrain demo``."""

    out: Path = Path("swarmtrain-demo")
    steps: int | None = None  # None: as many as fit into the demo's four minutes
    peers: int = 3
    quick: bool = False  # a few steps only: does it run at all?
    keep: bool = False  # keep the peers' own folders and logs
