"""Port mapping against miniupnpd in a router of its own: NAT-PMP, UPnP, and what is said when the router refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.home_router import FAR, PROVIDER, ROUTER_LAN, ROUTER_WAN, HomeRouter, home_router, reason_to_skip

_PROGRAM = str(Path(__file__).with_name("mapped_peer.py"))
PORT = 7766
LIFETIME_S = 4
DEADLINE_S = 90.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[HomeRouter]:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    with home_router(tmp_path) as router:
        yield router


def has_upnp() -> bool:
    return importlib.util.find_spec("miniupnpc") is not None


def require_upnp() -> None:
    if not has_upnp():
        pytest.skip("UPnP needs the extra swarmtrain[portmap] (miniupnpc)")


@contextmanager
def program(lab: HomeRouter, name: str, **config: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, _PROGRAM, json.dumps({"listen": f"0.0.0.0:{PORT}", **config})]
    process = lab.popen(name, command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.start()
    try:
        heard(process, ready="True")
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str], **words: str) -> dict[str, Any]:
    """The next line in which each of these keys has these words. Ends at the latest when the program is killed."""
    assert process.stdout is not None
    for line in process.stdout:
        said: dict[str, Any] = json.loads(line)
        if all(text in str(said.get(key, "")) for key, text in words.items()):
            return said
    raise AssertionError(f"the program has ended without {words}")


@contextmanager
def home(lab: HomeRouter) -> Iterator[subprocess.Popen[str]]:
    """A peer at home with two witnesses outside, in networks of their own."""
    with program(lab, "provider"), program(lab, "far"):
        entries = [f"{PROVIDER}:{PORT}", f"{FAR}:{PORT}"]
        with program(lab, "home", entries=entries, lifetime_s=LIFETIME_S) as peer:
            yield peer


@pytest.mark.parametrize("way", ["NAT-PMP", "UPnP"])
def test_a_mapped_port_lets_both_witnesses_in_is_renewed_and_goes_with_the_peer(lab: HomeRouter, way: str) -> None:
    if way == "UPnP":
        require_upnp()
    # Another machine of this home has the port already, so the router gives the next one.
    with lab.daemon(nat_pmp=way == "NAT-PMP", upnp=way == "UPnP", taken=PORT), home(lab) as peer:
        assert heard(peer, mapped=":")["mapped"] == f"{ROUTER_WAN}:{PORT + 1}"
        mapped_at = time.monotonic()
        assert heard(peer, reach="reachable at ")["reach"] == f"reachable at {ROUTER_WAN}:{PORT + 1}"
        time.sleep(max(0.0, mapped_at + 2 * LIFETIME_S - time.monotonic()))  # the router's clock, not ours
        assert f"192.168.1.2:{PORT}" in lab.forwards()
        began = time.monotonic()
        peer.send_signal(signal.SIGINT)
        peer.wait(timeout=10)
        assert time.monotonic() - began < 2, "it does not look for the router once more"
        assert lab.forwards() == [f"192.168.1.3:{PORT}"]


def test_a_router_that_does_not_map_leaves_the_advice_and_the_reason(lab: HomeRouter) -> None:
    with home(lab) as peer:
        said = heard(peer, reach="outbound-only", why=f"no NAT-PMP at {ROUTER_LAN}")
        assert f"forward TCP port {PORT}" in said["reach"]
        assert has_upnp() is ("no UPnP router answers" in said["why"])


def test_a_router_that_refuses_upnp_says_why(lab: HomeRouter) -> None:
    require_upnp()
    with lab.daemon(nat_pmp=False, upnp=True, allowed="1024-2000"), home(lab) as peer:
        heard(peer, why="the router refuses UPnP: Action not authorized")


def examined(lab: HomeRouter, folder: Path) -> dict[str, Any]:
    """What `swarmtrain doctor` finds at home, with the two witnesses as entry points."""
    command = [sys.executable, "-m", "swarmtrain", "--state", str(folder), "doctor", "--json"]
    command += ["--listen", f"0.0.0.0:{PORT}", "--peer", f"{PROVIDER}:{PORT}", "--peer", f"{FAR}:{PORT}"]
    found: dict[str, Any] = json.loads(lab.run("home", *command))
    return found


@pytest.mark.parametrize("way", ["NAT-PMP", "UPnP"])
def test_the_doctor_tells_what_the_router_answers(lab: HomeRouter, tmp_path: Path, way: str) -> None:
    if way == "UPnP":
        require_upnp()
    with lab.daemon(nat_pmp=way == "NAT-PMP", upnp=way == "UPnP"), program(lab, "provider"):
        found = examined(lab, tmp_path)
    assert found["router_says"] == f"answers {way}; its own address is {ROUTER_WAN} (public)"
    assert found["reach"] == "outbound-only"


def test_a_port_forwarded_for_one_network_is_half_open_and_for_both_it_is_sure(lab: HomeRouter, tmp_path: Path) -> None:
    def forward_from(source: str) -> None:
        forward = f"ip saddr {source} tcp dport {PORT} dnat ip to 192.168.1.2:{PORT}"
        lab.run("router", "nft", "add", "rule", "inet", "filter", "prerouting", *forward.split())
        lab.run("router", "nft", "add", "rule", "inet", "filter", "forward", "ip", "saddr", source, "accept")

    with lab.daemon(nat_pmp=True, upnp=False), program(lab, "provider"), program(lab, "far"):
        forward_from(PROVIDER)
        found = examined(lab, tmp_path)
        assert found["reach"] == "partial"
        assert f"1 peer gets through at {ROUTER_WAN}:{PORT}, 1 peer does not" in found["reach_line"]
        forward_from(FAR)
        assert examined(lab, tmp_path)["reach_line"] == f"reachable at {ROUTER_WAN}:{PORT}"


def test_a_router_without_a_public_address_says_so(lab: HomeRouter) -> None:
    lab.run("router", "ip", "address", "add", "100.64.1.2/24", "dev", "wan0")
    lab.run("router", "ip", "address", "delete", f"{ROUTER_WAN}/24", "dev", "wan0")
    lab.run("router", "ip", "route", "replace", "default", "dev", "wan0")
    lab.run("provider", "ip", "address", "add", "100.64.1.1/24", "dev", "eth0")
    with lab.daemon(nat_pmp=True, upnp=True), home(lab) as peer:
        why = heard(peer, why="the router itself has no public address")["why"]
        assert has_upnp() is ("the UPnP router has no public address: another NAT is before it" in why)
