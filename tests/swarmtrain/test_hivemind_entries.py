"""The bridge's pure parts: entries, messages, multiaddresses, and what is said where hivemind is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_peer.addresses import Address
from swarm_peer.errors import RecordInvalid
from swarm_peer.identity import Identity
from swarm_peer.records import RunPayload, SignedRecord, make_record, run_key

from swarmtrain.errors import UserError
from swarmtrain.hivemind_bridge import messages
from swarmtrain.hivemind_bridge.entries import (
    CLOCK_SLACK_S,
    ENTRY_LIFE_S,
    key_for,
    keys_of,
    make_entry,
    newest_entries,
    read_entry,
)
from swarmtrain.hivemind_bridge.installation import find_problem
from swarmtrain.hivemind_bridge.messages import BridgeError, Frames, decode_to_child, decode_to_node, encode
from swarmtrain.hivemind_bridge.multiaddr import join_multiaddrs, parse_multiaddrs
from swarmtrain.hivemind_bridge.rendezvous import check_rendezvous
from swarmtrain.naming import RunReference, fingerprint

NOW = 1_800_000_000.0
ALICE, BOB = Identity.from_seed(b"a" * 32), Identity.from_seed(b"b" * 32)
RUN = RunPayload(b"r" * 32, "tiny", ALICE.public_key, b"m" * 32, (Address("192.0.2.1", 7766),))
KEY = keys_of(RUN)[0]
PEER_ID = "12D3KooWCBxTZXpwDwCFgegPmyBg2APqMgnMvhVicJ7hBy8a947C"


def test_an_entry_is_found_by_run_id_by_name_and_by_name_and_fingerprint() -> None:
    references = (
        RunReference(run_id=RUN.run_id),
        RunReference("tiny", fingerprint(ALICE.public_key)),
        RunReference("tiny"),
    )
    assert tuple(map(key_for, references)) == keys_of(RUN)
    assert len(set(keys_of(RUN))) == 3
    for key in keys_of(RUN):
        record, run = read_entry(make_entry(BOB, key, RUN, NOW), key, NOW)
        assert run == RUN
        assert record.author() == BOB.peer_id


def entry_with(**changes: object) -> bytes:
    record = msgspec.msgpack.decode(make_entry(BOB, KEY, RUN, NOW), type=SignedRecord)
    return msgspec.msgpack.encode(msgspec.structs.replace(record, **changes))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "bad-entry"),
        (b"\xc1", "bad-entry"),
        (b"x" * 5000, "oversized-entry"),
        (entry_with(key=keys_of(RUN)[1]), "wrong-key"),
        (entry_with(seq=int(NOW) + 1), "bad-signature"),
        (entry_with(public_key=ALICE.public_key), "bad-signature"),
        (make_entry(BOB, keys_of(RUN)[1], RUN, NOW), "wrong-key"),
        (make_entry(BOB, KEY, RUN, NOW - ENTRY_LIFE_S - CLOCK_SLACK_S - 1), "out-of-time"),
        (make_entry(BOB, KEY, RUN, NOW + CLOCK_SLACK_S + 1), "out-of-time"),
        (make_entry(BOB, KEY, msgspec.structs.replace(RUN, run_id=b"q" * 32), NOW), "wrong-key"),
        (
            msgspec.msgpack.encode(make_record(BOB, "run", run_key("tiny"), int(NOW), 60, msgspec.msgpack.encode(RUN))),
            "wrong-key",
        ),
        (
            msgspec.msgpack.encode(make_record(BOB, "peer", KEY, int(NOW), 60, msgspec.msgpack.encode(RUN))),
            "wrong-kind",
        ),
    ],
)
def test_what_is_not_signed_for_this_key_and_time_is_refused(value: bytes, why: str) -> None:
    with pytest.raises(RecordInvalid) as caught:
        read_entry(value, KEY, NOW)
    assert caught.value.reason == why


def test_the_newest_entry_of_an_author_counts_and_junk_beside_it_does_not() -> None:
    moved = msgspec.structs.replace(RUN, addresses=(Address("192.0.2.9", 1),))
    values = [
        make_entry(BOB, KEY, moved, NOW),
        b"junk",
        make_entry(BOB, KEY, RUN, NOW - 100),
        make_entry(ALICE, KEY, RUN, NOW),
    ]
    found, invalid = newest_entries(values, KEY, NOW)
    assert invalid == 1
    assert {record.author(): run.addresses for record, run in found} == {
        BOB.peer_id: moved.addresses,
        ALICE.peer_id: RUN.addresses,
    }


@given(st.binary(max_size=2500))
def test_no_bytes_make_the_reader_of_entries_fail_otherwise(value: bytes) -> None:
    with pytest.raises(RecordInvalid):
        read_entry(value, KEY, NOW)


def test_an_entry_fits_the_pipe_of_hivemind_by_far() -> None:
    long = msgspec.structs.replace(RUN, name="n" * 63, addresses=(Address("a" * 253, 65535),) * 3)
    assert len(make_entry(BOB, KEY, long, NOW)) < messages.MAX_VALUE_BYTES < 12 * 1024


# ------------------------------------------------------------------------------------------------------- messages

MESSAGES = [
    messages.Opened("12D3"),
    messages.Failed("no"),
    messages.Stored(1, True),
    messages.Found(2, (b"a", b"b")),
    messages.Alive(3, 4),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.lists(st.integers(1, 40), max_size=30))
def test_messages_survive_any_division_of_the_stream(sent: list[messages.ToNode], cuts: list[int]) -> None:
    data, frames, got = b"".join(map(encode, sent)), Frames(), []
    for cut in cuts:
        got += list(frames.feed(data[:cut]))
        data = data[cut:]
    got += list(frames.feed(data))
    assert [decode_to_node(body) for body in got] == sent


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_no_bytes_make_the_parser_fail_otherwise_or_hoard(chunks: list[bytes]) -> None:
    frames = Frames()
    try:
        for chunk in chunks:
            for body in frames.feed(chunk):
                decode_to_node(body)
    except BridgeError:
        return


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_another_message_or_an_error(message: messages.ToNode, data: st.DataObject) -> None:
    body = bytearray(encode(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_to_node(bytes(body))
    except BridgeError:
        return


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        encode(messages.Get(1, b"k" * 32))[4:],
        encode(messages.Found(1, (b"x",) * 65))[4:],
        encode(messages.Found(1, (b"x" * 2049,)))[4:],
        encode(messages.Alive(-1, 0))[4:],
        encode(messages.Failed("x" * 2001))[4:],
    ],
)
def test_messages_beyond_their_bounds_are_refused(body: bytes) -> None:
    with pytest.raises(BridgeError):
        decode_to_node(body)


def test_a_length_beyond_the_cap_is_refused_before_its_body_comes() -> None:
    with pytest.raises(BridgeError, match="are allowed"):
        list(Frames().feed((messages.MAX_FRAME_BYTES + 1).to_bytes(4, "big")))
    assert list(Frames().feed(messages.MAX_FRAME_BYTES.to_bytes(4, "big"))) == []


def test_the_child_refuses_what_the_node_never_says() -> None:
    with pytest.raises(BridgeError):
        decode_to_child(encode(messages.Opened("x"))[4:])
    with pytest.raises(BridgeError):
        decode_to_child(encode(messages.Put(1, b"k" * 32, b"a" * 32, b"v", float("inf")))[4:])


# ------------------------------------------------------------------------------------------ multiaddresses, set-up


def test_multiaddresses_are_read_as_hivemind_prints_them() -> None:
    first, second = f"/ip4/192.0.2.1/tcp/31337/p2p/{PEER_ID}", f"/dns6/a.example.org/udp/9/quic/p2p/{PEER_ID}"
    assert parse_multiaddrs(first) == (first,)
    assert join_multiaddrs([f"{first} {second}", first]) == (first, second)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:31337",
        "/ip4/192.0.2.1/tcp/31337",
        f"/p2p/{PEER_ID}",
        "/ip4/192.0.2.1/tcp/1/p2p/short",
        f"ip4/1/p2p/{PEER_ID}",
        f"/ip4/{'1' * 600}/p2p/{PEER_ID}",
    ],
)
def test_what_is_no_multiaddress_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="multiaddress") as caught:
        parse_multiaddrs(text)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message


def test_the_remedy_is_named_where_hivemind_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "WSL" in str(find_problem("win32", (3, 12)))
    assert "3.14" in str(find_problem("linux", (3, 14)))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "hivemind", raising=False)
    sys.path_importer_cache.clear()
    assert "pip install 'swarmtrain[hivemind]'" in str(find_problem("linux", (3, 12)))


def test_a_missing_daemon_and_another_version_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("hivemind/hivemind_cli", "hivemind-1.1.12.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "hivemind" / "__init__.py").write_text("raise AssertionError('the node must not import it')")
    metadata = tmp_path / "hivemind-1.1.12.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: hivemind\nVersion: 1.1.12\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "hivemind", raising=False)
    sys.path_importer_cache.clear()
    assert "p2pd is missing or may not be run" in str(find_problem("linux", (3, 12)))
    daemon = tmp_path / "hivemind" / "hivemind_cli" / "p2pd"
    daemon.touch(mode=0o600)
    assert "may not be run" in str(find_problem("linux", (3, 12)))
    daemon.chmod(0o700)
    assert find_problem("linux", (3, 12)) is None
    metadata.write_text("Metadata-Version: 2.1\nName: hivemind\nVersion: 1.2.0\n")
    assert "hivemind 1.2.0 is installed, 1.1.12 is needed" in str(find_problem("linux", (3, 12)))
    with pytest.raises(UserError, match="hivemind 1") as caught:
        check_rendezvous("hivemind", [f"/ip4/192.0.2.1/tcp/31337/p2p/{PEER_ID}"])
    assert caught.value.exit_code == 2
    assert check_rendezvous("own", []) == ()
