"""How long do store and get take in a DHT of 2, 8, 16 and 64 nodes: ours, and hivemind's where it is installed.

    python benchmarks/dht_latency.py [--quick] [--sizes 2,8,16,64] [--hivemind-sizes 2,8,16,64] [--json FILE]

Loopback, one operation at a time, each by a random node, values of 64 bytes; p50 and p99 in milliseconds of what a
caller waits for. Ours: every node is a process of its own (TLS, signed records, stored at up to 20 nodes); the call is
timed in that process, as the node is what calls. hivemind: `hivemind.DHT`, its public interface, all forked from one
process as its users start them, each with its daemon (unsigned, stored at 5 nodes); the call is timed where it is made.
Its `get` comes in two kinds: "get" asks all nearest nodes for the latest value, as ours does; "first hit" is content
with any copy, a local one too.
About a minute without hivemind, three with it, when 64 of its nodes take 8 GB; `--quick`: a third.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio
from swarm_peer.addresses import Address, parse_contact
from swarm_peer.endpoint import Endpoint
from swarm_peer.identity import Identity
from swarm_peer.kademlia import Kademlia, KademliaParams
from swarm_peer.records import PeerPayload, PeerState, encode_payload, make_record, peers_key
from swarm_peer.tcp import TlsTransport

VALUE_BYTES = 64
LIFE_S = 1200


class Worker:
    """A process that answers one line of JSON with another."""

    def __init__(self, *role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a node's process ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, **question: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


# ---------------------------------------------------------------------------------------------------------- our node


async def own_node(entry: str) -> None:
    identity = Identity.generate()
    endpoint = Endpoint(identity, TlsTransport(identity))
    # The limits per asker are for strangers; here few nodes ask for everything.
    params = KademliaParams(requests_per_s=1e6, stores_per_s=1e6)
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(endpoint.run, [Address("127.0.0.1", 0)])
        node = Kademlia(endpoint, identity, rng=random.Random(identity.peer_id), params=params)
        node.advertise([address])
        await nursery.start(node.run)
        start = time.perf_counter()
        if entry:
            [(_, error)] = await node.bootstrap([parse_contact(entry)])
            if error:
                raise error
        print(json.dumps({"entry": f"{identity.peer_id.hex()}@{address}", "ms": elapsed_ms(start)}), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            question = json.loads(line)
            key = bytes.fromhex(question["key"])
            start = time.perf_counter()
            if question["op"] == "store":
                payload = PeerPayload(key, (address,), PeerState.TRAINING, bytes(VALUE_BYTES))
                record = make_record(identity, "peer", peers_key(key), 1, LIFE_S, encode_payload(payload))
                await node.announce_peer(record)
                found = True
            else:
                found = bool(await node.find_peers(key))
            print(json.dumps({"ms": elapsed_ms(start), "found": found}), flush=True)
        nursery.cancel_scope.cancel()


class OwnSwarm:
    """`size` of our nodes; each new one enters through the first."""

    def __init__(self, size: int) -> None:
        self.nodes: list[Worker] = []
        self.join_ms: list[float] = []
        entry = ""
        for _ in range(size):
            node = Worker("--own-node", entry)
            self.nodes.append(node)
            said = node.hear()
            if entry:
                self.join_ms.append(said["ms"])
            entry = entry or said["entry"]

    def ask(self, op: str, node: int, key: bytes) -> dict[str, Any]:
        return self.nodes[node].ask(op=op, key=key.hex())

    def memory_bytes(self) -> float:
        return sum(proportional_bytes(node.process.pid) for node in self.nodes)

    def end(self) -> None:
        for node in self.nodes:
            node.end()


# ------------------------------------------------------------------------------------------------------ hivemind's


def hivemind_nodes(size: int) -> None:
    from hivemind.dht import DHT
    from hivemind.utils import get_dht_time

    nodes, join_ms = [], []
    for _ in range(size):
        start = time.perf_counter()
        entries = nodes[0].get_visible_maddrs() if nodes else None
        nodes.append(DHT(initial_peers=entries, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True))
        join_ms.append(elapsed_ms(start))
    print(json.dumps({"join_ms": join_ms[1:]}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        node, key = nodes[question["node"]], bytes.fromhex(question["key"])
        start = time.perf_counter()
        if question["op"] == "store":
            found = node.store(key, bytes(VALUE_BYTES), get_dht_time() + LIFE_S)
        else:
            found = node.get(key, latest=question["op"] == "get") is not None
        print(json.dumps({"ms": elapsed_ms(start), "found": found}), flush=True)


class HivemindSwarm:
    """`size` nodes of hivemind below one process."""

    def __init__(self, size: int) -> None:
        self.worker = Worker("--hivemind-nodes", str(size))
        self.join_ms: list[float] = self.worker.hear()["join_ms"]

    def ask(self, op: str, node: int, key: bytes) -> dict[str, Any]:
        return self.worker.ask(op=op, node=node, key=key.hex())

    def memory_bytes(self) -> float:
        return sum(map(proportional_bytes, group_of(self.worker.process.pid)))

    def end(self) -> None:
        self.worker.end()


# ------------------------------------------------------------------------------------------------------- measuring


def elapsed_ms(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def group_of(leader: int) -> list[int]:
    """All processes of a process group."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == leader:
                found.append(int(folder.name))
    return found


