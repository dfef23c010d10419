"""The trainer: one process that only trains.  It never touches the network and never waits for it.

Between two inner steps it looks at its control channel, and does what has arrived: close the round, mix, adopt a
snapshot, save, stop.  Arrays come and go through shared memory.  Started by the node as
`python -m swarmtrain.trainer FD`; its first message is the job.

Read `Trainer.run` from top to bottom for the life of a replica.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swarmtrain import control
from swarmtrain.checkpoint import load_checkpoint, save_checkpoint
from swarmtrain.control import ControlError, TrainerControl
from swarmtrain.data import Slice, SliceConfig
from swarmtrain.errors import UserError
from swarmtrain.evaluation import autocast, validation_loss, validation_windows
from swarmtrain.layout import FlatLayout
from swarmtrain.manifest import decode_manifest
from swarmtrain.mixing import Effort
from swarmtrain.model import LanguageModel, flatten_parameters
from swarmtrain.model_config import parameter_specs
from swarmtrain.replica import MatchedReplica, NolocoReplica, Replica
from swarmtrain.schedule import CLOSING_DIVISOR, Schedule
from swarmtrain.slabs import OWN_SLOTS, PARTNER_SLOT, Slabs
from swarmtrain.tokenizer import ByteTokenizer
from swarmtrain.trainer_state import Place, collect_state, restore_state

PROGRESS_INTERVAL_S = 0.5
EVALUATIONS_PER_RUN = 20
EVALUATION_WINDOWS = 128


class Stopwatch:
    """Splits the trainer's time into training and what the swarm costs it."""

    def __init__(self) -> None:
        self.train_s = 0.0
        self.exchange_s = 0.0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.train_s += time.perf_counter() - start

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.exchange_s += time.perf_counter() - start


