"""`swarmtrain create`: a run file becomes a signed manifest and its blobs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from swarm_peer.blobs import BlobId, BlobStore

from swarmtrain.cli import cli
from swarmtrain.documents import python_validation_text
from swarmtrain.errors import ExitCode, Incompatible, ManifestError, UserError
from swarmtrain.export import state_digest
from swarmtrain.genesis import genesis_state
from swarmtrain.genesis_file import encode_genesis, load_genesis
from swarmtrain.invite import parse_invite
from swarmtrain.layout import bf16_to_fp32, fp32_to_bf16
from swarmtrain.manifest import ModelSection
from swarmtrain.model_config import ModelConfig
from swarmtrain.run_package import blobs_folder, read_manifest_file, write_manifest_file

TINY = ModelConfig(
    vocab_size=256, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, context_length=32
)
CONFIG_JSON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def create(folder: Path, text: str, *options: str) -> Result:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    arguments = ["--state", str(folder / "state"), "create", str(folder / "run.toml"), "--out", str(folder), *options]
    return CliRunner().invoke(cli, arguments)


def model_folder(folder: Path, state: dict[str, NDArray[np.float32]], config: dict[str, object] = CONFIG_JSON) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(encode_genesis(state))
    return folder


def test_a_run_is_signed_and_its_way_in_is_printed(tmp_path: Path) -> None:
    text = 'name = "reading-group"\n[admission]\nmode = "open"'
    result = create(tmp_path, text, "--peer", "train.example.org:7766")
    assert result.exit_code == 0, result.output
    signed = read_manifest_file(tmp_path / "reading-group.run")
    (run_id_line, invite_line) = result.stdout.splitlines()
    assert run_id_line == f"run id  {signed.run_id.hex()}"
    invite = parse_invite(invite_line.removeprefix("invite  "))
    assert invite.run_id == signed.run_id
    assert invite.reference.matches("reading-group", signed.creator, signed.run_id)
    assert "swarmtrain bootstrap" in result.stderr
    assert f"swarmtrain join '{invite}'" in result.stderr
    assert not (tmp_path / "reading-group.door").exists()


def test_a_run_is_by_invitation_and_its_door_is_private(tmp_path: Path) -> None:
    result = create(tmp_path, 'name = "reading-group"')
    assert result.exit_code == 0, result.output
    signed = read_manifest_file(tmp_path / "reading-group.run")
    assert signed.manifest.admission.mode == "invite"
    door = tmp_path / "reading-group.door"
    assert stat.S_IMODE(door.stat().st_mode) == 0o600
    assert f"swarmtrain invite {tmp_path / 'reading-group.run'}" in result.stderr
    before = door.read_bytes()
    assert create(tmp_path, 'name = "reading-group"').exit_code == 0
    assert door.read_bytes() == before  # what it admitted stays admitted


def test_the_validation_text_lies_beside_as_the_blob_that_the_manifest_names(tmp_path: Path) -> None:
    create(tmp_path, 'name = "a"')
    signed = read_manifest_file(tmp_path / "a.run")
    section = signed.manifest.validation
    store = BlobStore(1 << 30, blobs_folder(tmp_path / "a.run"))
    text = store.get(BlobId(bytes.fromhex(section.blob)))
    assert text == python_validation_text()[: 64 * 1024]
    assert section.size_bytes == len(text)


def test_the_same_file_gives_the_same_run_again(tmp_path: Path) -> None:
    first, second = create(tmp_path, 'name = "a"'), create(tmp_path, 'name = "a"')
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    create(tmp_path, 'name = "a"')
    before = (tmp_path / "a.run").read_bytes()
    result = create(tmp_path, 'name = "a"\n[genesis]\nseed = 1')
    assert isinstance(result.exception, UserError)
    assert result.exception.exit_code == ExitCode.BAD_FOLDER
    assert "another run's manifest" in result.exception.message
    assert (tmp_path / "a.run").read_bytes() == before


def test_json_for_scripts(tmp_path: Path) -> None:
    report = json.loads(create(tmp_path, 'name = "a"', "--json").stdout)
    signed = read_manifest_file(Path(report["manifest"]))
    assert report["run_id"] == signed.run_id.hex()
    assert parse_invite(report["invite"]).run_id == signed.run_id
    assert f"{report['name']}@{report['fingerprint']}" == signed.label


def test_the_template_can_be_created_from(tmp_path: Path) -> None:
    template = CliRunner().invoke(cli, ["create", "--template"]).stdout
    assert create(tmp_path, template).exit_code == 0


def test_own_validation_text(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_bytes(b"some text " * 100)
    result = create(tmp_path, 'name = "a"\n[validation]\ntext = "held.txt"')
    assert result.exit_code == 0, result.output
    assert read_manifest_file(tmp_path / "a.run").manifest.validation.size_bytes == 1000


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"x" * 65537, "larger than 65536 bytes"), (b"short", "longer text")],
)
def test_unusable_validation_text(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "held.txt").write_bytes(content)
    result = create(tmp_path, 'name = "a"\n[validation]\ntext = "held.txt"')
    assert isinstance(result.exception, UserError)
    assert says in result.exception.message
    assert not (tmp_path / "a.run").exists()


@pytest.mark.parametrize("is_bf16", [False, True])
def test_genesis_from_a_model_folder(tmp_path: Path, is_bf16: bool) -> None:
    state = genesis_state(TINY, 3)
    if is_bf16:
        state = {name: bf16_to_fp32(fp32_to_bf16(array)) for name, array in state.items()}
    model_folder(tmp_path / "model", state)
    result = create(tmp_path, 'name = "a"\n[genesis]\nweights = "model"')
    assert result.exit_code == 0, result.exception
    manifest = read_manifest_file(tmp_path / "a.run").manifest
    weights = manifest.genesis.weights
    assert weights is not None
    assert manifest.genesis.seed is None
    assert manifest.model == ModelSection(
        hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, context_length=32
    )
    data = BlobStore(1 << 30, blobs_folder(tmp_path / "a.run")).get(BlobId(bytes.fromhex(weights.blob)))
    assert data is not None
    assert len(data) == weights.size_bytes
    assert (len(data) < 3 * sum(array.size for array in state.values())) == is_bf16
    path = tmp_path / "fetched"
    path.write_bytes(data)
    loaded = load_genesis(path, manifest.model.config(), bytes.fromhex(weights.digest))
    assert list(loaded) == list(state)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


def test_a_model_section_that_contradicts_the_weights(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", genesis_state(TINY, 3))
    result = create(tmp_path, 'name = "a"\n[model]\nhidden-size = 64\n[genesis]\nweights = "model"')
    assert isinstance(result.exception, Incompatible)
    assert "hidden_size: the run has 64" in result.exception.message
    assert "has 16" in result.exception.message


def test_a_folder_without_weights(tmp_path: Path) -> None:
    result = create(tmp_path, 'name = "a"\n[genesis]\nweights = "nowhere"')
    assert isinstance(result.exception, UserError)
    assert "nowhere" in result.exception.message


def test_fetched_weights_must_be_those_of_the_manifest(tmp_path: Path) -> None:
    state = genesis_state(TINY, 3)
    path = tmp_path / "weights"
    path.write_bytes(encode_genesis(state))
    with pytest.raises(Incompatible, match=r"genesis\.weights\.digest: the run has 0000"):
        load_genesis(path, TINY, bytes(32))
    other = ModelConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        context_length=8,
    )
    with pytest.raises(ManifestError, match=r"model\.embed_tokens\.weight"):
        load_genesis(path, other, state_digest(state))
    state["model.norm.weight"] = np.full_like(state["model.norm.weight"], np.nan)
    path.write_bytes(encode_genesis(state))
    with pytest.raises(ManifestError, match="not finite"):
        load_genesis(path, TINY, state_digest(state))
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ManifestError, match="genesis weights"):
        load_genesis(path, TINY, bytes(32))


def test_manifest_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_manifest_file(tmp_path / "a.run")
    (tmp_path / "run.toml").write_text('name = "a"')
    with pytest.raises(UserError, match=r"sign it first: swarmtrain create"):
        read_manifest_file(tmp_path / "run.toml")
    (tmp_path / "b.run").write_bytes(b"{}")
    with pytest.raises(ManifestError, match=r"b\.run: manifest"):
        read_manifest_file(tmp_path / "b.run")
    create(tmp_path, 'name = "c"')
    signed = read_manifest_file(tmp_path / "c.run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        write_manifest_file(tmp_path / "file" / "c.run", signed)
