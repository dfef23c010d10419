"""The trainer as a real process behind its link: rounds, mixes, adoption, checkpoints, death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from swarm_peer.identity import Identity

from swarmtrain import control
from swarmtrain.data import prepare_tokens
from swarmtrain.documents import python_documents, python_validation_text
from swarmtrain.errors import UserError
from swarmtrain.genesis import genesis_state
from swarmtrain.layout import FlatLayout, bf16_to_fp32, fp32_to_bf16
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
from swarmtrain.model_config import parameter_specs
from swarmtrain.slabs import Slabs
from swarmtrain.tokenizer import ByteTokenizer
from swarmtrain.trainer_link import MixOrder, TrainerLink

pytestmark = pytest.mark.processes

MODEL = ModelSection(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    context_length=32,
)
LAYOUT = FlatLayout.of(parameter_specs(MODEL.config()))


def make_manifest(*, total_steps: int = 40, inner_steps: int = 5, learning_rate: float = 3e-3) -> SignedManifest:
    identity = Identity.from_seed(bytes(32))
    manifest = Manifest(
        name="tiny",
        creator=identity.public_key.hex(),
        created_by="test",
        model=MODEL,
        tokenizer=TokenizerSection(),
        data=DataSection(),
        validation=ValidationSection(blob="00" * 32, size_bytes=1000),
        optimizer=OptimizerSection(total_steps=total_steps, batch_size=2, warmup_steps=2, learning_rate=learning_rate),
        round=RoundSection(inner_steps=inner_steps),
        mixer=MixerSection(),
        genesis=GenesisSection(seed=1),
    )
    return sign_manifest(manifest, identity)


class Bench:
    """A link with a real trainer, and everything it said."""

    def __init__(self, folder: Path, manifest: SignedManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.said: list[Any] = []
        self.slabs = Slabs.create(LAYOUT.size)
        self.link = TrainerLink(self.slabs, self.said.append)
        self.tokens = prepare_tokens(lambda: python_documents(200_000), ByteTokenizer(), folder / "tokens")
        (folder / "validation.txt").write_bytes(python_validation_text()[:4000])
        state = genesis_state(MODEL.config(), 1)
        self.genesis = np.concatenate([state[name].reshape(-1) for name, _ in parameter_specs(MODEL.config())])
        self.genesis.tofile(folder / "genesis.f32")

    def job(self, weights: str = "file", step: int = 0) -> Callable[[int], control.Start]:
        def make(fd: int) -> control.Start:
            return control.Start(
                manifest=self.manifest.encode(),
                peer_id=bytes(32),
                slabs_fd=fd,
                token_file=str(self.tokens.path),
                token_dtype=self.tokens.tokens.dtype.str,
                validation_file=str(self.folder / "validation.txt"),
                device="cpu",
                threads=1,
                checkpoint_directory=str(self.folder / "checkpoints"),
                checkpoint_interval_s=3600.0,
                weights=weights,  # type: ignore[arg-type]
                weights_file=str(self.folder / "genesis.f32"),
                step=step,
            )

        return make

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


def test_a_run_from_genesis_to_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_manifest())

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job())
                while not bench.heard(control.Finished):  # noqa: ASYNC110  # messages arrive through a callback
                    await trio.sleep(0.05)
                final = bench.slabs.slot(bench.heard(control.Finished)[0].slot).copy()
                assert await bench.link.evaluate(final) == pytest.approx(
                    bench.heard(control.Finished)[0].validation_loss, abs=0.02
                )
                bench.link.stop()

    trio.run(main)
    (ready,) = bench.heard(control.Ready)
    (finished,) = bench.heard(control.Finished)
    assert ready.validation_loss == pytest.approx(np.log(256), abs=0.1)
    assert finished.validation_loss < ready.validation_loss - 0.5
    assert finished.tokens_total == 40 * 2 * 32
    assert [closed.step for closed in bench.heard(control.RoundClosed)][:3] == [5, 10, 15]
    assert bench.heard(control.Saved)


def test_mix_moves_the_replica_towards_the_partner_by_the_matched_difference(tmp_path: Path) -> None:
    # A vanishing learning rate: what moves the replica is the mix alone.
    bench = Bench(tmp_path, make_manifest(total_steps=100_000, learning_rate=1e-12))

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job())
                closed = await bench.link.close_round()
                own = bf16_to_fp32(closed.bits.copy())
                partner = own + np.float32(0.25)
                order = MixOrder(weight=0.5, factors={"mlp": 0.5}, partner_step=closed.step)
                await bench.link.mix(closed, fp32_to_bf16(partner), order)
                bench.link.release(closed)
                after = await bench.link.close_round()
                moved = bf16_to_fp32(after.bits) - own
                for span in LAYOUT.spans:
                    expected = 0.0625 if span.group == "mlp" else 0.125
                    np.testing.assert_allclose(moved[span.start : span.stop], expected, atol=0.01)
                assert after.effort.steps <= after.step - closed.step
                bench.link.stop()

    trio.run(main)


def test_adopt_replaces_weights_and_place_in_the_schedule(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_manifest(total_steps=100_000, learning_rate=1e-12))

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job())
                await bench.link.next_round(0)
                bits = fp32_to_bf16(np.full(LAYOUT.size, 0.5, np.float32))
                await bench.link.adopt(bits, 50_000)
                closed = await bench.link.close_round()
                np.testing.assert_allclose(bf16_to_fp32(closed.bits), 0.5, atol=0.01)
                assert closed.step >= 50_000
                bench.link.stop()

    trio.run(main)


def test_stop_saves_and_resume_continues_exactly_there(tmp_path: Path) -> None:
    manifest = make_manifest(total_steps=60)
    whole = Bench(tmp_path / "whole", manifest) if (tmp_path / "whole").mkdir() is None else None
    assert whole is not None
    (tmp_path / "halves").mkdir()
    first = Bench(tmp_path / "halves", manifest)

    async def until_finished(bench: Bench, weights: str) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job(weights))
                while not bench.heard(control.Finished):  # noqa: ASYNC110  # messages arrive through a callback
                    await trio.sleep(0.02)
                bench.link.stop()

    async def until_third_round(bench: Bench) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job())
                bench.link.release(await bench.link.next_round(2))
                bench.link.stop()

    trio.run(until_finished, whole, "file")
    trio.run(until_third_round, first)
    (stopped,) = first.heard(control.Stopped)
    second = Bench(tmp_path / "halves", manifest)
    trio.run(until_finished, second, "checkpoint")
    (ready,) = second.heard(control.Ready)
    assert ready.step == stopped.step >= 15
    (end,), (expected,) = second.heard(control.Finished), whole.heard(control.Finished)
    assert end.tokens_total == expected.tokens_total
    # The stop falls between two rounds, so rounds differ by that one boundary; data, moments and schedule do not.
    assert end.validation_loss == pytest.approx(expected.validation_loss, abs=0.05)


def test_a_killed_trainer_is_reported_in_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_manifest(total_steps=100_000))

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job())
                await bench.link.next_round(0)
                assert bench.link.pid is not None
                os.kill(bench.link.pid, signal.SIGKILL)

    with pytest.raises(ExceptionGroup) as caught:
        trio.run(main)
    assert caught.group_contains(UserError, match=r"trainer process ended unexpectedly \(status -9\)")


def test_a_trainer_whose_node_is_gone_saves_and_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_manifest(total_steps=100_000))

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.link.run, bench.job())
                await bench.link.next_round(0)
                bench.link.disconnect()
                await bench.link.ended.wait()

    with pytest.raises(ExceptionGroup):  # without a last word, as after a crash of the node
        trio.run(main)
    assert list((tmp_path / "checkpoints").glob("*.json"))


def test_an_impossible_device_is_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_manifest())

    def job(fd: int) -> control.Start:
        start = bench.job()(fd)
        start.device = "mps"
        return start

    async def main() -> None:
        with trio.fail_after(60):
            await bench.link.run(job)

    with pytest.raises(UserError, match="--device mps"):
        trio.run(main)
