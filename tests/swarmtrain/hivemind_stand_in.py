"""A stand-in for the hivemind process: the same messages over the same socket, with a folder in the place of a DHT.

    python hivemind_stand_in.py FOLDER SOCKET PARENT

Files in FOLDER make it misbehave: `mute` (answers nothing), `garbage` (sends bytes that are no message), `refuse`
(cannot join), `lonely` (nobody is there). Each life adds a line to `lives`, with the id of a helper process that it
starts as hivemind starts its daemon.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from swarmtrain.hivemind_bridge.messages import (
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
    ToNode,
    decode_to_child,
    encode,
)


def main(folder: Path, connection: socket.socket) -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with (folder / "lives").open("a") as lives:
        lives.write(f"{os.getpid()} {helper.pid}\n")

    def say(message: ToNode) -> None:
        connection.sendall(encode(message))

    frames = Frames()
    while data := connection.recv(1 << 16):
        for body in frames.feed(data):
            message = decode_to_child(body)
            if (folder / "garbage").exists():
                connection.sendall(b"\x00\x00\x00\x03xyz")
            elif (folder / "refuse").exists():
                say(Failed("nobody answers"))
            elif (folder / "mute").exists():
                continue
            else:
                match message:
                    case Open():
                        say(Opened("stand-in"))
                    case Put():
                        place = folder / message.key.hex()
                        place.mkdir(exist_ok=True)
                        (place / message.author.hex()).write_bytes(message.value)
                        say(Stored(message.number, True))
                    case Get():
                        values = tuple(path.read_bytes() for path in sorted((folder / message.key.hex()).glob("*")))
                        say(Found(message.number, values[:64]))
                    case Probe():
                        say(Alive(message.number, 0 if (folder / "lonely").exists() else 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
