"""A node in the router lab, as a program: a witness, or a peer at home that has the router forward its port.

    python mapped_peer.py '{"listen": "0.0.0.0:7766", "entries": ["11.22.33.1:7766"], "lifetime_s": 4}'

Without "lifetime_s" it asks no router. It prints lines of JSON, and ends on SIGINT as a node does.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from typing import Any

import trio
from swarm_peer.addresses import Address, parse_address
from swarm_peer.identity import Identity

from swarmtrain.node import Node, NodeConfig, judge_interfaces, open_node
from swarmtrain.port_mapping import PortMapping, mapping_methods


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def stay_mapped(node: Node, entries: list[tuple[None, Address]], listen: Address, lifetime_s: int) -> None:
    """Joins, maps the port, and tells whatever it learns about that."""
    await node.discovery.bootstrap(entries)

    def changed(address: Address | None) -> None:
        say(mapped=str(address) if address else None, why=mapping.reason)
        node.relaying.forwarded(address)

    methods = mapping_methods([listen], judge_interfaces(entries))
    say(methods=[method.name for method in methods])
    mapping = PortMapping(listen.port, methods, changed, lifetime_s=lifetime_s, retry_s=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapping.run)
        nursery.start_soon(settle, node)
        told = ""
        while True:
            await trio.sleep(0.1)
            news = f"{mapping.reason} | {node.relaying.reach.line}"
            if news != told:
                say(reach=node.relaying.reach.line, why=mapping.reason)
                told = news


async def settle(node: Node) -> None:
    await node.relaying.settle()
    await node.relaying.keep_settled()


async def main(config: dict[str, Any]) -> None:
    listen = parse_address(config["listen"])
    entries = [(None, parse_address(entry)) for entry in config.get("entries", [])]
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with open_node(Identity.generate(), NodeConfig(listen=config["listen"], entries=entries)) as node:
            say(ready=True)
            async with trio.open_nursery() as nursery:
                if "lifetime_s" in config:
                    nursery.start_soon(stay_mapped, node, entries, listen, config["lifetime_s"])
                async for _ in signals:
                    nursery.cancel_scope.cancel()
                    break


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    trio.run(main, json.loads(sys.argv[1]))
