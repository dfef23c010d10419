"""Multiaddresses as `hivemind-dht` prints them: ``/ip4/203.0.113.1/tcp/31337/p2p/PEERID``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from swarmtrain.errors import ExitCode, UserError, one_line
from swarmtrain.hivemind_bridge.messages import MAX_INITIAL_PEERS, MAX_MULTIADDR_CHARS

_TRANSPORT = re.compile(r"/(ip4|ip6|dns|dns4|dns6|dnsaddr)/[0-9A-Za-z_.:%-]+(/[0-9A-Za-z._~%-]+)*")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")


def parse_multiaddrs(text: str) -> tuple[str, ...]:
    """Reads one multiaddress or several with spaces between them. Raises UserError."""
    found = tuple(map(_parse, text.split()))
    if not found:
        raise UserError("an empty multiaddress", ExitCode.USAGE)
    return found


def join_multiaddrs(texts: Iterable[str]) -> tuple[str, ...]:
    """All multiaddresses of all options, each once. Raises UserError."""
    found = tuple(dict.fromkeys(address for text in texts for address in parse_multiaddrs(text)))
    if len(found) > MAX_INITIAL_PEERS:
        raise UserError(f"--initial-peers: {len(found)} addresses, at most {MAX_INITIAL_PEERS}", ExitCode.USAGE)
    return found


def _parse(text: str) -> str:
    transport, mark, peer_id = text.rpartition("/p2p/")
    is_whole = mark and _TRANSPORT.fullmatch(transport) and _PEER_ID.fullmatch(peer_id)
    if not is_whole or len(text) > MAX_MULTIADDR_CHARS:
        raise UserError(
            f"{one_line(text, 80)!r} is no multiaddress; write /ip4/ADDRESS/tcp/PORT/p2p/PEERID, "
            "as hivemind-dht prints it",
            ExitCode.USAGE,
        )
    return text
