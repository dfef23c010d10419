"""Real sockets: ports that refuse, addresses that are silent, peers that are somebody else, and one that is right."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from swarm_peer.addresses import Address
from swarm_peer.identity import Identity, PeerId
from swarm_peer.lan import GROUP

from swarmtrain.errors import ExitCode, UserError
from swarmtrain.invite import EntryPoint
from swarmtrain.naming import RunReference
from swarmtrain.node import Node, NodeConfig, open_node
from swarmtrain.own_run import own_run
from swarmtrain.way_in import find_way_in, in_order, nobody_reached, reach_entries, target_with_saved


def with_nodes(scenario: Callable[[Node, Node], Awaitable[None]], *, connect_timeout_s: float = 10.0) -> None:
    """Runs a scenario with a node that looks for a way in, and one that is there."""

    async def main() -> None:
        config = NodeConfig(listen="127.0.0.1:0", connect_timeout_s=connect_timeout_s)
        with trio.fail_after(60):
            async with open_node(Identity.generate(), config) as here, open_node(Identity.generate(), config) as there:
                await scenario(here, there)

    trio.run(main)


@pytest.fixture
def silent() -> Iterator[Address]:
    """An address that accepts connections and then says nothing, as a stalled machine does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Address(*server.getsockname()[:2])


def refusing() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address(*server.getsockname()[:2])


def entry(address: Address, peer_id: PeerId | None = None) -> EntryPoint:
    return peer_id, address


def test_the_second_address_is_used_when_the_first_refuses() -> None:
    async def scenario(here: Node, there: Node) -> None:
        said: list[str] = []
        dead = refusing()
        assert await find_way_in(here, [entry(dead), entry(there.addresses[0])], said.append)
        assert len(said) == 1
        assert f"{dead} refused" in said[0]
        assert here.endpoint.connected() == [there.identity.peer_id]

    with_nodes(scenario)


def test_a_peer_does_not_dial_itself_when_it_knows_others() -> None:
    async def scenario(here: Node, there: Node) -> None:
        said: list[str] = []
        itself = entry(here.addresses[0], here.identity.peer_id)
        assert await find_way_in(here, [itself, entry(there.addresses[0])], said.append)
        assert said == []

    with_nodes(scenario)


def test_a_silent_address_holds_nobody_up_and_is_not_forgotten(silent: Address) -> None:
    async def scenario(here: Node, there: Node) -> None:
        said: list[str] = []
        began = trio.current_time()
        assert await find_way_in(here, [entry(silent), entry(there.addresses[0])], said.append)
        assert trio.current_time() - began < 10.0
        assert said == [f"{silent} has not answered yet; it is tried again in the background"]

    with_nodes(scenario, connect_timeout_s=30.0)


def test_each_failure_has_its_own_line(silent: Address) -> None:
    async def scenario(here: Node, there: Node) -> None:
        said: list[str] = []
        dead, other = refusing(), PeerId(b"\x00" * 32)
        entries = [entry(dead), entry(silent), entry(there.addresses[0], other)]
        with pytest.raises(UserError, match=r"no peer reached .*all 3 addresses failed.*--connect-timeout") as caught:
            await reach_entries(here, entries, said.append)
        assert caught.value.exit_code is ExitCode.NO_PEER
        assert len(said) == 3
        assert any("refused" in line and str(dead) in line for line in said)
        assert any("did not answer" in line and str(silent) in line for line in said)
        assert any("as expected" in line and there.identity.peer_id.hex()[:8] in line for line in said)
        assert all("\n" not in line for line in said)

    with_nodes(scenario, connect_timeout_s=1.0)


def test_entries_that_failed_are_tried_until_they_are_there() -> None:
    async def scenario(here: Node, there: Node) -> None:
        late = refusing()
        assert not await find_way_in(here, [entry(late)], lambda line: None)
        config = NodeConfig(listen=str(late))
        identity = Identity.generate()
        async with open_node(identity, config):
            while identity.peer_id not in here.endpoint.connected():  # noqa: ASYNC110  # another task dials
                await trio.sleep(0.1)

    with_nodes(scenario)


def test_saved_peers_come_before_those_that_are_given(tmp_path: Path) -> None:
    given = "10.0.0.1:1"
    target = target_with_saved("a-run", None, [given], tmp_path)
    assert [str(address) for _, address in target.peers] == [given]
    first, second = entry(Address("a", 1)), entry(Address("b", 2))
    assert in_order([first], [second, first]) == (first, second)
    assert target_with_saved("a-run", None, [], tmp_path).peers == ()
    assert nobody_reached(()).exit_code is ExitCode.NO_PEER
    assert "--peer" in nobody_reached(()).message


def test_an_empty_or_strange_folder_is_no_run(tmp_path: Path) -> None:
    async def scenario(here: Node, there: Node) -> None:
        await trio.lowlevel.checkpoint()
        assert own_run(tmp_path, RunReference(name="a-run"), here.blobs) is None
        (tmp_path / "run.manifest").write_bytes(b"{}")
        (tmp_path / "validation.txt").write_bytes(b"text")
        assert own_run(tmp_path, RunReference(name="a-run"), here.blobs) is None

    with_nodes(scenario)


def test_a_peer_of_the_local_network_is_found_without_any_address() -> None:
    async def main() -> None:
        group = free_group()
        config = NodeConfig(listen="[::]:0", lan=group)
        said: list[str] = []
        with trio.fail_after(60):
            async with open_node(Identity.generate(), config) as there, open_node(Identity.generate(), config) as here:
                assert there.local is not None
                assert here.local is not None
                there.local.care_about(b"\1" * 32)
                assert await find_way_in(here, (), said.append)
                assert there.identity.peer_id in here.endpoint.connected()
        assert len(said) == 1
        assert "in the local network" in said[0]

    trio.run(main)


def test_a_peer_that_listens_on_loopback_sends_no_beacons() -> None:
    async def main() -> None:
        config = NodeConfig(listen="127.0.0.1:0", lan=free_group())
        async with open_node(Identity.generate(), config) as node:
            assert node.local is None

    trio.run(main)


def free_group() -> tuple[str, int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return GROUP, int(probe.getsockname()[1])


def test_sixteen_peers_of_one_machine_start_at_the_same_moment() -> None:
    async def main() -> None:
        started: list[Node] = []
        all_in, done = trio.Event(), trio.Event()

        async def live(entries: tuple[EntryPoint, ...], *, task_status: trio.TaskStatus[Node]) -> None:
            async with open_node(Identity.generate(), NodeConfig(listen="[::]:0", entries=entries)) as node:
                task_status.started(node)
                if entries:
                    assert await node.endpoint.identify(entries[0][1]) == entries[0][0]
                    started.append(node)
                    if len(started) == 16:
                        all_in.set()
                await done.wait()

        async def start(entries: tuple[EntryPoint, ...]) -> None:
            await nursery.start(live, entries)

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                first = await nursery.start(live, ())
                # Not by loopback: all 16 come from the one address that this machine has in its network.
                way = (entry(first.addresses[0], first.identity.peer_id),)
                for _ in range(16):
                    nursery.start_soon(start, way)
                await all_in.wait()
                done.set()
        ports = [node.addresses[0].port for node in [first, *started]]
        assert len(set(ports)) == 17

    trio.run(main)
