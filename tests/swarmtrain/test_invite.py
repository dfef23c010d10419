"""Invite links and what a user may give instead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_peer.addresses import Address
from swarm_peer.certificates import issue_ticket
from swarm_peer.identity import Identity, PeerId

from swarmtrain.errors import InviteError
from swarmtrain.invite import MAX_INVITE_PEERS, Invite, parse_entry_point, parse_invite, resolve_target

PEER = PeerId(bytes(range(32)))
RUN_ID = b"\xab" * 32
INVITE = Invite("my-run", "0123abcd", RUN_ID, ((PEER, Address("train.example.org", 7766)),))

hosts = st.sampled_from(["10.0.0.1", "train.example.org", "::1", "fe80::1", "localhost"])
addresses = st.builds(Address, hosts, st.integers(1, 65535))
contacts = st.tuples(st.none() | st.binary(min_size=32, max_size=32).map(PeerId), addresses)
names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)


def test_the_link_is_one_readable_line() -> None:
    assert str(INVITE) == f"swarm://my-run@0123abcd/{'ab' * 32}?peer={PEER.hex()}@train.example.org:7766"


@given(names, st.binary(min_size=4, max_size=4), st.binary(min_size=32, max_size=32), st.lists(contacts, max_size=5))
@settings(max_examples=100, deadline=None)
def test_round_trip(name: str, mark: bytes, run_id: bytes, peers: list[tuple[PeerId | None, Address]]) -> None:
    invite = Invite(name, mark.hex(), run_id, tuple(dict.fromkeys(peers)))
    assert parse_invite(f"  {invite}\n") == invite
    assert invite.reference.run_id == run_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an invite link"),
        ("https://example.org", "not an invite link"),
        ("swarm://", "not NAME@FINGERPRINT/RUNID"),
        ("swarm://my-run/00", "not NAME@FINGERPRINT/RUNID"),
        ("swarm://My Run@0123abcd/00", "copy it again"),
        ("swarm://MY@0123abcd/" + "ab" * 32, "not a run's name"),
        ("swarm://my-run@xyz/" + "ab" * 32, "not a fingerprint"),
        (f"swarm://{'cd' * 32}@0123abcd/" + "ab" * 32, "not a run's name"),
        (str(INVITE)[:60], "cut off"),
        (str(INVITE) + "&relay=1", "'relay=1' is not peer="),
        (str(INVITE) + "&peer=nowhere", "no address"),
        (str(INVITE) + "&peer=host:0", "port 0"),
        (str(INVITE) + "&peer=zz@host:1", "peer id of 64 hex"),
        (str(INVITE) + "\x1b[31m", "copy it again"),
        (str(INVITE) + "é", "copy it again"),
        ("swarm://" + "a" * 9000, "more than 8192"),
        (str(INVITE) + "".join(f"&peer=h{n}:1" for n in range(MAX_INVITE_PEERS)), "more than 16 peers"),
    ],
)
def test_complaints_are_one_line(text: str, says: str) -> None:
    with pytest.raises(InviteError) as caught:
        parse_invite(text)
    assert says in caught.value.message
    assert caught.value.message.isprintable()


@given(st.text(max_size=200) | st.text(max_size=80).map(lambda tail: str(INVITE) + tail))
@settings(max_examples=300, deadline=None)
def test_no_text_escapes_as_another_error(text: str) -> None:
    message = ""
    try:
        assert parse_invite(str(parse_invite(text))) == parse_invite(text)
    except InviteError as error:
        message = error.message
    assert message == "" or message.isprintable()


def test_a_target_merges_link_and_peers_by_hand() -> None:
    target = resolve_target(None, str(INVITE), ["10.0.0.1:5", str(INVITE.peers[0][1])])
    assert target.reference == INVITE.reference
    assert [str(address) for _, address in target.peers] == ["10.0.0.1:5", "train.example.org:7766"] * 1 + [
        "train.example.org:7766"
    ]
    by_name = resolve_target("my-run", None, [f"{PEER.hex()}@[::1]:9"])
    assert (by_name.reference.name, by_name.peers) == ("my-run", ((PEER, Address("::1", 9)),))


@pytest.mark.parametrize(("run", "invite", "peers"), [(None, None, ["a:1"]), ("a", str(INVITE), [])])
def test_a_target_needs_one_run(run: str | None, invite: str | None, peers: list[str]) -> None:
    with pytest.raises(InviteError):
        resolve_target(run, invite, peers)


def test_an_entry_point_is_a_dialable_address() -> None:
    assert parse_entry_point("host:1") == (None, Address("host", 1))
    with pytest.raises(InviteError, match="no address"):
        parse_entry_point("host")


def test_a_ticket_travels_in_the_link_and_never_in_a_message() -> None:
    run_id = bytes.fromhex("ab" * 32)
    ticket = issue_ticket(Identity.generate(), (), run_id, bytes(range(32)), not_after=2_000_000_000)
    link = str(Invite("my-run", "1f2e3d4c", run_id, (), ticket))
    assert parse_invite(link).ticket == ticket
    secret = link.partition("ticket=")[2]
    for text in (link[:-8], link + "&ticket=" + secret, link.replace("ab" * 32, "cd" * 32), link + "!"):
        with pytest.raises(InviteError) as caught:
            parse_invite(text)
        assert secret[:40] not in caught.value.message
