"""The node's end of the hivemind process: starts it, asks it, watches it, starts it again.

Nothing here can hold up the node: one request at a time, each with a deadline that ends the child when it passes,
a look at its pulse in between, and back-off between lives. When the bridge is down, calls raise `BridgeDown` at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import trio

from swarmtrain.errors import one_line
from swarmtrain.hivemind_bridge.messages import (
    Alive,
    BridgeError,
    Failed,
    Found,
    Frames,
    Get,
    Open,
    Opened,
    Probe,
    Put,
    Reply,
    Request,
    Stored,
    ToNode,
    decode_to_node,
    encode,
)
from swarmtrain.hivemind_bridge.sockets import socket_folder

logger = logging.getLogger("swarmtrain.hivemind")

BridgeState = Literal["starting", "up", "down"]
CHILD_COMMAND = (sys.executable, "-m", "swarmtrain.hivemind_bridge.child")
_STDERR_CAP_BYTES = 1 << 20  # of one life of the child, into our log

R = TypeVar("R", Stored, Found, Alive)


class BridgeDown(Exception):
    """There is no hivemind process to ask at the moment; the message says why."""


@dataclass(frozen=True, slots=True)
class BridgeTimes:
    """Seconds. Importing hivemind takes 5 s on an idle machine and has been seen to take 50 on a busy one."""

    open_s: float = 150.0
    request_s: float = 40.0  # the child itself gives up after 20
    probe_every_s: float = 15.0
    retry_s: tuple[float, float] = (5.0, 300.0)  # back-off: first and longest wait
    stable_s: float = 120.0  # a life of that length starts the back-off anew
    end_s: float = 2.0


class Bridge:
    """One hivemind client in a process of its own. `say` gets one line whenever it goes down or comes back."""

    def __init__(
        self,
        initial_peers: Sequence[str],
        *,
        say: Callable[[str], None],
        rng: random.Random,
        command: Sequence[str] = CHILD_COMMAND,
        times: BridgeTimes | None = None,
    ) -> None:
        self._initial_peers = tuple(initial_peers)
        self._say = say
        self._rng = rng
        self._command = tuple(command)
        self._times = times or BridgeTimes()
        self._lock = trio.Lock()
        self._number = 0
        self._reply: Reply | None = None
        self._replied = trio.Event()
        self._life: _Life | None = None
        self._changed = trio.Event()
        self.state: BridgeState = "starting"
        self.reason = ""  # why it is down
        self.pid: int | None = None  # of the child while there is one; also its process group
        self.lives = 0

    async def run(self) -> None:
        """Keeps a child running until cancelled."""
        attempt = 0
        while True:
            started_s = trio.current_time()
            try:
                reason = await self._live()
            except OSError as error:
                reason = f"cannot start the process: {error.strerror or error}"
            except Exception as error:
                logger.exception("the hivemind bridge failed")
                reason = f"internal error: {type(error).__name__}"
            attempt = 0 if trio.current_time() - started_s > self._times.stable_s else attempt + 1
            first, longest = self._times.retry_s
            wait_s = min(longest, first * 2.0 ** min(max(attempt - 1, 0), 16)) * self._rng.uniform(0.8, 1.2)
            self._went_down(reason, wait_s)
            await trio.sleep(wait_s)

    async def settled(self) -> bool:
        """Waits for the end of the first attempt; True if the bridge is up."""
        while self.state == "starting":
            await self._changed.wait()
        return self.state == "up"

    async def wait_until_up(self) -> None:
        """Returns when the bridge is up."""
        while self.state != "up":
            await self._changed.wait()

    async def put(self, key: bytes, author: bytes, value: bytes, life_s: float) -> bool:
        """Stores a value; False if nobody took it. Raises BridgeDown."""
        return (await self._ask(lambda number: Put(number, key, author, value, life_s), Stored)).stored

    async def get(self, key: bytes) -> tuple[bytes, ...]:
        """A sample of at most 64 values under the key; nothing about them has been verified. Raises BridgeDown."""
        return (await self._ask(lambda number: Get(number, key), Found)).values

    async def probe(self) -> int:
        """The number of hivemind peers that the child is connected to. Raises BridgeDown."""
        return (await self._ask(Probe, Alive)).connected

    # One request at a time.

    async def _ask(self, make: Callable[[int], Request], kind: type[R]) -> R:
        async with self._lock:
            life = self._life
            if life is None or self.state != "up":
                raise BridgeDown(self.reason or "not up yet")
            self._number += 1
            self._reply, self._replied = None, trio.Event()
            with trio.move_on_after(self._times.request_s):
                try:
                    await life.stream.send_all(encode(make(self._number)))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    life.end("its process ended")
                await self._replied.wait()
            reply = self._reply
            if isinstance(reply, kind):
                return reply
            if reply is not None:
                life.end("it gave an answer of another kind")
            elif not self._replied.is_set():
                life.end(f"it did not answer within {self._times.request_s:.0f} s")
            # Whoever asks next must not find a life that is over.
            self.state = "down"
            raise BridgeDown(life.reason or self.reason or "its process ended")

    # One life of the child.

    async def _live(self) -> str:
        """Runs one child to its end and returns why it ended. Leaves no process behind."""
        self.lives += 1
        with socket_folder() as folder:
            ours, theirs = socket.socketpair()
            life = _Life(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
            try:
                process = self._start(theirs)
            except OSError:
                await life.stream.aclose()
                raise
            finally:
                theirs.close()
            self.pid = process.pid
            self._life = life
            try:
                async with trio.open_nursery() as nursery:
                    life.scope = nursery.cancel_scope
                    nursery.start_soon(_log_stderr, process)
                    nursery.start_soon(self._read, life)
                    nursery.start_soon(self._begin, life, str(folder))
                return life.reason
            finally:
                self._life = None
                self._replied.set()
                with trio.CancelScope(shield=True):
                    await life.stream.aclose()
                    await _end(process, self._times.end_s)
                self.pid = None

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        # Not trio's way, which starts processes from a thread that ends after a while: the kernel kills a child with
        # PDEATHSIG when the very thread that started it ends.
        return subprocess.Popen(
            [*self._command, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    async def _begin(self, life: _Life, folder: str) -> None:
        with trio.move_on_after(self._times.open_s):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await life.stream.send_all(encode(Open(self._initial_peers, folder)))
            await life.opened.wait()
        if not life.opened.is_set():
            life.end(f"it was not ready within {self._times.open_s:.0f} s")
            return
        self._came_up()
        alone = 0
        while True:
            await trio.sleep(self._times.probe_every_s)
            with contextlib.suppress(BridgeDown):
                alone = 0 if await self.probe() else alone + 1
                if alone >= 2:
                    # hivemind contacts its initial peers once in a life, so that life has to be a new one.
                    life.end("none of its peers is there any more")

    async def _read(self, life: _Life) -> None:
        frames = Frames()
        try:
            while data := await life.stream.receive_some(1 << 16):
                for body in frames.feed(bytes(data)):
                    self._take(life, decode_to_node(body))
        except BridgeError as error:
            life.end(f"it broke the protocol: {one_line(str(error), 200)}")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        life.end("its process ended")

    def _take(self, life: _Life, message: ToNode) -> None:
        match message:
            case Opened():
                life.opened.set()
            case Failed(reason=reason):
                life.end(one_line(reason, 500))
            case _ if message.number == self._number:
                self._reply = message
                self._replied.set()
            case _:
                pass  # the answer to a question that nobody waits for any more

    def _came_up(self) -> None:
        if self.state == "down":
            self._say("hivemind bridge: up again")
        self._set("up", "")

    def _went_down(self, reason: str, wait_s: float) -> None:
        was_down = self.reason != ""
        logger.warning("hivemind bridge down: %s; next attempt in %.0f s", reason, wait_s)
        self._set("down", reason)
        if not was_down:
            self._say(f"hivemind bridge: down: {reason}; the rest goes on without it, next attempt in {wait_s:.0f} s")

    def _set(self, state: BridgeState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._changed.set()
        self._changed = trio.Event()


class _Life:
    """From the start of one child to its end."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.opened = trio.Event()
        self.scope: trio.CancelScope | None = None
        self.reason = ""

    def end(self, reason: str) -> None:
        """Has the child ended; the first reason counts."""
        self.reason = self.reason or reason
        if self.scope is not None:
            self.scope.cancel()


async def _log_stderr(process: subprocess.Popen[bytes]) -> None:
    """What the child says to stderr goes to our log, up to a cap; beyond it, it is read and dropped."""
    assert process.stderr is not None
    taken = 0
    async with trio.lowlevel.FdStream(os.dup(process.stderr.fileno())) as stream:
        while data := await stream.receive_some(1 << 14):
            if taken < _STDERR_CAP_BYTES:
                for line in bytes(data).decode(errors="replace").splitlines():
                    logger.info("child: %s", one_line(line, 500))
            taken += len(data)


async def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Kills the child's whole group and reaps it. The child's id is not reaped before, so it still names its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with trio.move_on_after(patience_s):
        while process.poll() is None:  # noqa: ASYNC110  # there is no event for it without a thread
            await trio.sleep(0.01)
    if process.stderr is not None:
        process.stderr.close()
