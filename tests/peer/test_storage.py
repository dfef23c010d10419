"""The record store: a state machine against a plain model, then each cap and rule by example."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from swarm_peer.identity import Identity, PeerId
from swarm_peer.records import (
    AgedRecord,
    RunPayload,
    SignedRecord,
    age_record,
    encode_payload,
    index_key,
    make_record,
    slot_of,
)
from swarm_peer.routing import distance
from swarm_peer.storage import Origin, PutOutcome, RateLimiter, RecordStore, StorageLimits

AUTHORS = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 7)]
KEYS = [bytes([n]) * 32 for n in range(1, 6)]
OWN = bytes(32)
LIMITS = StorageLimits(keys=3, records_per_key=3, records=7, slots_per_author=2)
BY_AUTHOR = Origin(is_author=True)
BY_OTHER = Origin(is_author=False)


def record(author: int = 0, key: int = 0, seq: int = 1, ttl_s: int = 60, text: bytes = b"") -> SignedRecord:
    return make_record(AUTHORS[author], "peer", KEYS[key], seq, ttl_s, text)


def run_record(author: int, run: int, key: bytes, seq: int = 1, ttl_s: int = 60) -> SignedRecord:
    payload = encode_payload(RunPayload(bytes([run]) * 32, "a run", bytes([run]) * 32, bytes(32), ()))
    return make_record(AUTHORS[author], "run", key, seq, ttl_s, payload)


def store(limits: StorageLimits | None = None) -> RecordStore:
    return RecordStore(OWN, random.Random(0), limits)


class StoreMachine(RuleBasedStateMachine):
    """Random puts by authors and others, with ages, while time passes."""

    @initialize()
    def begin(self) -> None:
        self.store = RecordStore(OWN, random.Random(0), LIMITS)
        self.now = 0.0
        self.seqs: dict[tuple[bytes, PeerId], int] = {}
        self.latest_end: dict[bytes, float] = {}  # by content: no copy may live beyond this

    @rule(
        author=st.integers(0, 5),
        key=st.integers(0, 4),
        seq=st.integers(0, 4),
        ttl_s=st.integers(1, 50),
        text=st.sampled_from([b"a", b"b"]),
        age_s=st.floats(0, 40),
        by_author=st.booleans(),
    )
    def put(self, author: int, key: int, seq: int, ttl_s: int, text: bytes, age_s: float, by_author: bool) -> None:
        self._put(record(author, key, seq, ttl_s, text), age_s, by_author)

    @rule(
        author=st.integers(0, 2),
        key=st.integers(0, 4),
        seq=st.integers(0, 4),
        ttl_s=st.integers(1, 50),
        run=st.integers(1, 3),
        age_s=st.floats(0, 40),
        by_author=st.booleans(),
    )
    def put_run(self, author: int, key: int, seq: int, ttl_s: int, run: int, age_s: float, by_author: bool) -> None:
        self._put(run_record(author, run, KEYS[key], seq, ttl_s), age_s, by_author)

    def _put(self, made: SignedRecord, age_s: float, by_author: bool) -> None:
        seq = made.seq
        aged = age_record(made, age_s)
        before = self.store.held(made, self.now)
        outcome = self.store.put(aged, Origin(is_author=by_author), self.now)
        after = self.store.held(made, self.now)
        end = self.now + aged.remaining_s
        content = made.content_hash()
        if before is None and outcome is not PutOutcome.STORED:
            assert after is None
            assert outcome in (PutOutcome.FULL, PutOutcome.EXPIRED)
        if before is not None:
            assert after is not None
            assert after.record.seq >= before.record.seq
            same = before.record.content_hash() == content
            if same and not by_author:
                assert after.age_ms == before.age_ms
            if same and by_author and outcome is not PutOutcome.EXPIRED:
                assert after.age_ms <= before.age_ms
            if before.record.seq == seq and not same and outcome is not PutOutcome.EXPIRED:
                assert made.author() in self.store.flagged
                assert after.record.content_hash() == min(content, before.record.content_hash())
        if outcome in (PutOutcome.STORED, PutOutcome.REFRESHED):
            self.latest_end[content] = max(end, self.latest_end.get(content, 0.0))

    @rule(seconds=st.floats(0.1, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.store.expire(self.now)

    @rule(key=st.integers(0, 4))
    def echo(self, key: int) -> None:
        """Whatever comes out and goes in again, even for ever, gains nothing."""
        for aged in self.store.get(KEYS[key], self.now):
            assert self.store.put(aged, BY_OTHER, self.now) in (PutOutcome.HELD, PutOutcome.EXPIRED)

    @invariant()
    def caps_hold(self) -> None:
        assert len(self.store) <= LIMITS.records
        assert len(self.store._keys) <= LIMITS.keys
        assert len(self.store) == sum(map(len, self.store._keys.values()))
        assert all(0 < len(entries) <= LIMITS.records_per_key for entries in self.store._keys.values())
        for key, entries in self.store._keys.items():
            runs = Counter(author for author, slot in entries if slot)
            assert all(count <= LIMITS.slots_per_author for count in runs.values())
            for (author, slot), entry in entries.items():
                assert (entry.record.key, entry.record.author(), slot_of(entry.record)) == (key, author, slot)

    @invariant()
    def nothing_lives_too_long(self) -> None:
        for key in KEYS:
            for aged in self.store.get(key, self.now):
                assert aged.remaining_s > -0.002
                assert self.now + aged.remaining_s <= self.latest_end[aged.record.content_hash()] + 0.002


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_record_ends_ttl_minus_age_after_receipt() -> None:
    held = store()
    held.put(AgedRecord(record(ttl_s=60), 20_000), BY_OTHER, now=100.0)
    assert [aged.age_ms for aged in held.get(KEYS[0], now=110.0)] == [30_000]
    assert held.get(KEYS[0], now=139.9) != []
    assert held.get(KEYS[0], now=140.1) == []


def test_a_tombstone_remembers_seq_and_answers_the_author() -> None:
    held = store()
    held.put(AgedRecord(record(seq=5, ttl_s=60), 0), BY_AUTHOR, now=0.0)
    held.expire(now=70.0)
    assert held.put(AgedRecord(record(seq=4), 0), BY_AUTHOR, now=70.0) is PutOutcome.STALE
    newest = held.held(record(seq=4), now=70.0)
    assert newest is not None
    assert newest.record.seq == 5
    held.expire(now=121.0)
    assert len(held) == 0


def test_an_expired_copy_does_not_come_back_by_another_holder() -> None:
    held = store()
    held.put(AgedRecord(record(ttl_s=60), 0), BY_AUTHOR, now=0.0)
    assert held.put(AgedRecord(record(ttl_s=60), 59_900), BY_OTHER, now=60.5) is PutOutcome.HELD
    assert held.get(KEYS[0], now=60.5) == []
    assert held.put(AgedRecord(record(ttl_s=60), 0), BY_AUTHOR, now=61.0) is PutOutcome.REFRESHED
    assert held.get(KEYS[0], now=61.0) != []


def test_would_take_spares_signature_checks_of_old_records_only() -> None:
    held = store()
    held.put(AgedRecord(record(seq=2), 0), BY_AUTHOR, now=0.0)
    assert not held.would_take(record(seq=1))
    assert held.would_take(record(seq=2))
    assert held.would_take(record(seq=1, author=1))


def test_a_full_key_prefers_authors_in_person() -> None:
    held = store(StorageLimits(records_per_key=2))
    held.put(AgedRecord(record(0), 0), BY_AUTHOR, 0.0)
    held.put(AgedRecord(record(1), 0), BY_OTHER, 0.0)
    assert held.put(AgedRecord(record(2), 0), BY_AUTHOR, 0.0) is PutOutcome.STORED
    authors = {aged.record.author() for aged in held.get(KEYS[0], 0.0)}
    assert authors == {AUTHORS[0].peer_id, AUTHORS[2].peer_id}
    assert held.put(AgedRecord(record(3), 0), BY_OTHER, 0.0) is PutOutcome.FULL
    assert held.put(AgedRecord(record(3), 0), BY_AUTHOR, 0.0) is PutOutcome.STORED


def test_one_large_topic_gives_way_at_a_full_key() -> None:
    held = store(StorageLimits(records_per_key=3))
    for author, topic in ((0, "big"), (1, "big"), (2, "small")):
        held.put(AgedRecord(record(author), 0), Origin(is_author=True, topic=topic), 0.0)
    for author in (3, 4, 5):
        held.put(AgedRecord(record(author), 0), Origin(is_author=True, topic="big"), 0.0)
    assert AUTHORS[2].peer_id in {aged.record.author() for aged in held.get(KEYS[0], 0.0)}


def test_an_author_keeps_every_run_of_its_own_up_to_its_share() -> None:
    held = store(StorageLimits(slots_per_author=4))
    for run in range(1, 5):
        held.put(AgedRecord(run_record(0, run, index_key()), 0), BY_AUTHOR, 0.0)
    assert {slot_of(aged.record)[0] for aged in held.get(index_key(), 0.0)} == {1, 2, 3, 4}
    # A newer statement about one of them leaves the others as they are; an older one does not come back.
    assert held.put(AgedRecord(run_record(0, 2, index_key(), seq=7), 0), BY_AUTHOR, 0.0) is PutOutcome.STORED
    assert held.put(AgedRecord(run_record(0, 2, index_key(), seq=6), 0), BY_AUTHOR, 0.0) is PutOutcome.STALE
    assert sorted(aged.record.seq for aged in held.get(index_key(), 0.0)) == [1, 1, 1, 7]
    for run in range(5, 40):
        assert held.put(AgedRecord(run_record(0, run, index_key()), 0), BY_AUTHOR, 0.0) is PutOutcome.STORED
    assert len(held.get(index_key(), 0.0)) == 4


def test_an_author_of_many_runs_gives_way_to_an_author_of_one() -> None:
    held = store(StorageLimits(records_per_key=6, slots_per_author=5))
    for author, run in ((1, 50), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)):
        origin = Origin(is_author=True, topic=run)
        held.put(AgedRecord(run_record(author, run, index_key()), 0), origin, 0.0)
    for author in (2, 3, 4):
        held.put(AgedRecord(run_record(author, 50 + author, index_key()), 0), Origin(True, topic=50 + author), 0.0)
    authors = Counter(aged.record.author() for aged in held.get(index_key(), 0.0))
    assert authors == {AUTHORS[0].peer_id: 2, **{AUTHORS[n].peer_id: 1 for n in (1, 2, 3, 4)}}


def test_one_network_gets_its_share_of_a_key() -> None:
    held = store(StorageLimits(authors_per_network=2))
    for author in range(5):
        held.put(AgedRecord(record(author), 0), Origin(is_author=True, network="here"), 0.0)
    assert len(held.get(KEYS[0], 0.0)) == 2


def test_when_keys_run_out_the_nearest_stay() -> None:
    held = store(StorageLimits(keys=2))
    for key in (3, 1, 4, 0, 2):
        held.put(AgedRecord(record(key=key), 0), BY_AUTHOR, 0.0)
    kept = [key for key in KEYS if held.get(key, 0.0)]
    assert kept == sorted(KEYS, key=lambda key: distance(key, OWN))[:2]


def test_the_rate_limiter_allows_a_burst_and_then_the_rate() -> None:
    limiter = RateLimiter(rate_per_s=2.0, burst=4, peers=2)
    assert [limiter.allow(b"a", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert limiter.allow(b"b", 0.0)
    assert [limiter.allow(b"a", 1.0) for _ in range(3)] == [True, True, False]
    limiter.allow(b"c", 1.0)
    assert len(limiter._buckets) == 2
