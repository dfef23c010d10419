"""The peers that a start leaves for the next one, and the files that it must survive."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import trio
import trio.testing
from swarm_peer.addresses import Address, Contact

from swarmtrain.naming import RunReference, fingerprint
from swarmtrain.saved_peers import MAX_FILE_BYTES, MAX_SAVED, TRIED_AT_ONCE, SavedPeers, saved_entries

RUN, CREATOR, OWN = b"\1" * 32, b"\2" * 32, b"\3" * 32
MEANT = RunReference(name="a-run")


def contact(number: int, host: str = "10.0.0.7") -> Contact:
    return Contact(number.to_bytes(32, "big"), (Address(host, 1000 + number),))


def saved(state: Path, *, run_id: bytes = RUN, own_id: bytes = OWN, name: str = "a-run") -> SavedPeers:
    return SavedPeers(state, run_id=run_id, name=name, creator=CREATOR, own_id=own_id)


def ports(state: Path, reference: RunReference = MEANT) -> list[int]:
    return [address.port for _, address in saved_entries(state, reference)]


def test_what_was_met_last_is_tried_first_and_the_rest_is_kept(tmp_path: Path) -> None:
    first = saved(tmp_path)
    first.note([contact(1), contact(2), Contact(OWN, (Address("10.0.0.1", 1),)), Contact(b"\7" * 32, ())])
    first.save()
    again = saved(tmp_path)
    again.note([contact(3), contact(2)])
    again.save()
    assert ports(tmp_path) == [1003, 1002, 1001]
    assert saved_entries(tmp_path, MEANT)[0][0] == contact(3).peer_id


def test_the_run_is_found_by_name_fingerprint_or_id_and_no_other_is(tmp_path: Path) -> None:
    made = saved(tmp_path)
    made.note([contact(1)])
    made.save()
    assert ports(tmp_path, RunReference(name="a-run", fingerprint=fingerprint(CREATOR))) == [1001]
    assert ports(tmp_path, RunReference(run_id=RUN)) == [1001]
    assert ports(tmp_path, RunReference(name="b-run")) == []
    assert ports(tmp_path, RunReference(name="a-run", fingerprint="00000000")) == []
    twin = saved(tmp_path, run_id=b"\5" * 32)
    twin.note([contact(2)])
    twin.save()
    assert ports(tmp_path) == [], "two runs of one name: neither is taken for the other"
    assert ports(tmp_path, RunReference(run_id=RUN)) == [1001]


def test_files_are_private_bounded_and_one_per_identity(tmp_path: Path) -> None:
    made = saved(tmp_path)
    made.note([contact(number) for number in range(1, 500)])
    made.save()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert len(json.loads(made.path.read_text())["peers"]) == MAX_SAVED
    assert made.path.stat().st_size < MAX_FILE_BYTES
    other = saved(tmp_path, own_id=b"\4" * 32)
    assert other.path != made.path
    other.note([contact(900)])
    other.save()
    assert ports(tmp_path)[:3] == [1001, 1900, 1002]
    assert len(ports(tmp_path)) == TRIED_AT_ONCE
    assert list(tmp_path.rglob("*.part")) == []


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    made = saved(tmp_path)
    made.note([contact(1), contact(2)])
    made.save()
    good = made.path.read_bytes()
    rng = random.Random(1)
    for cut in range(0, len(good), 7):
        made.path.write_bytes(good[:cut])
        assert saved_entries(tmp_path, MEANT) == ()
    for _ in range(300):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        made.path.write_bytes(flipped)
        for peer_id, address in saved_entries(tmp_path, MEANT):
            assert peer_id is not None
            assert 0 <= address.port <= 65535
    made.path.write_bytes(b"[" * MAX_FILE_BYTES)
    assert saved_entries(tmp_path, MEANT) == ()
    made.path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    assert saved_entries(tmp_path, MEANT) == ()
    again = saved(tmp_path)
    again.note([contact(9)])
    again.save()
    assert ports(tmp_path) == [1009]


def test_a_folder_that_refuses_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("no folder")
    made = saved(tmp_path)
    made.note([contact(1)])
    made.save()
    assert ports(tmp_path) == []


def test_the_list_is_kept_while_the_peer_runs_and_saved_when_it_leaves(tmp_path: Path) -> None:
    met = [contact(1)]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(saved(tmp_path).keep, lambda: met)
            await trio.testing.wait_all_tasks_blocked()
            met[:] = [contact(2)]
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert ports(tmp_path) == [1002]
