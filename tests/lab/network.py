"""Namespaces joined by the lab's router: up and down as a context manager, and commands inside them.

    with lab_network([LinkConfig(name="home", ...), ...]) as network:
        network.run("home", [sys.executable, "-c", "..."])

Needs Linux, root, `ip`, and the TUN device; `reason_to_skip` says which of them is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lab.router import LinkConfig, open_tun

_ROUTER = Path(__file__).with_name("router.py")
_START_DEADLINE_S = 20.0


def link(
    name: str,
    address: str,
    *,
    mbit_per_s: float = 0.0,
    delay_ms: float = 0.0,
    loss: float = 0.0,
    queue_bytes: int = 250_000,
    **more: Any,
) -> LinkConfig:
    """A link with the same rate up and down; `lab_network` fills in the namespace."""
    rate = mbit_per_s * 1e6
    return LinkConfig(
        name=name,
        namespace="",
        address=address,
        up_bit_per_s=rate,
        down_bit_per_s=rate,
        delay_s=delay_ms / 1e3,
        loss=loss,
        queue_bytes=queue_bytes,
        **more,
    )


class LabNetwork:
    """A lab that is up. Names are those of the links."""

    def __init__(self, namespaces: dict[str, str], router: subprocess.Popen[str]) -> None:
        self._namespaces = namespaces
        self._router = router

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside a namespace."""
        return ["ip", "netns", "exec", self._namespaces[name], *command]

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """As `subprocess.Popen`, inside a namespace."""
        return subprocess.Popen(self.command(name, command), **options)

    def run(self, name: str, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """As `subprocess.run`, inside a namespace."""
        return subprocess.run(self.command(name, command), **options)

    def stop(self) -> dict[str, dict[str, int]]:
        """Stops the router; returns what each link counted, by name (`LinkStats`)."""
        self._router.terminate()
        output, _ = self._router.communicate(timeout=_START_DEADLINE_S)
        counted: dict[str, dict[str, int]] = json.loads(output.splitlines()[-1])
        return counted


@contextmanager
def lab_network(links: Sequence[LinkConfig], *, seed: int = 0) -> Iterator[LabNetwork]:
    """Brings namespaces and router up, and down again whatever happens."""
    tag = uuid.uuid4().hex[:6]  # the namespaces of one machine are shared by all test runs on it
    namespaces = {config.name: f"lab-{tag}-{config.name}" for config in links}
    with ExitStack() as stack:
        for namespace in namespaces.values():
            add_namespace(namespace)
            stack.callback(delete_namespace, namespace)
        placed = [dataclasses.asdict(dataclasses.replace(c, namespace=namespaces[c.name])) for c in links]
        router = subprocess.Popen(
            [sys.executable, str(_ROUTER), json.dumps({"links": placed, "seed": seed})],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(_end, router)
        assert router.stdout is not None
        if router.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the lab's router did not start: exit code {router.wait(_START_DEADLINE_S)}")
        yield LabNetwork(namespaces, router)


@functools.cache
def reason_to_skip() -> str | None:
    """What this machine lacks for the lab; None if nothing."""
    if sys.platform != "linux":
        return "the network lab needs Linux"
    if os.geteuid() != 0:
        return "the network lab needs root"
    if shutil.which("ip") is None:
        return "the network lab needs the command `ip` (iproute2)"
    namespace = f"lab-{uuid.uuid4().hex[:6]}-try"
    try:
        add_namespace(namespace)
    except (OSError, subprocess.CalledProcessError):
        return "the network lab needs the right to make network namespaces"
    try:
        os.close(open_tun(namespace, "try0"))
    except OSError as error:
        return f"the network lab needs a TUN device: {error.strerror}"
    finally:
        delete_namespace(namespace)
    return None


def add_namespace(namespace: str) -> None:
    """Makes a namespace with its loopback up."""
    subprocess.run(["ip", "netns", "add", namespace], check=True, capture_output=True)
    subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True, capture_output=True)


def delete_namespace(namespace: str) -> None:
    """Removes a namespace, if it is there, with the devices in it."""
    subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
