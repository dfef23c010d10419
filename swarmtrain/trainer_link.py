"""The node's end of the trainer: starts the process, passes messages, keeps the accounts of the snapshot slots.

`TrainerPort` is the seam that the exchange is written against; the virtual swarm of the tests puts a replica in
memory behind it.  The trainer runs on its own: nothing here makes it wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import trio

from swarmtrain import control
from swarmtrain.control import MessageReader, ToNode, decode_to_node
from swarmtrain.errors import UserError
from swarmtrain.mixing import Effort
from swarmtrain.slabs import PARTNER_SLOT, Slabs

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("swarmtrain.trainer")

STOP_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """One round's end: the snapshot to exchange and what stands behind it.

    `bits` is shared memory that stays as it is until `TrainerPort.release`.
    """

    round: int
    step: int
    round_steps: int
    effort: Effort
    drift_norms: Mapping[str, float]
    bits: NDArray[np.uint16]
    slot: int


@dataclass(frozen=True, slots=True)
class MixOrder:
    """What the trainer needs beside the two snapshots."""

    weight: float
    factors: Mapping[str, float]
    partner_step: int


class TrainerGone(Exception):
    """The trainer has ended while something was wanted of it."""


class TrainerPort(Protocol):
    """What an exchange needs of the trainer.  Waiting methods raise TrainerGone when it has ended."""

    async def next_round(self, after: int) -> ClosedRound:
        """Waits for a round whose number is above `after`, and pins its snapshot."""

    async def close_round(self) -> ClosedRound:
        """Asks the trainer to close its round at the next step boundary, and pins the snapshot."""

    def release(self, closed: ClosedRound) -> None:
        """Unpins a snapshot.  Each pin is released exactly once."""

    async def mix(self, closed: ClosedRound, partner: NDArray[np.uint16], order: MixOrder) -> None:
        """Has the trainer mix with the partner's snapshot; returns when it has."""

    def abandon(self, closed: ClosedRound) -> None:
        """Tells the trainer that this round's exchange will not happen."""

    async def adopt(self, bits: NDArray[np.uint16], step: int) -> None:
        """Has the trainer start over from a snapshot at a schedule step; returns when it has."""