def proportional_bytes(pid: int) -> float:
    """Memory of a process, shared pages counted in shares (PSS); NaN where the system does not tell."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return float("nan")
    return 1024 * float(next(line for line in lines if line.startswith("Pss:")).split()[1])


@contextmanager
def running(kind: type[OwnSwarm] | type[HivemindSwarm], size: int) -> Iterator[OwnSwarm | HivemindSwarm]:
    swarm = kind(size)
    try:
        yield swarm
    finally:
        swarm.end()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def measure(kind: type[OwnSwarm] | type[HivemindSwarm], size: int, operations: int) -> dict[str, Any]:
    rng = random.Random(size)
    with running(kind, size) as swarm:
        times: dict[str, list[float]] = {"store": [], "get": [], "absent": [], "first": []}
        missed = 0
        keys = []
        for _ in range(operations):
            writer = rng.randrange(size)
            key = rng.randbytes(32)
            times["store"].append(swarm.ask("store", writer, key)["ms"])
            keys.append((key, writer))
        for key, writer in keys:
            reader = rng.choice([node for node in range(size) if node != writer])
            answer = swarm.ask("get", reader, key)
            times["get"].append(answer["ms"])
            missed += not answer["found"]
        for key, writer in keys if kind is HivemindSwarm else []:
            reader = rng.choice([node for node in range(size) if node != writer])
            times["first"].append(swarm.ask("first", reader, key)["ms"])
        for _ in range(operations):
            times["absent"].append(swarm.ask("get", rng.randrange(size), rng.randbytes(32))["ms"])
        memory = swarm.memory_bytes()
        return {
            "nodes": size,
            "operations": operations,
            "missed": missed,
            "join_ms": statistics.median(swarm.join_ms),
            "mb_per_node": memory / size / 1e6,
            "load": os.getloadavg()[0],
            **{name: {"p50": percentile(t, 0.5), "p99": percentile(t, 0.99)} for name, t in times.items() if t},
        }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "\n| nodes | whose | store p50 / p99 ms | get | get absent | first hit | join p50 ms | MB per node | missed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        operations = ("store", "get", "absent", "first")
        cells = " | ".join(f"{row[op]['p50']:.1f} / {row[op]['p99']:.1f}" if op in row else "-" for op in operations)
        print(
            f"| {row['nodes']} | {row['whose']} | {cells} | {row['join_ms']:.0f} | {row['mb_per_node']:.0f} | "
            f"{row['missed']} of {row['operations']} |"
        )
    ratios = ratios_of(rows)
    if ratios:
        print("\nhivemind's median as a multiple of ours\n\n| nodes | store | get | get absent | join | memory |")
        print("|---|---|---|---|---|---|")
        for ratio in ratios:
            print("| " + " | ".join([str(ratio["nodes"]), *(f"{ratio[k]:.1f}" for k in list(ratio)[1:])]) + " |")


def ratios_of(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    ours = {row["nodes"]: row for row in rows if row["whose"] == "ours"}
    found = []
    for row in rows:
        own = ours.get(row["nodes"])
        if row["whose"] != "ours" and own:
            medians = {op: row[op]["p50"] / own[op]["p50"] for op in ("store", "get", "absent")}
            others = {name: row[name] / own[name] for name in ("join_ms", "mb_per_node")}
            found.append({"nodes": row["nodes"], **medians, **others})
    return found


def compare(sizes: list[int], rivals: list[int], operations: int) -> list[dict[str, Any]]:
    """A row for each size of ours, and for each of hivemind's where it is installed."""
    if rivals and importlib.util.find_spec("hivemind") is None:
        print("hivemind is not installed (pip install 'swarmtrain[hivemind]'): its rows are left out", flush=True)
        rivals = []
    rows = []
    for size in sizes:
        for whose, kind in (("ours", OwnSwarm), ("hivemind", HivemindSwarm)):
            if whose == "ours" or size in rivals:
                row = {"whose": whose, **measure(kind, size, operations)}
                rows.append(row)
                store, get = row["store"]["p50"], row["get"]["p50"]
                print(f"{whose}, {size} nodes: store {store:.1f} ms, get {get:.1f} ms", flush=True)
    return rows


def section(quick: bool) -> dict[str, Any]:
    """For `transport.py --rivals`."""
    rows = compare([2, 8] if quick else [2, 8, 16, 64], [2, 8] if quick else [2, 8, 16, 64], 60 if quick else 200)
    return {
        "title": "DHT, beside hivemind's",
        "note": "p50 ms; a get asks all nearest nodes",
        "columns": ["whose", "nodes", "store", "get", "get absent", "join", "MB per node"],
        "rows": [
            [
                row["whose"],
                row["nodes"],
                *(round(row[op]["p50"], 1) for op in ("store", "get", "absent")),
                round(row["join_ms"]),
                round(row["mb_per_node"]),
            ]
            for row in rows
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 operations of each kind instead of 200")
    parser.add_argument("--sizes", default="2,8,16,64", help="numbers of our nodes")
    parser.add_argument("--hivemind-sizes", default="2,8,16,64", help="numbers of hivemind's; empty: none")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--own-node", metavar="ENTRY", help=argparse.SUPPRESS)
    parser.add_argument("--hivemind-nodes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own_node is not None:
        trio.run(own_node, options.own_node)
        return
    if options.hivemind_nodes is not None:
        hivemind_nodes(options.hivemind_nodes)
        return
    sizes, rivals = (
        [int(size) for size in text.split(",") if size] for text in (options.sizes, options.hivemind_sizes)
    )
    rows = compare(sizes, rivals, 60 if options.quick else 200)
    print_table(rows)
    if options.json:
        report = {"machine": f"{os.cpu_count()} CPUs", "rows": rows, "hivemind_to_ours": ratios_of(rows)}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
