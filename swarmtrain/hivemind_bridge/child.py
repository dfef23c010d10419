"""The hivemind side, a process of its own: `python -m swarmtrain.hivemind_bridge.child SOCKET PARENT`.

Importing hivemind renames a logging level, changes torch's sharing strategy and costs seconds and 290 MB; its daemon
outlives whoever started it. All that stays in here, and ends with the node: the kernel kills this process when the
node dies and the daemon when this process dies (Linux), and the end of the socket kills both anywhere.

`DHTNode` is used and not `hivemind.DHT`, whose forked process loses its pipe above 16 KiB a request. It is a client:
it listens on no port, holds nothing for others and is in nobody's routing table. No record validator is set: hivemind
drops a whole dictionary when one entry of it is invalid, so that one forged entry would hide all honest ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from swarmtrain.errors import one_line
from swarmtrain.hivemind_bridge.messages import (
    KEY_BYTES,
    MAX_VALUE_BYTES,
    MAX_VALUES,
    Alive,
    Failed,
    Found,
    Frames,
    Get,
    Open,
    Opened,
    Probe,
    Put,
    Stored,
    ToChild,
    ToNode,
    decode_to_child,
    encode,
)

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

REQUEST_DEADLINE_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1


def main(arguments: list[str]) -> NoReturn:
    """Serves until the socket ends."""
    connection = socket.socket(fileno=int(arguments[0]))
    if os.getpgrp() != os.getpid():
        os.setsid()  # the whole group is killed at the end
    die_with_parent()
    if os.getppid() != int(arguments[1]):
        die()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(_serve(connection))
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.sendall(encode(Failed(_explain(error))))
    die()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent's thread ends. Does nothing where there is no such call."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die() -> NoReturn:
    """Kills this process's group: itself and the daemon."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


# Looked up now: between fork and exec nothing may be imported.
_prctl: Callable[..., int] | None = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


async def _serve(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[ToChild] = asyncio.Queue()

    def read() -> None:
        """In a thread, so that it notices the node's end whatever the event loop does."""
        frames = Frames()
        try:
            while data := connection.recv(1 << 16):
                for body in frames.feed(data):
                    loop.call_soon_threadsafe(inbox.put_nowait, decode_to_child(body))
        finally:
            die()

    threading.Thread(target=read, daemon=True).start()
    first = await inbox.get()
    if not isinstance(first, Open):
        raise ValueError("the first message must be Open")
    node = await _open(first)

    def say(message: ToNode) -> None:
        connection.sendall(encode(message))

    say(Opened(str(node.peer_id)))
    daemon = asyncio.create_task(_daemon_of(node).wait())
    while True:
        message = asyncio.create_task(inbox.get())
        await asyncio.wait({message, daemon}, return_when=asyncio.FIRST_COMPLETED)
        if daemon.done():
            raise RuntimeError(f"p2pd ended with status {daemon.result()}")
        match message.result():
            case Put() as put:
                say(Stored(put.number, await _put(node, put)))
            case Get() as get:
                say(Found(get.number, await _get(node, get.key)))
            case Probe(number=number):
                say(Alive(number, len(await asyncio.wait_for(node.p2p.list_peers(), REQUEST_DEADLINE_S))))
            case _:
                raise ValueError("Open twice")


async def _open(wanted: Open) -> DHTNode:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P
    from hivemind.utils import MSGPackSerializer

    class Lenient(MSGPackSerializer):  # type: ignore[misc, unused-ignore]  # Any where hivemind is not installed
        """One value that does not decode must not hide the others."""

        @classmethod
        def loads(cls, buf: bytes) -> object:
            try:
                return super().loads(buf)
            except Exception:
                return None

    P2P._UNIX_SOCKET_PREFIX = f"/unix{wanted.socket_folder}/"
    start = asyncio.subprocess.create_subprocess_exec
    asyncio.subprocess.create_subprocess_exec = functools.partial(start, preexec_fn=die_with_parent)
    node = await DHTNode.create(
        initial_peers=list(wanted.initial_peers),
        client_mode=True,
        no_listen=True,
        host_maddrs=[],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        refresh_timeout=None,
        # What is found must come from others each time: the local cache answers even when nobody is there.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )
    node.protocol.serializer = Lenient
    return node


def _daemon_of(node: DHTNode) -> asyncio.subprocess.Process:
    child: asyncio.subprocess.Process = node.p2p._child
    return child


async def _put(node: DHTNode, put: Put) -> bool:
    from hivemind.utils import get_dht_time

    with contextlib.suppress(asyncio.TimeoutError):
        stored = node.store(put.key, put.value, get_dht_time() + put.life_s, subkey=put.author)
        return bool(await asyncio.wait_for(stored, REQUEST_DEADLINE_S))
    return False


async def _get(node: DHTNode, key: bytes) -> tuple[bytes, ...]:
    """A random sample of the values that could be entries of ours; the node verifies them."""
    with contextlib.suppress(asyncio.TimeoutError):
        found: Any = await asyncio.wait_for(node.get(key, latest=True), REQUEST_DEADLINE_S)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        values = [
            entry.value
            for author, entry in entries.items()
            if isinstance(author, bytes)
            and len(author) == KEY_BYTES
            and isinstance(entry.value, bytes)
            and len(entry.value) <= MAX_VALUE_BYTES
        ]
        return tuple(random.sample(values, min(len(values), MAX_VALUES)))
    return ()


def _explain(error: BaseException) -> str:
    """One line for the node's user."""
    text = f"{error}" or type(error).__name__
    if "bootstrap" in text:
        return "none of the --initial-peers answers; check address, peer id and port, and that hivemind-dht runs there"
    if "local time must be within" in text.lower() or "timestamp" in text.lower():
        return f"the clocks differ too much for hivemind: {one_line(text, 300)}; set this machine's clock"
    return one_line(f"{type(error).__name__}: {text}", 500)


if __name__ == "__main__":
    main(sys.argv[1:])
