"""A home behind a real router: the kernel translates, and miniupnpd maps ports by NAT-PMP and UPnP.

    home 192.168.1.2 --- 192.168.1.1 router 11.22.33.44 --- 11.22.33.1 provider 12.34.56.254 --- 12.34.56.1 far

Provider and far are in networks of their own, so they are two witnesses. Needs what the lab needs, and nftables and
miniupnpd.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lab import network

ROUTER_LAN, ROUTER_WAN = "192.168.1.1", "11.22.33.44"
PROVIDER, FAR = "11.22.33.1", "12.34.56.1"
NAMES = ("home", "router", "provider", "far")
_DEADLINE_S = 20.0
_RULES = """
table inet filter {
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "lan0" accept
    jump miniupnpd
  }
  chain miniupnpd { }
  chain prerouting { type nat hook prerouting priority -100; policy accept; jump prerouting_miniupnpd; }
  chain postrouting {
    type nat hook postrouting priority 100; policy accept;
    jump postrouting_miniupnpd
    oifname "wan0" masquerade
  }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
}
"""
_DAEMON = """
ext_ifname=wan0
listening_ip=lan0
enable_natpmp={nat_pmp}
enable_upnp={upnp}
min_lifetime=2
secure_mode=yes
lease_file={leases}
uuid=00000000-0000-0000-0000-000000000000
allow {allowed} 192.168.1.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


class HomeRouter:
    """The network, with the daemon in the router."""

    def __init__(self, tag: str, folder: Path) -> None:
        self._namespaces = {name: f"lab-{tag}-{name}" for name in NAMES}
        self._folder = folder

    def run(self, name: str, *command: str, **options: Any) -> str:
        """Runs a command in a namespace and returns what it prints."""
        inside = ["ip", "netns", "exec", self._namespaces[name], *command]
        return subprocess.run(inside, check=True, capture_output=True, text=True, **options).stdout

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """As `subprocess.Popen`, inside a namespace."""
        return subprocess.Popen(["ip", "netns", "exec", self._namespaces[name], *command], **options)

    def forwards(self) -> list[str]:
        """The forwarding rules that the daemon has set, as "host:port" of the home."""
        rules = self.run("router", "nft", "list", "chain", "inet", "filter", "prerouting_miniupnpd")
        return [line.rpartition(" to ")[2].strip() for line in rules.splitlines() if "dnat" in line]

    def build(self, stack: ExitStack) -> None:
        for namespace in self._namespaces.values():
            network.add_namespace(namespace)
            stack.callback(network.delete_namespace, namespace)
        self._join("home", "eth0", "192.168.1.2/24", "router", "lan0", f"{ROUTER_LAN}/24")
        self._join("router", "wan0", f"{ROUTER_WAN}/24", "provider", "eth0", f"{PROVIDER}/24")
        self._join("provider", "eth1", "12.34.56.254/24", "far", "eth0", f"{FAR}/24")
        for name, gateway in (("home", ROUTER_LAN), ("router", PROVIDER), ("far", "12.34.56.254")):
            self.run(name, "ip", "route", "add", "default", "via", gateway)
        for name in ("router", "provider"):
            self.run(name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.run("router", "nft", "-f", "-", input=_RULES)

    @contextmanager
    def daemon(
        self, *, nat_pmp: bool, upnp: bool, taken: int | None = None, allowed: str = "1024-65535"
    ) -> Iterator[None]:
        """Runs miniupnpd. `taken` is a port that it forwards to another machine already; `allowed` outer ports."""
        leases, config, log = (self._folder / f"miniupnpd.{kind}" for kind in ("leases", "conf", "log"))
        leases.write_text(f"TCP:{taken}:192.168.1.3:{taken}:{int(time.time()) + 3600}:other\n" if taken else "")
        words = {True: "yes", False: "no"}
        config.write_text(_DAEMON.format(nat_pmp=words[nat_pmp], upnp=words[upnp], leases=leases, allowed=allowed))
        command = ["miniupnpd", "-d", "-f", str(config), "-P", str(self._folder / "miniupnpd.pid")]
        with log.open("wb") as file:
            process = self.popen("router", command, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while "starting" not in (said := log.read_text(errors="replace")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"miniupnpd does not start: {said}")
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait()

    def _join(self, left: str, left_device: str, left_at: str, right: str, right_device: str, right_at: str) -> None:
        there = self._namespaces[right]
        peer = ["type", "veth", "peer", "name", right_device, "netns", there]
        self.run(left, "ip", "link", "add", left_device, *peer)
        for name, device, address in ((left, left_device, left_at), (right, right_device, right_at)):
            self.run(name, "ip", "address", "add", address, "dev", device)
            self.run(name, "ip", "link", "set", device, "up")


@contextmanager
def home_router(folder: Path) -> Iterator[HomeRouter]:
    """Brings the network up, and down again whatever happens."""
    lab = HomeRouter(uuid.uuid4().hex[:6], folder)
    with ExitStack() as stack:
        lab.build(stack)
        yield lab


def reason_to_skip() -> str | None:
    """What this machine lacks; None if nothing."""
    if (reason := network.reason_to_skip()) is not None:
        return reason
    for command in ("nft", "miniupnpd"):
        if shutil.which(command) is None:
            return f"port mapping against a real router needs the command `{command}`"
    return None