class TrainerLink:
    """The trainer process behind a `TrainerPort`."""

    def __init__(self, slabs: Slabs, on_message: Callable[[ToNode], None]) -> None:
        """`on_message` sees every message of the trainer, for status and event log."""
        self._slabs = slabs
        self._on_message = on_message
        self._stream: trio.SocketStream | None = None
        self._process: trio.Process | None = None
        self._send_lock = trio.Lock()
        self._outbox_send, self._outbox = trio.open_memory_channel[control.ControlMessage](math.inf)
        self._changed = trio.Condition()
        self._latest: ClosedRound | None = None
        self._pins: dict[int, int] = {}
        self._partner_slot = trio.Lock()
        self._exchange = 0
        self._settled = -1
        self._adopted = 0
        self._evaluations: list[float] = []
        self.ended = trio.Event()

    async def run(
        self, start: Callable[[int], control.Start], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> ToNode:
        """Runs the trainer to its end and returns its last word: Finished or Stopped.

        `start` makes the job from the slabs' file descriptor.  Raises UserError when the trainer failed or died.
        Cancelled, it kills the process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "swarmtrain.trainer", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), self._slabs.fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self._process = process
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        last: ToNode | None = None
        stderr_tail: list[bytes] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._collect_stderr, process, stderr_tail)
                # First of all messages, whatever has been said already.
                await self._stream.send_all(control.encode(start(self._slabs.fd)))
                nursery.start_soon(self._write_outbox)
                task_status.started()
                last = await self._read_messages()
                with trio.move_on_after(STOP_DEADLINE_S):
                    await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.ended.set()
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await self._stream.aclose()
                async with self._changed:
                    self._changed.notify_all()
        if isinstance(last, control.Failed):
            raise UserError(last.reason)
        if last is None:
            tail = b"".join(stderr_tail)[-2000:].decode(errors="replace").strip().splitlines()
            logger.error("trainer died with status %s:\n%s", process.returncode, "\n".join(tail))
            why = (
                "killed, perhaps for lack of memory"
                if process.returncode == -9
                else (tail[-1] if tail else "no reason")
            )
            raise UserError(f"the trainer process ended unexpectedly (status {process.returncode}): {why}")
        return last

    @property
    def pid(self) -> int | None:
        """The trainer's process id while it runs."""
        return None if self._process is None else self._process.pid

    def disconnect(self) -> None:
        """Closes the control channel, as the node's death would."""
        if self._stream is not None:
            self._stream.socket.close()

    def stop(self) -> None:
        """Asks the trainer to save and leave."""
        self._say(control.Stop())

    # ------------------------------------------------------------------------------------------------- TrainerPort

    async def next_round(self, after: int) -> ClosedRound:
        async with self._changed:
            while self._latest is None or self._latest.round <= after:
                await self._wait_for_change()
            return self._pin(self._latest)

    async def close_round(self) -> ClosedRound:
        async with self._changed:
            before = self._latest.round if self._latest else 0
            self._say(control.CloseRound())
            while self._latest is None or self._latest.round <= before:
                await self._wait_for_change()
            return self._pin(self._latest)

    def latest(self) -> ClosedRound | None:
        """Returns the newest closed round, pinned, or None before the first."""
        return None if self._latest is None else self._pin(self._latest)

    def release(self, closed: ClosedRound) -> None:
        self._pins[closed.slot] -= 1
        self._give_back(closed.slot)

    async def mix(self, closed: ClosedRound, partner: NDArray[np.uint16], order: MixOrder) -> None:
        async with self._partner_slot:
            await trio.to_thread.run_sync(np.copyto, self._slabs.slot(PARTNER_SLOT), partner)
            self._exchange += 1
            number = self._exchange
            self._say(
                control.Mix(
                    exchange=number,
                    own_slot=closed.slot,
                    partner_slot=PARTNER_SLOT,
                    weight=order.weight,
                    factors=dict(order.factors),
                    partner_step=order.partner_step,
                )
            )
            # Cancelled here, the slots would be overwritten under the trainer's hands.
            with trio.CancelScope(shield=True):
                async with self._changed:
                    while self._settled < number and not self.ended.is_set():
                        await self._changed.wait()

    def abandon(self, closed: ClosedRound) -> None:
        self._say(control.Abandon())

    async def adopt(self, bits: NDArray[np.uint16], step: int) -> None:
        async with self._partner_slot:
            self.fill_partner_slot(bits)
            before = self._adopted
            self._say(control.Adopt(slot=PARTNER_SLOT, step=step))
            with trio.CancelScope(shield=True):
                async with self._changed:
                    while self._adopted == before and not self.ended.is_set():
                        await self._changed.wait()

    async def evaluate(self, bits: NDArray[np.uint16]) -> float:
        """Has a finished trainer measure a snapshot; returns nats per token, NaN when the trainer is gone."""
        async with self._partner_slot, self._changed:
            self.fill_partner_slot(bits)
            before = len(self._evaluations)
            self._say(control.Evaluate(slot=PARTNER_SLOT))
            while len(self._evaluations) == before and not self.ended.is_set():
                await self._changed.wait()
            return self._evaluations[-1] if len(self._evaluations) > before else math.nan

    def fill_partner_slot(self, bits: NDArray[np.uint16]) -> None:
        """Puts the snapshot to start from where the trainer will look for it."""
        np.copyto(self._slabs.slot(PARTNER_SLOT), bits)

    # ---------------------------------------------------------------------------------------------------- internals

    def _say(self, message: control.ControlMessage) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            self._outbox_send.send_nowait(message)

    async def _wait_for_change(self) -> None:
        if self.ended.is_set():
            raise TrainerGone("the trainer has ended")
        await self._changed.wait()

    def _pin(self, closed: ClosedRound) -> ClosedRound:
        self._pins[closed.slot] = self._pins.get(closed.slot, 0) + 1
        return closed

    def _give_back(self, slot: int) -> None:
        """Returns a slot to the trainer once nobody pins it and it is not the newest snapshot."""
        if self._pins.get(slot, 0) == 0 and (self._latest is None or self._latest.slot != slot):
            self._say(control.Release(slot=slot))

    async def _write_outbox(self) -> None:
        assert self._stream is not None
        try:
            async for message in self._outbox:
                await self._stream.send_all(control.encode(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the trainer is gone; the reader says so

    async def _read_messages(self) -> ToNode | None:
        assert self._stream is not None
        reader = MessageReader()
        last: ToNode | None = None
        try:
            while data := await self._stream.receive_some(1 << 16):
                for body in reader.feed(bytes(data)):
                    message = decode_to_node(body)
                    await self._take(message)
                    if isinstance(message, control.Finished | control.Stopped | control.Failed):
                        last = message
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        return last

    async def _take(self, message: ToNode) -> None:
        async with self._changed:
            match message:
                case control.RoundClosed():
                    previous = self._latest
                    self._latest = ClosedRound(
                        round=message.round,
                        step=message.step,
                        round_steps=message.round_steps,
                        effort=Effort(message.tokens, message.steps),
                        drift_norms=message.drift_norms,
                        bits=self._slabs.slot(message.slot),
                        slot=message.slot,
                    )
                    if previous is not None:
                        self._give_back(previous.slot)
                case control.Mixed(exchange=number):
                    self._settled = number
                case control.Adopted():
                    self._adopted += 1
                case control.Evaluated(validation_loss=loss):
                    self._evaluations.append(loss)
                case _:
                    pass
            self._changed.notify_all()
        self._on_message(message)

    async def _collect_stderr(self, process: trio.Process, tail: list[bytes]) -> None:
        assert process.stderr is not None
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await process.stderr.receive_some(1 << 16):
                tail.append(bytes(data))
                del tail[:-16]
                logger.warning("trainer: %s", bytes(data).decode(errors="replace").rstrip())
