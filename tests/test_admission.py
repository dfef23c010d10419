"""Runs by invitation, as real processes on loopback: who gets in, who does not, and what they are told."""

from __future__ import annotations

import io
import json
import secrets
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from swarm_peer.certificates import issue_ticket
from swarm_peer.identity import Identity

from swarmtrain import cli
from swarmtrain.create import make_run
from swarmtrain.invite import EntryPoint, Invite, parse_entry_point
from swarmtrain.local_swarm import LocalSwarm, PeerProcess
from swarmtrain.manifest import SignedManifest
from swarmtrain.runfile import parse_run_file

pytestmark = pytest.mark.processes

RUN = """
name = "{name}"
[model]
hidden-size = 32
intermediate-size = 64
num-layers = 1
num-heads = 2
num-kv-heads = 2
context-length = 64
[optimizer]
batch-size = 4
total-steps = {steps}
[round]
inner-steps = 20
[admission]
{admission}
"""
DEADLINE_S = 120.0
NOT_ADMITTED = 10


@dataclass
class Run:
    """A run that is served, and its creator's key."""

    swarm: LocalSwarm
    path: Path
    creator: Identity
    key: Path
    signed: SignedManifest
    entry: str

    def invite(self, *arguments: str) -> str:
        made = command("invite", str(self.path), "--peer", self.entry, "--identity", str(self.key), *arguments)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def join(self, label: str, link: str, *extra: str) -> PeerProcess:
        """A peer with a folder and a key of its own."""
        folder = self.path.parent / label
        log = folder.with_suffix(".log")
        arguments = ["join", link, "--listen", "127.0.0.1:0", "--out", str(folder), "--threads", "1"]
        arguments += ["--device", "cpu", "--identity", str(folder.with_suffix(".pem")), *extra]
        return PeerProcess(label, folder, log, self.swarm._start(arguments, log))

    def plain_link(self) -> str:
        return str(Invite(self.signed.manifest.name, fingerprint_of(self), self.signed.run_id, entries(self.entry)))


def fingerprint_of(run: Run) -> str:
    return run.signed.label.partition("@")[2]


def entries(entry: str) -> tuple[EntryPoint, ...]:
    return (parse_entry_point(entry),)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that needs no process of its own as the command line does, errors included."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as state, redirect_stdout(out), redirect_stderr(err):
        code = cli.run(
            lambda: cli.cli.main(args=["--state", state, *arguments], prog_name="swarmtrain", standalone_mode=False)
        )
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def run_by(folder: Path, admission: str, *, steps: int = 100_000) -> Iterator[Run]:
    out = folder / "swarm"
    with LocalSwarm(out, Console(stderr=True)) as swarm:
        key = out / "creator.pem"
        creator = Identity.load_or_create(key)
        path = out / "closed.run"
        text = RUN.format(name="closed", steps=steps, admission=admission)
        signed = make_run(parse_run_file(text, out / "closed.toml"), creator, path)
        yield Run(swarm, path, creator, key, signed, swarm.bootstrap([path]))


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.1)


def has_ended(peer: PeerProcess) -> bool:
    return peer.process.poll() is not None


def mixes(peer: PeerProcess) -> int:
    peer.read_events()
    return len(peer.exchanges())


def refusal_of(peer: PeerProcess) -> str:
    """The one line that a peer left that was not admitted."""
    wait_until(lambda: has_ended(peer), f"{peer.label} ends")
    text = peer.log.read_text().rpartition("listens on")[2]  # of its newest start
    assert peer.process.returncode == NOT_ADMITTED, text
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert "closed@" in lines[0]
    return lines[0]


