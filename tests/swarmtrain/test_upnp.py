"""UPnP against a router of IGD version 1 on loopback that knows mappings without an end only, as many old ones do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio
from swarm_peer.addresses import Address

from swarmtrain.port_mapping import Mapped, MappingFailed, Upnp

pytest.importorskip("miniupnpc", reason="UPnP needs the extra swarmtrain[portmap] (miniupnpc)")

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICES = ["InternetGatewayDevice:1", "WANDevice:1", "WANConnectionDevice:1"]


def description() -> str:
    inner = (
        f"<serviceList><service><serviceType>{SERVICE}</serviceType><serviceId>wan</serviceId>"
        "<controlURL>/control</controlURL><eventSubURL>/e</eventSubURL><SCPDURL>/s</SCPDURL></service></serviceList>"
    )
    for device in reversed(DEVICES):
        inner = f"<device><deviceType>urn:schemas-upnp-org:device:{device}</deviceType>{inner}</device>"
        inner = f"<deviceList>{inner}</deviceList>" if device != DEVICES[0] else inner
    return f'<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">{inner}</root>'


class OldRouter(ThreadingHTTPServer):
    """What it was asked stands in `actions`: the name, and the lease of a mapping."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.actions: list[tuple[str, str]] = []
        self.mapped: set[str] = set()
        self.address = "11.22.33.44"

    def answer(self, action: str, arguments: dict[str, str]) -> tuple[int, str]:
        """The HTTP status, and what the body holds."""
        self.actions.append((action, arguments.get("NewLeaseDuration", "")))
        if action == "GetStatusInfo":
            return 200, "<NewConnectionStatus>Connected</NewConnectionStatus><NewUptime>1</NewUptime>"
        if action == "GetExternalIPAddress":
            return 200, f"<NewExternalIPAddress>{self.address}</NewExternalIPAddress>"
        if action == "AddPortMapping" and arguments["NewLeaseDuration"] != "0":
            return 500, "<detail><UPnPError><errorCode>725</errorCode></UPnPError></detail>"
        if action == "AddPortMapping":
            self.mapped.add(arguments["NewExternalPort"])
        if action == "DeletePortMapping":
            self.mapped.discard(arguments["NewExternalPort"])
        return 200, ""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(200, description())

    def do_POST(self) -> None:
        assert isinstance(self.server, OldRouter)
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
        status, body = self.server.answer(action, dict(re.findall(r"<(New\w+)>([^<]*)</", text)))
        inner = f'<u:{action}Response xmlns:u="{SERVICE}">{body}</u:{action}Response>' if status == 200 else body
        envelope = '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
        self._send(status, f'<?xml version="1.0"?>{envelope}{inner}</s:Body></s:Envelope>')

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
        """Says nothing."""


@contextmanager
def old_router() -> Iterator[tuple[OldRouter, Upnp]]:
    with OldRouter() as router:
        thread = threading.Thread(target=router.serve_forever)
        thread.start()
        try:
            yield router, Upnp(f"http://127.0.0.1:{router.server_port}/root.xml")
        finally:
            router.shutdown()
            thread.join()


def test_a_router_without_leases_gets_a_mapping_without_an_end_and_it_is_deleted() -> None:
    with old_router() as (router, upnp):
        assert trio.run(upnp.map_port, 7766, 3600) == Mapped(Address("11.22.33.44", 7766), 3600)
        assert [lease for action, lease in router.actions if action == "AddPortMapping"] == ["3600", "0"]
        assert router.mapped == {"7766"}
        trio.run(upnp.unmap_port, 7766)
        assert router.mapped == set()


@pytest.mark.parametrize("said", ["", "nonsense", "1.2.3.4.5"])
def test_a_router_that_does_not_know_its_address_is_asked_for_no_mapping(said: str) -> None:
    with old_router() as (router, upnp):
        router.address = said
        with pytest.raises(MappingFailed, match="has no public address"):
            trio.run(upnp.map_port, 7766, 3600)
        assert router.mapped == set()
