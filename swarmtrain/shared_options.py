"""Arguments and options that several commands take, and the checks of what is typed there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from swarmtrain.errors import UserError
from swarmtrain.options import download_rate, relay_rate, upload_rate

F = TypeVar("F", bound=Callable[..., object])

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
ANY_PATH = click.Path(path_type=Path)


def _checked(module: str, parser: str) -> Callable[[str], str]:
    """Returns an option type: text that ``parser`` must accept, its one-line error becoming a usage error."""

    def check(text: str) -> str:
        try:
            getattr(importlib.import_module(module), parser)(text)
        except (ValueError, UserError) as error:
            raise click.BadParameter(str(error)) from None
        return text

    return check


ADDRESS = _checked("swarm_peer.addresses", "parse_address")
ANNOUNCED = _checked("swarm_peer.addresses", "parse_announced")
PEER = _checked("swarmtrain.invite", "parse_entry_point")
RUN = _checked("swarmtrain.naming", "parse_run_reference")
MULTIADDRS = _checked("swarmtrain.hivemind_bridge.multiaddr", "parse_multiaddrs")
INVITE = _checked("swarmtrain.invite", "parse_invite")
DURATION = _checked("swarmtrain.durations", "parse_duration")
PEER_ID = _checked("swarmtrain.naming", "parse_peer_id_prefix")


def finds_a_run(command: F) -> F:
    """Adds the three ways to say which run is meant, and where to look for it."""
    command = click.option(
        "--peer",
        "peers",
        type=PEER,
        multiple=True,
        metavar="HOST:PORT",
        help="Where to look for the run: the bootstrap peer, or any peer of the run. May be given several times; "
        "PEERID@HOST:PORT also checks who answers.",
    )(command)
    command = click.option(
        "--run-id",
        "run",
        type=RUN,
        metavar="NAME",
        help="The run: NAME, NAME@fingerprint where two runs have one name, or the 64-digit run id.",
    )(command)
    return click.argument("invite", type=INVITE, required=False, metavar="[INVITE]")(command)


def finds_through_hivemind(command: F) -> F:
    """Adds the two options of the optional hivemind bridge."""
    command = click.option(
        "--initial-peers",
        type=MULTIADDRS,
        multiple=True,
        metavar="MULTIADDR",
        help="Peers of the hivemind DHT, as hivemind-dht prints them. May be given several times.",
    )(command)
    return click.option(
        "--dht",
        type=click.Choice(["own", "hivemind"]),
        default="own",
        show_default=True,
        help="Where peers find each other. hivemind: through an existing hivemind DHT too; only addresses are learnt "
        "from it (needs pip install 'swarmtrain[hivemind]').",
    )(command)


identity = click.option(
    "--identity",
    type=FILE,
    metavar="FILE",
    help="Key file of this peer, made if missing. Every process needs one of its own.  "
    "[default: one in the state folder]",
)
announce = click.option(
    "--announce",
    type=ANNOUNCED,
    multiple=True,
    metavar="HOST:PORT",
    help="Address under which others reach this peer, if it differs from the one it listens on (a router's forwarded "
    "port, a DNS name). May be given several times; nothing else is told then.",
)
interface = click.option(
    "--interface",
    metavar="NAME|ADDRESS",
    help="Tell others the addresses of this network interface only.  [default: all that may be of use]",
)
connect_timeout = click.option(
    "--connect-timeout",
    type=click.FloatRange(1.0, 600.0),
    default=10.0,
    show_default=True,
    envvar="SWARMTRAIN_CONNECT_TIMEOUT",
    metavar="SECONDS",
    help="How long one peer may take to answer a first contact; also $SWARMTRAIN_CONNECT_TIMEOUT. More for slow links.",
)


def limits(command: F) -> F:
    """Adds how much of the link and of the machine's sockets the peer may use."""
    command = click.option(
        "--relay-limit",
        type=relay_rate,
        default="10Mbit",
        show_default=True,
        metavar="RATE|none",
        help="What this peer passes on between peers that cannot reach each other, if others can reach it: their "
        "traffic stays encrypted, and counts in both directions of your link. Those who ask share it alike; who has "
        "had a quarter of what it carries in an hour stands behind the others. none relays nothing.",
    )(command)
    command = click.option(
        "--max-connections",
        type=click.IntRange(8, 100_000),
        metavar="N",
        help="Connections to others at most.  [default: what the open files (ulimit -n) allow, 1024 at most]",
    )(command)
    command = click.option(
        "--limit-down",
        type=download_rate,
        default="none",
        show_default=True,
        metavar="RATE|none",
        help="The most that transfers take of your download: 50Mbit, 6MB (per second).",
    )(command)
    return click.option(
        "--limit-up",
        type=upload_rate,
        default="auto",
        show_default=True,
        metavar="auto|RATE|none",
        help="The most that transfers take of your upload: 17Mbit, 2MB (per second). auto finds out what the uplink "
        "carries and stays at 85 % of it, so that nothing else on it becomes slow.",
    )(command)


lan = click.option(
    "--lan/--no-lan",
    default=True,
    help="Find peers in the local network by beacons, and be found.  [default: yes, unless it listens on loopback]",
)
portmap = click.option(
    "--portmap/--no-portmap",
    default=True,
    help="Ask the home router to forward the port, by NAT-PMP, or UPnP with swarmtrain[portmap].  [default: yes]",
)
as_json = click.option("--json", is_flag=True, help="Print JSON on stdout, for scripts.")


def require_one_run(invite: str | None, run: str | None) -> None:
    if (invite is None) == (run is None):
        raise click.UsageError("Give either an invite link (swarm://…, in quotes) or --run-id NAME --peer HOST:PORT.")


def require_one_dht(dht: str, initial_peers: tuple[str, ...]) -> None:
    if (dht == "hivemind") != bool(initial_peers):
        raise click.UsageError("--dht hivemind and --initial-peers MULTIADDR go together.")
