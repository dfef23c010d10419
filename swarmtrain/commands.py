"""What each command is called, takes and says about itself. Each turns its arguments into one frozen options object
and calls the module that does the work, imported only then. What several take is in `shared_options`.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import click

from swarmtrain.logfile import open_log
from swarmtrain.options import (
    DEFAULT_BOOTSTRAP_PORT,
    BootstrapOptions,
    CommonOptions,
    CreateOptions,
    DemoOptions,
    DoctorOptions,
    ExportOptions,
    InviteOptions,
    JoinOptions,
    MonitorOptions,
    RevokeOptions,
)
from swarmtrain.patch import patch
from swarmtrain.shared_options import (
    ADDRESS,
    ANY_PATH,
    DURATION,
    FILE,
    FOLDER,
    INVITE,
    PEER,
    PEER_ID,
    announce,
    as_json,
    connect_timeout,
    finds_a_run,
    finds_through_hivemind,
    identity,
    interface,
    lan,
    limits,
    portmap,
    require_one_dht,
    require_one_run,
)


def _call(module: str, function: str, options: CommonOptions) -> object:
    verbosity = int(click.get_current_context().find_root().params.get("verbose", 0))
    log_file = open_log(options.state, module, verbosity=verbosity)
    work = getattr(importlib.import_module(f"swarmtrain.{module}"), function)
    return work(dataclasses.replace(options, log_file=log_file))


@click.command(
    short_help="Sign a run file, so that others can join it.",
    epilog="""\b
Examples:
  swarmtrain create --template > run.toml
  swarmtrain create run.toml
  swarmtrain create run.toml --peer train.example.org:7766""",
)
@click.argument("run_file", type=FILE, required=False, metavar="RUN.TOML")
@click.option("--template", is_flag=True, help="Print a commented run file to start from, and do nothing else.")
@click.option("--out", type=FOLDER, default=Path("."), show_default=True, help="Folder for NAME.run and NAME.blobs.")
@click.option(
    "--peer",
    "peers",
    type=PEER,
    multiple=True,
    metavar="HOST:PORT",
    help="Entry point to put into the invite link. May be given several times.",
)
@identity
@as_json
@click.pass_obj
def create(obj: dict[str, Any], /, run_file: Path | None, template: bool, **values: Any) -> object:  # noqa: ANN401
    """Sign a run: turn RUN.TOML into a manifest that peers can trust.

    Writes NAME.run (the signed manifest) and NAME.blobs (the validation text, and the initial weights if you bring
    some), and prints the run id, an invite link and what to do next.
    """
    if template:
        from swarmtrain.runfile import TEMPLATE

        click.echo(TEMPLATE, nl=False)
        return None
    if run_file is None:
        raise click.UsageError("Name a run file, or use --template to get one to start from.")
    return _call("create", "run_create", CreateOptions(**obj, run_file=run_file, **values))


@click.command(
    short_help="Be the first peer that newcomers contact.",
    epilog=f"""\b
Examples:
  swarmtrain bootstrap my-run.run
  swarmtrain bootstrap my-run.run --announce train.example.org:{DEFAULT_BOOTSTRAP_PORT}
  swarmtrain bootstrap --listen '[::]:9000' --peer other.example.org:{DEFAULT_BOOTSTRAP_PORT}""",
)
@click.argument("manifests", type=FILE, nargs=-1, metavar="[NAME.run]...")
@click.option(
    "--listen",
    type=ADDRESS,
    default=f"[::]:{DEFAULT_BOOTSTRAP_PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; [::] stands for all, IPv4 and IPv6.",
)
@announce
@interface
@connect_timeout
@limits
@lan
@portmap
@click.option(
    "--peer",
    "peers",
    type=PEER,
    multiple=True,
    metavar="HOST:PORT",
    help="Another bootstrap peer to join. May be given several times.",
)
@finds_through_hivemind
@identity
@as_json
@click.pass_obj
def bootstrap(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Be the way in: a small, long-running peer that newcomers contact first.

    Serves the manifests of the runs you name, prints the line that the next person pastes, and trains nothing. Run
    it where others can reach it. A run goes on without it; only newcomers need some peer to start from.
    """
    require_one_dht(values["dht"], values["initial_peers"])
    return _call("bootstrap", "run_bootstrap", BootstrapOptions(**obj, **values))


