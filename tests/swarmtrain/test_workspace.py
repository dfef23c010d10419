"""A peer's folder and identity: whose they are, who may use them, and what a user is told when they cannot be used."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_peer.identity import Identity

from swarmtrain import workspace as workspace_module
from swarmtrain.container import is_in_container, is_temporary
from swarmtrain.errors import ExitCode, UserError
from swarmtrain.manifest import (
    DataSection,
    GenesisSection,
    Manifest,
    MixerSection,
    ModelSection,
    OptimizerSection,
    RoundSection,
    SignedManifest,
    TokenizerSection,
    ValidationSection,
    sign_manifest,
)
from swarmtrain.workspace import Workspace, acquire_identity, available_memory_bytes, check_room, open_workspace

DiskUsage = namedtuple("DiskUsage", "total used free")


def signed(name: str = "tiny") -> SignedManifest:
    identity = Identity.from_seed(bytes(32))
    manifest = Manifest(
        name=name,
        creator=identity.public_key.hex(),
        created_by="test",
        model=ModelSection(),
        tokenizer=TokenizerSection(),
        data=DataSection(),
        validation=ValidationSection(blob="00" * 32, size_bytes=1000),
        optimizer=OptimizerSection(),
        round=RoundSection(inner_steps=5),
        mixer=MixerSection(),
        genesis=GenesisSection(seed=1),
    )
    return sign_manifest(manifest, identity)


def refusal(root: Path, manifest: SignedManifest, *, resume: bool = False) -> str:
    with pytest.raises(UserError) as caught, open_workspace(root, manifest, resume=resume):
        pytest.fail("the folder was given out")
    assert caught.value.exit_code is ExitCode.BAD_FOLDER
    assert "\n" not in caught.value.message
    return caught.value.message


def use(root: Path, *, checkpoint: bool = False) -> None:
    with open_workspace(root, signed(), resume=False) as workspace:
        if checkpoint:
            workspace.checkpoints.mkdir()
            (workspace.checkpoints / "checkpoint-1.json").write_text("{}")


@contextlib.contextmanager
def another_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs `code` in another process up to its first line of output, and kills it afterwards."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready"
        yield child
    finally:
        child.kill()
        child.wait(timeout=30)
        child.stdout.close()


HOLD_FOLDER = """
import sys, time
from pathlib import Path
from test_workspace import open_workspace, signed
with open_workspace(Path(sys.argv[1]), signed(), resume=False):
    print("ready", flush=True)
    time.sleep(300)
"""
HOLD_IDENTITY = """
import sys, time
from pathlib import Path
from swarmtrain.workspace import acquire_identity
with acquire_identity(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None):
    print("ready", flush=True)
    time.sleep(300)