def test_invited_peers_train_and_a_revoked_one_is_out_while_they_go_on(tmp_path: Path) -> None:
    with run_by(tmp_path, 'mode = "invite"') as run:
        links = [run.invite("--may-invite"), run.invite(), run.invite()]
        peers = [run.join(f"peer-{number}", link) for number, link in enumerate(links, 1)]
        wait_until(lambda: all(mixes(peer) >= 1 for peer in peers), "three invited peers exchange")
        certificate = peers[0].folder / "certificate"
        assert stat.S_IMODE(certificate.stat().st_mode) == 0o600

        # One peer for one invite, and nobody without.
        assert "invite-used" in refusal_of(run.join("second", links[1]))
        assert "no-invite" in refusal_of(run.join("stranger", run.plain_link()))
        shown = command("monitor", run.plain_link(), "--once", "--json")
        assert shown.returncode == NOT_ADMITTED
        assert "no-invite" in shown.stderr

        # A member who may invite does; one who may not is told so.
        key = str(peers[0].folder.with_suffix(".pem"))
        made = command("invite", str(peers[0].folder), "--peer", run.entry, "--identity", key)
        assert made.returncode == 0, made.stderr
        friend = run.join("friend", made.stdout.strip())
        wait_until(lambda: mixes(friend) >= 1, "the invited peer's guest exchanges")
        key = str(peers[1].folder.with_suffix(".pem"))
        denied = command("invite", str(peers[1].folder), "--peer", run.entry, "--identity", key)
        assert denied.returncode == NOT_ADMITTED
        assert "may not invite" in denied.stderr

        # The member is put out, and with it its guest; the other two train on.
        identity = Identity.load_or_create(peers[0].folder.with_suffix(".pem"))
        out = command(
            "revoke", str(run.path), identity.peer_id.hex()[:8], "--peer", run.entry, "--identity", str(run.key)
        )
        assert out.returncode == 0, out.stderr
        assert out.stdout.strip() == identity.peer_id.hex()
        assert "revoked" in refusal_of(peers[0])
        assert "revoked" in refusal_of(friend)
        before = [mixes(peer) for peer in peers[1:]]
        wait_until(
            lambda: all(mixes(peer) > count + 1 for peer, count in zip(peers[1:], before, strict=True)),
            "the others go on",
        )
        shown = command("monitor", run.invite(), "--once", "--json")
        assert shown.returncode == 0, shown.stderr
        assert identity.peer_id.hex() not in json.dumps(json.loads(shown.stdout))
        assert "revoked" in refusal_of(run.join("peer-1", run.plain_link(), "--resume"))


def test_expired_foreign_and_misdirected_invites(tmp_path: Path) -> None:
    with run_by(tmp_path, 'mode = "invite"') as run:
        redeemer = entries(run.entry)[0][0]
        assert isinstance(redeemer, bytes)
        now = int(time.time())

        def link(creator: Identity, *, redeem_by: int, peers: str) -> str:
            ticket = issue_ticket(
                creator,
                (),
                run.signed.run_id,
                secrets.token_bytes(32),
                not_after=now + 86400,
                redeemer=redeemer,
                redeem_by=redeem_by,
                uses=1,
            )
            return str(Invite(run.signed.manifest.name, fingerprint_of(run), run.signed.run_id, entries(peers), ticket))

        expired = run.join("late", link(run.creator, redeem_by=now - 7200, peers=run.entry))
        foreign = run.join("foreign", link(Identity.generate(), redeem_by=now + 7200, peers=run.entry))
        # The address is right, the identity in the link is not: somebody else answers there.
        other = f"{Identity.generate().peer_id.hex()}@{run.entry.partition('@')[2]}"
        wrong = run.join("wrong", link(run.creator, redeem_by=now + 7200, peers=other))
        assert "invite-expired" in refusal_of(expired)
        assert "bad-certificate" in refusal_of(foreign)
        wait_until(lambda: has_ended(wrong), "the misdirected peer ends")
        assert wrong.process.returncode == 3
        assert "as expected" in wrong.log.read_text()


def test_a_list_of_peers_admits_those_and_no_others(tmp_path: Path) -> None:
    listed = [Identity.load_or_create(tmp_path / f"listed-{number}.pem") for number in range(2)]
    ids = ", ".join(f'"{identity.peer_id.hex()}"' for identity in listed)
    with run_by(tmp_path, f'mode = "allowlist"\npeers = [{ids}]') as run:
        link = run.plain_link()
        peers = [
            run.join(f"peer-{number}", link, "--identity", str(tmp_path / f"listed-{number}.pem"))
            for number in range(2)
        ]
        stranger = refusal_of(run.join("stranger", link))
        assert "not-listed" in stranger
        wait_until(lambda: all(mixes(peer) >= 1 for peer in peers), "the listed peers exchange")