class Trainer:
    """One replica and its training loop."""

    def __init__(self, job: control.Start, channel: TrainerControl) -> None:
        self._job = job
        self._channel = channel
        signed = decode_manifest(job.manifest)
        self._run_id = signed.run_id
        self._manifest = signed.manifest
        self._optimizer_config = self._manifest.optimizer
        self._schedule = self._make_schedule()
        self._device = choose_device(job.device)
        config = self._manifest.model.config()
        self._layout = FlatLayout.of(parameter_specs(config))
        self._slabs = Slabs(job.slabs_fd, self._layout.size)
        self._slots = [torch.from_numpy(self._slabs.slot(index)).view(torch.bfloat16) for index in range(4)]
        self._free_slots = list(OWN_SLOTS)
        self._watch = Stopwatch()

        self._model = LanguageModel(config).to(self._device)
        self._theta, self._gradient = flatten_parameters(self._model)
        with torch.no_grad():
            if job.weights == "file":
                self._theta.copy_(torch.from_numpy(np.fromfile(job.weights_file, dtype="<f4")))
            elif job.weights == "slot":
                self._theta.copy_(self._slots[PARTNER_SLOT])
        self._replica = self._make_replica()
        self._optimizer = self._make_optimizer()

        tokens = np.memmap(job.token_file, dtype=np.dtype(job.token_dtype), mode="r")
        held_out = ByteTokenizer().encode(Path(job.validation_file).read_bytes())
        self._slice = Slice(
            tokens,
            SliceConfig(
                context_length=config.context_length,
                batch_size=self._optimizer_config.batch_size,
                seed=self._optimizer_config.seed,
                peer_id=job.peer_id,
                shard=job.shard,
            ),
            held_out,
        )
        self._windows = validation_windows(held_out, config.context_length, max_windows=EVALUATION_WINDOWS)

        self._step = job.step  # the swarm's schedule
        self._joined_at = job.step
        self._batches_done = 0  # this peer's own position in its data
        self._tokens_total = 0
        self._round = 0
        self._round_started_step = job.step
        self._round_started_s = time.monotonic()
        self._since_exchange = Effort(0, 0)
        self._loss = float("nan")
        self._stopping = False
        self._close_requested = False
        self._save_requested = False
        self._saver: threading.Thread | None = None
        self._last_save_s = self._last_progress_s = time.monotonic()
        self._tokens_at_progress = 0

    # ------------------------------------------------------------------------------------------- the life of a replica

    def run(self) -> None:
        """Trains to the end of the schedule, or until told to stop."""
        resumed_from = self._resume() if self._job.weights == "checkpoint" else ""
        self._channel.send(
            control.Ready(
                step=self._step,
                device=str(self._device),
                validation_loss=self._evaluate(),
                resumed_from=resumed_from,
            )
        )
        evaluate_every = max(1, self._schedule.total_steps // EVALUATIONS_PER_RUN)
        self._round_started_s = self._last_progress_s = time.monotonic()
        while self._step < self._schedule.total_steps:
            with self._watch.exchanging():
                self._obey()
                if self._stopping:
                    break
                if self._close_requested or self._round_is_over():
                    self._close_round()
            with self._watch.training():
                self._inner_step()
            if self._step % evaluate_every == 0 and self._step < self._schedule.total_steps:
                self._channel.send(control.Evaluated(step=self._step, validation_loss=self._evaluate()))
            self._report_progress()
            if self._save_requested or time.monotonic() - self._last_save_s > self._job.checkpoint_interval_s:
                self._save(wait=False)
        if self._stopping:
            self._save(wait=True)
            self._channel.send(control.Stopped(step=self._step))
        else:
            self._finish()

    def _inner_step(self) -> None:
        accumulation = self._optimizer_config.grad_accumulation
        lr = self._schedule.lr(self._step, joined_at=self._joined_at)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._gradient.zero_()
        total = torch.zeros((), device=self._device)
        for _ in range(accumulation):
            tokens, targets = self._slice.batch(self._batches_done)
            self._batches_done += 1
            with autocast(self._device):
                loss = self._model.loss(
                    torch.from_numpy(tokens).to(self._device), torch.from_numpy(targets).to(self._device)
                )
            (loss / accumulation).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.detach()
        # One norm over the flat gradient is the global gradient norm.
        norm = self._gradient.norm()
        self._gradient.mul_(torch.clamp(self._optimizer_config.grad_clip / (norm + 1e-6), max=1.0))
        self._loss = float(total) / accumulation
        if not math.isfinite(self._loss):
            raise UserError(
                f"the loss became {self._loss} at step {self._step}: training diverged; "
                "lower the learning rate, or resume from the last checkpoint"
            )
        self._optimizer.step()
        self._step += 1
        tokens_done = tokens.size * accumulation
        self._tokens_total += tokens_done
        self._since_exchange = Effort(self._since_exchange.tokens + tokens_done, self._since_exchange.steps + 1)

    def _round_is_over(self) -> bool:
        done = self._step - self._round_started_step
        if done == 0:
            return False
        length = self._manifest.round
        if length.inner_steps is not None:
            return done >= self._schedule.round_steps(self._round_started_step, length.inner_steps)
        seconds = length.seconds or 1.0
        if self._schedule.is_closing(self._step):
            seconds /= CLOSING_DIVISOR
        return time.monotonic() - self._round_started_s >= seconds

    def _close_round(self) -> None:
        """Takes the outer step and hands the snapshot to the node."""
        if not self._free_slots:
            return  # the node holds all snapshots; the round goes on until one comes back
        requested, self._close_requested = self._close_requested, False
        slot = self._free_slots.pop()
        norms = self._replica.close_round(self._slots[slot])
        self._round += 1
        self._channel.send(
            control.RoundClosed(
                slot=slot,
                round=self._round,
                step=self._step,
                round_steps=self._step - self._round_started_step,
                tokens=self._since_exchange.tokens,
                steps=self._since_exchange.steps,
                drift_norms=norms,
                requested=requested,
            )
        )
        self._round_started_step = self._step
        self._round_started_s = time.monotonic()

    def _finish(self) -> None:
        # A last outer step would add momentum that no later step corrects: the final replica is theta itself.
        slot = self._free_slots.pop() if self._free_slots else self._wait_for_slot()
        self._slots[slot].copy_(self._theta)
        loss = self._evaluate()
        self._report_progress(final=True)
        self._save(wait=True)
        self._channel.send(
            control.Finished(slot=slot, step=self._step, tokens_total=self._tokens_total, validation_loss=loss)
        )
        while not self._stopping:
            if (message := self._channel.wait()) is not None:
                self._handle(message)

    def _wait_for_slot(self) -> int:
        deadline = time.monotonic() + 60.0
        while not self._free_slots and time.monotonic() < deadline:
            message = self._channel.wait(timeout_s=1.0)
            if message is not None:
                self._handle(message)
        if not self._free_slots:
            raise ControlError("the node gave no snapshot slot back within 60 s")
        return self._free_slots.pop()

    # --------------------------------------------------------------------------------------------- what the node says

    def _obey(self) -> None:
        for message in self._channel.poll():
            self._handle(message)

    def _handle(self, message: control.ToTrainer) -> None:
        match message:
            case control.CloseRound():
                self._close_requested = True
            case control.Release(slot=slot):
                self._free_slots.append(slot)
            case control.Mix():
                self._replica.mix(
                    self._slots[message.own_slot], self._slots[message.partner_slot], message.weight, message.factors
                )
                self._since_exchange = Effort(0, 0)
                self._follow_schedule(message.partner_step)
                self._channel.send(control.Mixed(exchange=message.exchange, step=self._step))
            case control.Abandon():
                self._replica.abandon()
            case control.Adopt(slot=slot, step=step):
                self._replica.adopt(self._slots[slot])
                self._optimizer = self._make_optimizer()
                self._step = self._joined_at = self._round_started_step = min(step, self._schedule.total_steps)
                self._since_exchange = Effort(0, 0)
                self._channel.send(control.Adopted(step=self._step))
            case control.Evaluate(slot=slot):
                with torch.no_grad():
                    self._theta.copy_(self._slots[slot])
                self._channel.send(control.Evaluated(step=self._step, validation_loss=self._evaluate()))
            case control.SaveCheckpoint():
                self._save_requested = True
            case control.Stop():
                self._stopping = True
            case control.Start():
                raise ControlError("a second job was sent to a running trainer")

    def _follow_schedule(self, partner_step: int) -> None:
        """Moves on to the partner's place in the schedule when that is a whole round ahead.

        A slow peer then contributes fewer inner steps, but decays its learning rate with the swarm and ends with it.
        """
        round_steps = max(1, self._step - self._round_started_step, self._manifest.round.inner_steps or 1)
        if partner_step - self._step >= round_steps:
            moved = min(partner_step, self._schedule.total_steps) - self._step
            self._step += moved
            self._round_started_step += moved

    # ------------------------------------------------------------------------------------------------ reports and files

    def _evaluate(self) -> float:
        return validation_loss(self._model, self._windows)

    def _report_progress(self, *, final: bool = False) -> None:
        now = time.monotonic()
        elapsed = now - self._last_progress_s
        if elapsed < PROGRESS_INTERVAL_S and not final:
            return
        self._channel.send(
            control.Progress(
                step=self._step,
                loss=self._loss,
                tokens_total=self._tokens_total,
                tokens_per_s=(self._tokens_total - self._tokens_at_progress) / max(elapsed, 1e-9),
                train_s=self._watch.train_s,
                exchange_s=self._watch.exchange_s,
            )
        )
        self._last_progress_s, self._tokens_at_progress = now, self._tokens_total

    def _save(self, *, wait: bool) -> None:
        """Copies the state now and writes it in a thread, so that training goes on meanwhile."""
        if self._saver is not None and self._saver.is_alive():
            if not wait:
                return
            self._saver.join()
        self._save_requested = False
        self._last_save_s = time.monotonic()
        tensors = collect_state(self._replica, self._optimizer)
        meta = self._place().to_meta(self._run_id)
        self._saver = threading.Thread(target=self._write_checkpoint, args=(tensors, meta), name="checkpoint")
        self._saver.start()
        if wait:
            self._saver.join()

    def _write_checkpoint(self, tensors: dict[str, Tensor], meta: dict[str, str | int | float]) -> None:
        try:
            path = save_checkpoint(Path(self._job.checkpoint_directory), tensors, meta)
        except (OSError, UserError) as error:
            print(f"checkpoint not written: {error}; training goes on", file=sys.stderr)
            return
        with contextlib.suppress(ControlError):
            self._channel.send(control.Saved(step=int(meta["step"]), path=str(path)))

    def _resume(self) -> str:
        directory = Path(self._job.checkpoint_directory)
        tensors, meta = load_checkpoint(directory)
        place = Place.from_meta(meta, self._run_id, directory)
        restore_state(tensors, self._replica, self._optimizer)
        self._step = self._round_started_step = place.step
        self._joined_at, self._batches_done, self._round = place.joined_at, place.batches_done, place.round
        self._tokens_total = self._tokens_at_progress = place.tokens_total
        self._watch.train_s, self._watch.exchange_s = place.train_s, place.exchange_s
        return str(directory)

    def _place(self) -> Place:
        return Place(
            step=self._step,
            joined_at=self._joined_at,
            batches_done=self._batches_done,
            tokens_total=self._tokens_total,
            round=self._round,
            train_s=self._watch.train_s,
            exchange_s=self._watch.exchange_s,
        )

    # ------------------------------------------------------------------------------------------------------ parts

    def _make_replica(self) -> Replica:
        mixer = self._manifest.mixer
        if mixer.kind == "noloco":
            return NolocoReplica(
                self._theta, self._layout, alpha=mixer.alpha, beta=mixer.beta, gamma=mixer.gamma or mixer.beta
            )
        return MatchedReplica(self._theta, self._layout, alpha=mixer.alpha, beta=mixer.beta)

    def _make_optimizer(self) -> torch.optim.AdamW:
        config = self._optimizer_config
        matrices = [p for p in self._model.parameters() if p.dim() >= 2]
        vectors = [p for p in self._model.parameters() if p.dim() < 2]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            foreach=True,
        )

    def _make_schedule(self) -> Schedule:
        config = self._optimizer_config
        return Schedule(
            peak_lr=config.learning_rate,
            total_steps=config.total_steps,
            warmup_steps=config.warmup_steps,
            min_ratio=config.min_lr_ratio,
            # A joiner's optimizer has no moments yet: its rate climbs over its first round.
            joiner_warmup_steps=self._manifest.round.inner_steps or 20,
        )


def choose_device(name: str) -> torch.device:
    """Returns the device that `--device` names; "auto" takes CUDA, then MPS, then the CPU.  Raises UserError."""
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in has.items() if there)
    if not has[name]:
        there = ", ".join(kind for kind, found in has.items() if found)
        raise UserError(f"--device {name}: torch {torch.__version__} finds none here; there is: {there}")
    return torch.device(name)


def main() -> int:
    """Runs one job from the control channel whose file descriptor is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the node says what to do
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = TrainerControl(socket.socket(fileno=int(sys.argv[1])))
    job = channel.wait(timeout_s=60.0)
    if not isinstance(job, control.Start):
        return 1
    with contextlib.suppress(OSError):
        os.nice(5)
    torch.set_num_threads(job.threads)
    try:
        trainer = Trainer(job, channel)
        try:
            trainer.run()
        except ControlError:
            trainer._save(wait=True)  # the node is gone; nothing is lost but the swarm
    except (UserError, OSError, torch.OutOfMemoryError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        with contextlib.suppress(ControlError):
            channel.send(control.Failed(reason=" ".join(reason.split())[:500]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