"""


# -------------------------------------------------------------------------------------------------------------- folder


def test_a_new_folder_is_made_and_says_whose_it_is(tmp_path: Path) -> None:
    root = tmp_path / "deeper" / "out"
    with open_workspace(root, signed(), resume=False) as workspace:
        assert workspace == Workspace(root)
        assert workspace.manifest.read_bytes() == signed().encode()
        assert not workspace.has_checkpoint()


def test_an_empty_folder_and_ones_own_are_fine(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for _ in range(3):
        use(tmp_path / "out")


def test_another_runs_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    use(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = refusal(tmp_path, signed("other"))
    assert "belongs to another run" in message
    assert "other@" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert "not empty" in refusal(tmp_path, signed())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "is a file" in refusal(tmp_path / "out", signed())
    assert "out" in refusal(tmp_path / "out" / "deeper", signed())


def test_what_a_crash_left_before_the_manifest_does_not_lock_a_user_out(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("")
    (tmp_path / "run.manifest.part").write_bytes(b"half")
    use(tmp_path)
    assert Workspace(tmp_path).manifest.read_bytes() == signed().encode()


def test_a_checkpoint_wants_resume_and_resume_wants_a_checkpoint(tmp_path: Path) -> None:
    assert "no checkpoint to resume" in refusal(tmp_path / "out", signed(), resume=True)
    assert not (tmp_path / "out").exists()
    use(tmp_path / "out", checkpoint=True)
    assert "--resume" in refusal(tmp_path / "out", signed())
    with open_workspace(tmp_path / "out", signed(), resume=True) as workspace:
        assert workspace.has_checkpoint()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with open_workspace(tmp_path, signed(), resume=False):
        assert "in use by another" in refusal(tmp_path, signed())
    use(tmp_path)


@pytest.mark.processes
def test_the_lock_holds_against_another_process_and_dies_with_it(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})" + HOLD_FOLDER
    with another_process(code, tmp_path) as child:
        assert "in use by another" in refusal(tmp_path, signed())
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        use(tmp_path)


def test_what_goes_wrong_while_the_folder_is_in_use_is_not_the_folders_fault(tmp_path: Path) -> None:
    with (
        pytest.raises(ConnectionResetError),
        open_workspace(tmp_path, signed(), resume=False),
    ):
        raise ConnectionResetError("a socket")
    use(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "ermission" in refusal(tmp_path / "out", signed())
    finally:
        tmp_path.chmod(0o700)


# ---------------------------------------------------------------------------------------------------------- identities


def test_several_peers_of_one_user_get_an_identity_each_and_keep_it(tmp_path: Path) -> None:
    with acquire_identity(tmp_path, None) as first, acquire_identity(tmp_path, None) as second:
        assert (tmp_path / "identity.pem").exists()
        assert (tmp_path / "identity-2.pem").exists()
        assert first.peer_id != second.peer_id
    with acquire_identity(tmp_path, None) as again:
        assert again.peer_id == first.peer_id


def test_the_key_file_is_said_and_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    peers = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        with acquire_identity(tmp_path / "state", None, said.append) as identity:
            peers.add(identity.peer_id)
    assert len(peers) == 1
    lines = [line for line in said if "warning" not in line]  # the tests may run in a container
    assert lines == [f"peer {peers.pop().hex()[:8]}, key file {tmp_path / 'state' / 'identity.pem'}"] * 2


def test_an_identity_in_a_containers_own_layer_is_said_to_be_temporary(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    assert is_in_container(tmp_path)
    assert not is_in_container(tmp_path / "elsewhere")
    key = tmp_path / "identity.pem"
    key.touch()
    assert is_temporary(key, root=tmp_path)  # on the device of the root: the container's layer
    assert not is_temporary(key, in_container=False, root=tmp_path)
    assert not is_temporary(Path("/proc/self/status"), in_container=True, root=tmp_path)  # a mount of its own
    assert not is_temporary(tmp_path / "missing", root=tmp_path)


def test_the_first_free_identity_is_taken(tmp_path: Path) -> None:
    with acquire_identity(tmp_path, None):
        with acquire_identity(tmp_path, None) as second:
            pass
        with acquire_identity(tmp_path, None) as third:
            assert third.peer_id == second.peer_id


@pytest.mark.processes
def test_an_identity_held_by_another_process_is_left_to_it(tmp_path: Path) -> None:
    with another_process(HOLD_IDENTITY, tmp_path), acquire_identity(tmp_path, None):
        assert sorted(path.name for path in tmp_path.glob("*.pem")) == ["identity-2.pem", "identity.pem"]


def test_an_explicit_identity_that_is_in_use_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "mine.pem"
    with acquire_identity(tmp_path, path) as mine:
        with pytest.raises(UserError) as caught, acquire_identity(tmp_path, path):
            pytest.fail("given out twice")
        assert caught.value.exit_code is ExitCode.BAD_FOLDER
        assert str(path) in caught.value.message
        assert "--identity" in caught.value.message
        assert "\n" not in caught.value.message
    assert not (tmp_path / "identity.pem").exists()
    with acquire_identity(tmp_path, path) as again:
        assert again.peer_id == mine.peer_id


def test_identities_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_module, "MAX_PEERS_OF_ONE_USER", 2)
    with (
        acquire_identity(tmp_path, None),
        acquire_identity(tmp_path, None),
        pytest.raises(UserError, match="in use"),
        acquire_identity(tmp_path, None),
    ):
        pytest.fail("a third identity")


def test_a_key_that_others_can_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with acquire_identity(tmp_path, path):
        pass
    path.chmod(0o644)
    with pytest.raises(UserError) as caught, acquire_identity(tmp_path, path):
        pytest.fail("an open key was used")
    assert caught.value.exit_code is ExitCode.BAD_FOLDER
    assert "\n" not in caught.value.message


def test_a_key_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("no key")
    path.chmod(0o600)
    with pytest.raises(UserError) as caught, acquire_identity(tmp_path, path):
        pytest.fail("no key was used")
    assert "\n" not in caught.value.message


def test_a_place_for_keys_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught, acquire_identity(tmp_path / "file", None):
        pytest.fail("a key in a file's place")
    assert caught.value.exit_code is ExitCode.BAD_FOLDER


def test_errors_while_an_identity_is_in_use_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), acquire_identity(tmp_path, None):
        raise ConnectionResetError
    with acquire_identity(tmp_path, None):
        assert not (tmp_path / "identity-2.pem").exists()


# ---------------------------------------------------------------------------------------------------------------- room


def test_a_small_model_has_room(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there" / "yet", 1000)


def test_a_disk_that_is_too_small_is_named_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(10**12, 0, 2 * 10**9))
    with pytest.raises(UserError, match=r"not enough disk.*100\.0M.*4\.7 GB.*2\.0 GB free.*--out") as caught:
        check_room(tmp_path / "new", 100_000_000)
    assert caught.value.exit_code is ExitCode.NO_ROOM
    assert str(tmp_path) in caught.value.message


def test_too_little_memory_is_named_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(10**13, 0, 10**13))
    monkeypatch.setattr(workspace_module, "available_memory_bytes", lambda: 10**9)
    with pytest.raises(UserError, match=r"not enough memory.*5\.5 GB.*1\.0 GB") as caught:
        check_room(tmp_path, 100_000_000)
    assert caught.value.exit_code is ExitCode.NO_ROOM


def test_where_the_system_does_not_say_memory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(10**13, 0, 10**13))
    monkeypatch.setattr(workspace_module, "available_memory_bytes", lambda: None)
    check_room(tmp_path, 10**9)


def test_available_memory_is_a_plausible_number() -> None:
    available = available_memory_bytes()
    if available is None:
        pytest.skip("this system does not say")
    assert 10**6 < available < 10**15