@click.command(
    short_help="Train with the others.",
    epilog="""\b
Examples:
  swarmtrain join 'swarm://my-run@1f2e3d4c/…?peer=…'
  swarmtrain join --run-id my-run --peer train.example.org:7766
  swarmtrain join --run-id my-run --peer train.example.org:7766 --resume

Ctrl-C says goodbye to the others, saves and leaves; a second Ctrl-C stops at
once. The others train on either way.""",
)
@finds_a_run
@finds_through_hivemind
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "mps"]),
    default="auto",
    show_default=True,
    help="Where to train; auto takes a GPU if there is one.",
)
@click.option(
    "--data",
    type=ANY_PATH,
    multiple=True,
    metavar="PATH",
    help="Your text: a file or a folder (.txt .md .rst .py .jsonl), if the run wants your own. "
    "May be given several times.",
)
@click.option("--out", type=FOLDER, help="Folder for checkpoints and the final model.  [default: runs/NAME]")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in the --out folder.")
@click.option(
    "--listen",
    type=ADDRESS,
    default="[::]:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; [::] stands for all, IPv4 and IPv6, and port 0 for any free one.",
)
@announce
@interface
@connect_timeout
@limits
@lan
@portmap
@identity
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads for training.  [default: all]")
@click.option(
    "--checkpoint-s",
    type=click.FloatRange(1.0, 86400.0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between checkpoints.",
)
@click.option("--relay-only", is_flag=True, hidden=True)
@click.option(
    "--linger-s",
    type=click.FloatRange(0.0, 86400.0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to go on serving weights to others after the last step.",
)
@as_json
@click.pass_obj
def join(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Train with the others: find the run, check it, get the weights, train.

    The run brings its own model, data recipe and settings. Versions, model, data, disk and memory are checked before
    anything large is fetched.
    """
    require_one_run(values["invite"], values["run"])
    require_one_dht(values["dht"], values["initial_peers"])
    return _call("join", "run_join", JoinOptions(**obj, **values))


@click.command(
    short_help="Invite one more peer.",
    epilog="""\b
Examples:
  swarmtrain invite my-run.run --peer PEERID@train.example.org:7766
  swarmtrain invite runs/my-run --peer train.example.org:7766 --expires 12h
  swarmtrain invite my-run.run --peer train.example.org:7766 --may-invite""",
)
@click.argument("run", type=ANY_PATH, metavar="RUN")
@click.option(
    "--peer",
    "peers",
    type=PEER,
    multiple=True,
    required=True,
    metavar="HOST:PORT",
    help="Where the newcomer begins. The first one redeems the invite, so it has to be the bootstrap peer. May be "
    "given several times.",
)
@click.option(
    "--expires", type=DURATION, default="7d", show_default=True, metavar="TIME", help="How long the link is good."
)
@click.option(
    "--member-for",
    type=DURATION,
    default="365d",
    show_default=True,
    metavar="TIME",
    help="How long whoever joined with it remains a member.",
)
@click.option("--uses", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many peers it admits.")
@click.option("--may-invite", is_flag=True, help="Whoever joins with it may invite others.")
@connect_timeout
@identity
@click.pass_obj
def invite(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Make an invite link for RUN: the signed NAME.run if you are its creator, else your peer's --out folder.

    The link is a secret until it is used. It is exchanged once, at the peer named first, for a certificate of the
    newcomer's own.
    """
    return _call("inviting", "run_invite", InviteOptions(**obj, **values))


@click.command(
    short_help="Put a peer out of a run.",
    epilog="""\b
Example:
  swarmtrain revoke my-run.run 1f2e3d4c --peer train.example.org:7766""",
)
@click.argument("run", type=ANY_PATH, metavar="RUN")
@click.argument("peer_ids", type=PEER_ID, nargs=-1, required=True, metavar="PEER-ID...")
@click.option(
    "--peer",
    "peers",
    type=PEER,
    multiple=True,
    required=True,
    metavar="HOST:PORT",
    help="Peers of the run to tell; they tell the others. May be given several times.",
)
@identity
@click.pass_obj
def revoke(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Put peers out of RUN, with everybody whom they invited. Only the run's creator can.

    PEER-ID is a member's id of 64 digits, or at least its first eight, or that of an invite. The others stop dealing
    with it within a few seconds, in the middle of the run; what it has received it keeps.
    """
    return _call("inviting", "run_revoke", RevokeOptions(**obj, **values))


@click.command(
    short_help="Watch a run.",
    epilog="""\b
Examples:
  swarmtrain monitor 'swarm://…'
  swarmtrain monitor --run-id my-run --peer train.example.org:7766
  swarmtrain monitor 'swarm://…' --once --json""",
)
@finds_a_run
@connect_timeout
@finds_through_hivemind
@click.option("--once", is_flag=True, help="Print one view and exit.")
@as_json
@click.option(
    "--interval-s",
    type=click.FloatRange(0.2, 3600.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.pass_obj
def monitor(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Watch a run: who trains, how far, how well, and what it costs.

    Only looks; closing it stops nobody. Use --once or --json for scripts.

    \b
    v.loss    validation loss, as measured last (twenty times in a run)
    met       the last partner; ~ at the end: through a relay
    stale     rounds by which that partner's weights were behind
    up, down  bytes so far
    seen      how old the news is
    """
    require_one_run(values["invite"], values["run"])
    require_one_dht(values["dht"], values["initial_peers"])
    return _call("monitor", "run_monitor", MonitorOptions(**obj, **values))


@click.command(
    short_help="Examine the network: what works, what would help.",
    epilog="""\b
Examples:
  swarmtrain doctor
  swarmtrain doctor --peer train.example.org:7766
  swarmtrain doctor --peer train.example.org:7766 --listen '[::]:7766'""",
)
@click.argument("invite", type=INVITE, required=False, metavar="[INVITE]")
@click.option(
    "--peer", "peers", type=PEER, multiple=True, metavar="HOST:PORT", help="Peer to try. May be given several times."
)
@click.option(
    "--listen",
    type=ADDRESS,
    default="[::]:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Address that others are asked to dial; give the port that you have opened.",
)
@announce
@interface
@connect_timeout
@as_json
@click.pass_obj
def doctor(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Examine the network: which addresses are told to others, whether others can dial this machine, which NAT is
    between, whether the clock is right, and what the link carries.

    Takes up to half a minute and 32 MB. Without --peer the peers that earlier starts have saved are tried. Exit code
    3 means that none of them answers.
    """
    return _call("doctor", "run_doctor", DoctorOptions(**obj, **values))


@click.command(
    short_help="Save the trained model as a folder.",
    epilog="""\b
Examples:
  swarmtrain export --run-id my-run --peer train.example.org:7766
  swarmtrain export --checkpoint runs/my-run --out my-model""",
)
@finds_a_run
@connect_timeout
@click.option("--checkpoint", type=ANY_PATH, help="Export from this checkpoint folder instead of from live peers.")
@click.option("--out", type=FOLDER, help="Folder to write.  [default: exported/NAME]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Number format of the weights.",
)
@click.pass_obj
def export(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """Save the model: merge the live replicas, or take a checkpoint.

    Writes a folder with safetensors weights, config, tokenizer and a model card that says how it was made.
    """
    if values["checkpoint"] is None:
        require_one_run(values["invite"], values["run"])
    elif values["invite"] is not None or values["run"] is not None:
        raise click.UsageError("Give either --checkpoint or a run, not both.")
    return _call("export_run", "run_export", ExportOptions(**obj, **values))


@click.command(short_help="See it work, on this machine alone.")
@click.option(
    "--out", type=FOLDER, default=Path("swarmtrain-demo"), show_default=True, help="Folder for the exported model."
)
@click.option("--steps", type=click.IntRange(1, 100_000), help="Inner steps per peer.  [default: fits 4 minutes]")
@click.option("--peers", type=click.IntRange(2, 16), default=3, show_default=True, help="Number of training peers.")
@click.option("--quick", is_flag=True, help="A few steps only: does everything run here?")
@click.option("--keep", is_flag=True, help="Keep the folders and logs of the single peers.")
@click.pass_obj
def demo(obj: dict[str, Any], /, **values: Any) -> object:  # noqa: ANN401
    """See it work: one bootstrap peer and three training peers on this machine.

    Separate processes that talk TLS over loopback, one small model, the text that ships with Python. Ends with a
    table, a line of text from the model and the path of the exported folder.
    """
    return _call("demo", "run_demo", DemoOptions(**obj, **values))


COMMANDS: tuple[click.Command, ...] = (demo, create, bootstrap, invite, join, revoke, monitor, doctor, export, patch)
