from __future__ import annotations

import random
import struct

import pytest
from swarm_peer.errors import Disconnected, ProtocolError
from swarm_peer.frames import FrameDecoder, FrameType, encode_frame
from swarm_peer.mux import Mux
from swarm_peer.mux_events import (
    ByeCode,
    Ended,
    Event,
    Headed,
    MuxLimits,
    Opened,
    Received,
    ResetCode,
    SaidBye,
    WasReset,
)
from swarm_peer.pacing import CreditBudget
from swarm_peer.rpc import Priority

WINDOW = 1000
LIMITS = MuxLimits(window_bytes=WINDOW, max_streams=4, reset_burst=10)


def pair() -> tuple[Mux, Mux]:
    return Mux(is_dialer=True, now=0.0, limits=LIMITS), Mux(is_dialer=False, now=0.0, limits=LIMITS)


def carry(source: Mux, target: Mux, now: float = 0.0) -> list[Event]:
    """Everything that `source` has to send, as events at `target`."""
    events: list[Event] = []
    while data := source.next_output(1 << 20).data:
        events += list(target.receive(data, now))
    return events


def body(events: list[Event], stream_id: int) -> bytes:
    return b"".join(e.data for e in events if isinstance(e, Received) and e.stream_id == stream_id)


def frames_of(mux: Mux, max_bytes: int = 1 << 20) -> list[FrameType]:
    return [frame.type for frame in FrameDecoder().feed(mux.next_output(max_bytes).data)]


def violate(mux: Mux, data: bytes) -> str:
    with pytest.raises(ProtocolError) as raised:
        list(mux.receive(data, 0.0))
    return raised.value.reason


def test_a_call_goes_out_and_comes_back() -> None:
    dialer, server = pair()
    stream_id = dialer.open(b"header", Priority.NORMAL)
    dialer.send(stream_id, b"request", fin=True)
    assert carry(dialer, server) == [Opened(1, b"header"), Received(1, b"request"), Ended(1)]
    server.answer(stream_id, b"ok", Priority.NORMAL)
    server.send(stream_id, b"reply", fin=True)
    assert carry(server, dialer) == [Headed(1, b"ok"), Received(1, b"reply"), Ended(1)]
    assert dialer.stream_count == server.stream_count == 0
    assert not dialer.has_output
    assert not server.has_output


def test_both_sides_call_on_ids_of_their_own() -> None:
    dialer, server = pair()
    assert [dialer.open(b"h", Priority.NORMAL) for _ in range(2)] == [1, 3]
    assert [server.open(b"h", Priority.NORMAL) for _ in range(2)] == [2, 4]
    assert carry(dialer, server) == [Opened(1, b"h"), Opened(3, b"h")]
    assert carry(server, dialer) == [Opened(2, b"h"), Opened(4, b"h")]


def test_nobody_sends_more_than_was_granted() -> None:
    dialer, server = pair()
    stream_id = dialer.open(b"h", Priority.NORMAL)
    dialer.send(stream_id, bytes(5 * WINDOW), fin=True)
    taken = 0
    while taken < 5 * WINDOW:
        events = carry(dialer, server)
        got = len(body(events, stream_id))
        assert 0 < got <= WINDOW
        assert not dialer.has_output, "without credit there is nothing to send"
        taken += got
        server.grant(stream_id, got)
        carry(server, dialer)
    assert Ended(stream_id) in events


def test_a_stream_without_credit_does_not_hold_up_others() -> None:
    dialer, server = pair()
    stuck = dialer.open(b"h", Priority.CONTROL)
    dialer.send(stuck, bytes(2 * WINDOW), fin=True)
    other = dialer.open(b"h", Priority.BULK)
    dialer.send(other, b"small", fin=True)
    events = carry(dialer, server)
    assert Ended(other) in events
    assert len(body(events, stuck)) == WINDOW


def test_urgent_data_overtakes_bulk_between_two_frames() -> None:
    dialer, _ = pair()
    bulk = dialer.open(b"h", Priority.BULK)
    dialer.send(bulk, bytes(WINDOW), fin=True)
    dialer.next_output(100)
    urgent = dialer.open(b"h", Priority.CONTROL)
    dialer.send(urgent, b"now", fin=True)
    frames = list(FrameDecoder().feed(dialer.next_output(100).data))
    assert [(frame.type, frame.stream_id) for frame in frames] == [
        (FrameType.OPEN, urgent),
        (FrameType.DATA, urgent),
        (FrameType.DATA, bulk),
    ]


def test_equals_take_turns() -> None:
    dialer, _ = pair()
    ids = [dialer.open(b"h", Priority.BULK) for _ in range(3)]
    dialer.next_output(1 << 20)
    for stream_id in ids:
        dialer.send(stream_id, bytes(300), fin=True)
    order = [next(FrameDecoder().feed(dialer.next_output(100).data)).stream_id for _ in range(9)]
    assert order == ids * 3


def test_output_is_bounded_by_what_is_asked_for() -> None:
    dialer, _ = pair()
    stream_id = dialer.open(b"h", Priority.BULK)
    dialer.send(stream_id, bytes(WINDOW), fin=True)
    dialer.next_output(1)
    output = dialer.next_output(200)
    assert len(output.data) <= 200 + 12
    assert output.progressed == [stream_id]
    assert dialer.output_bytes(stream_id) == WINDOW - 200


def test_a_reset_ends_both_halves_and_drops_what_was_queued() -> None:
    dialer, server = pair()
    stream_id = dialer.open(b"h", Priority.NORMAL)
    dialer.send(stream_id, bytes(3 * WINDOW), fin=True)
    carry(dialer, server)
    dialer.reset(stream_id, ResetCode.CANCELLED)
    assert carry(dialer, server) == [WasReset(stream_id, ResetCode.CANCELLED)]
    # What the server had under way for it is ignored by both.
    server.answer(stream_id, b"ok", Priority.NORMAL)
    server.send(stream_id, b"late", fin=True)
    assert carry(server, dialer) == []
    assert dialer.stream_count == server.stream_count == 0


def test_frames_that_cross_a_reset_are_ignored() -> None:
    dialer, server = pair()
    stream_id = dialer.open(b"h", Priority.NORMAL)
    carry(dialer, server)
    server.answer(stream_id, b"ok", Priority.NORMAL)
    server.send(stream_id, b"reply", fin=False)
    dialer.reset(stream_id, ResetCode.CANCELLED)
    assert carry(server, dialer) == []


def test_an_early_answer_stops_the_request() -> None:
    dialer, server = pair()
    stream_id = dialer.open(b"h", Priority.NORMAL)
    dialer.send(stream_id, bytes(10 * WINDOW), fin=True)
    carry(dialer, server)
    server.answer(stream_id, b"no", Priority.CONTROL)
    server.send(stream_id, b"", fin=True)
    assert carry(server, dialer) == [Headed(stream_id, b"no"), Ended(stream_id)]
    carry(dialer, server)
    assert dialer.stream_count == server.stream_count == 0
    assert not dialer.has_output


def test_calls_on_streams_that_ended_do_nothing() -> None:
    dialer, _ = pair()
    dialer.answer(7, b"h", Priority.NORMAL)
    dialer.send(7, b"x", fin=True)
    dialer.grant(7, 10**6)
    dialer.reset(7, ResetCode.CANCELLED)
    assert not dialer.has_output
    assert not dialer.is_sending(7)


def frame(kind: FrameType, stream_id: int, payload: bytes = b"", *, fin: bool = False) -> bytes:
    return encode_frame(kind, stream_id, payload, fin=fin)


OPEN_1 = frame(FrameType.OPEN, 1, b"h")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(FrameType.OPEN, 2, b"h"), "bad-stream-id"),
        (OPEN_1 + OPEN_1, "bad-stream-id"),
        (frame(FrameType.OPEN, 9, b"h") + OPEN_1, "bad-stream-id"),
        (b"".join(frame(FrameType.OPEN, n, b"h") for n in (1, 3, 5, 7, 9)), "too-many-streams"),
        (frame(FrameType.BYE, 0, b"\0") + OPEN_1, "open-after-bye"),
        (frame(FrameType.DATA, 1, b"d"), "unknown-stream"),
        (frame(FrameType.HEAD, 4, b"d"), "unknown-stream"),
        (frame(FrameType.RESET, 3, b"\0\1"), "unknown-stream"),
        (OPEN_1 + frame(FrameType.HEAD, 1, b"h"), "unexpected-head"),
        (frame(FrameType.HEAD, 2, b"h") * 2, "unexpected-head"),
        (frame(FrameType.DATA, 2, b"before the head"), "unexpected-data"),
        (frame(FrameType.OPEN, 1, b"h", fin=True) + frame(FrameType.DATA, 1, b"after the end"), "unexpected-data"),
        (OPEN_1 + frame(FrameType.DATA, 1, bytes(WINDOW + 1)), "credit-overrun"),
        (OPEN_1 + frame(FrameType.DATA, 1, bytes(600)) * 2, "credit-overrun"),
        (frame(FrameType.WINDOW, 2, struct.pack("!I", 0)), "bad-window"),
        (frame(FrameType.WINDOW, 2, struct.pack("!I", 2**31)), "bad-window"),
        (frame(FrameType.WINDOW, 2, struct.pack("!I", 2**31 - 2000)) * 2, "bad-window"),
        (frame(FrameType.PONG, 0, struct.pack("!Q", 1)), "unexpected-pong"),
        (frame(FrameType.PING, 0, b"12345678") * 3000, "flood"),
        (
            b"".join(frame(FrameType.OPEN, n, b"h") + frame(FrameType.RESET, n, b"\0\1") for n in range(1, 50, 2)),
            "flood",
        ),
    ],
)
def test_violations_are_named(data: bytes, reason: str) -> None:
    server = pair()[1]
    server.open(b"a call of ours, on stream 2", Priority.NORMAL)
    assert violate(server, data) == reason


def test_resets_at_a_human_rate_are_no_flood() -> None:
    dialer, server = pair()
    for number in range(200):
        stream_id = dialer.open(b"h", Priority.NORMAL)
        dialer.reset(stream_id, ResetCode.CANCELLED)
        carry(dialer, server, now=number * 0.05)


def test_silence_is_probed_and_then_fatal() -> None:
    dialer, server = pair()
    assert dialer.next_tick == 15.0
    dialer.tick(14.9)
    assert not dialer.has_output
    dialer.tick(15.0)
    assert frames_of(dialer) == [FrameType.PING]
    dialer.tick(20.0)
    assert not dialer.has_output, "one probe is enough"
    assert dialer.next_tick == 45.0
    with pytest.raises(Disconnected, match="45 s"):
        dialer.tick(45.0)
    # An answer starts the clock again, and measures the round trip.
    dialer, server = pair()
    dialer.tick(15.0)
    carry(dialer, server, now=15.1)
    carry(server, dialer, now=15.25)
    assert dialer.rtt_s == pytest.approx(0.25)
    assert dialer.next_tick == 30.25
    dialer.tick(45.0)


def test_goodbye_ends_opening_but_not_what_is_under_way() -> None:
    dialer, server = pair()
    stream_id = dialer.open(b"h", Priority.NORMAL)
    dialer.send(stream_id, b"", fin=True)
    dialer.say_bye(ByeCode.IDLE)
    dialer.say_bye(ByeCode.FULL)  # the first word stands
    assert not dialer.can_open
    with pytest.raises(Disconnected):
        dialer.open(b"h", Priority.NORMAL)
    assert SaidBye(ByeCode.IDLE) in carry(dialer, server)
    assert not server.can_open
    server.answer(stream_id, b"ok", Priority.NORMAL)
    server.send(stream_id, b"reply", fin=True)
    assert Ended(stream_id) in carry(server, dialer)


def test_a_side_that_said_goodbye_still_serves_what_crosses_it() -> None:
    dialer, server = pair()
    server.say_bye(ByeCode.IDLE)
    stream_id = dialer.open(b"h", Priority.NORMAL)
    assert carry(dialer, server) == [Opened(stream_id, b"h")]


@pytest.mark.parametrize("seed", range(8))
def test_random_conversations_deliver_every_byte_in_order(seed: int) -> None:
    """A model of both ends: whatever the cuts, sizes and order, bodies arrive whole and both ends fall idle."""
    rng = random.Random(seed)
    muxes = pair()
    wires = [b"", b""]  # bytes under way to each side
    sent: dict[tuple[int, int], bytes] = {}  # (receiving side, stream id) -> body
    got: dict[tuple[int, int], bytes] = {}
    ended: set[tuple[int, int]] = set()
    cancelled: set[int] = set()
    to_open = [12, 12]
    open_now: list[set[int]] = [set(), set()]

    def on_event(side: int, event: Event) -> None:
        match event:
            case Opened(stream_id, _):
                reply = rng.randbytes(rng.choice((0, 1, 900, 4000)))
                sent[1 - side, stream_id] = reply
                muxes[side].answer(stream_id, b"ok", rng.choice(list(Priority)))
                muxes[side].send(stream_id, reply, fin=True)
            case Received(stream_id, data):
                got[side, stream_id] = got.get((side, stream_id), b"") + data
                muxes[side].grant(stream_id, len(data))
            case Ended(stream_id):
                ended.add((side, stream_id))
                open_now[side].discard(stream_id)
            case WasReset(stream_id, code):
                if code != ResetCode.ANSWERED:
                    cancelled.add(stream_id)

    for _ in range(20_000):
        side = rng.randrange(2)
        mux = muxes[side]
        if to_open[side] and len(open_now[side]) < LIMITS.max_streams and rng.random() < 0.2:
            to_open[side] -= 1
            stream_id = mux.open(b"h", rng.choice(list(Priority)))
            open_now[side].add(stream_id)
            request = rng.randbytes(rng.choice((0, 5, 999, 3000)))
            sent[1 - side, stream_id] = request
            mux.send(stream_id, request, fin=True)
        elif open_now[side] and rng.random() < 0.01:
            stream_id = rng.choice(sorted(open_now[side]))
            open_now[side].discard(stream_id)
            cancelled.add(stream_id)
            mux.reset(stream_id, ResetCode.CANCELLED)
        wires[1 - side] += mux.next_output(rng.choice((1, 50, 500, 5000))).data
        cut = rng.randrange(len(wires[side]) + 1)
        data, wires[side] = wires[side][:cut], wires[side][cut:]
        for event in mux.receive(data, 0.0):
            on_event(side, event)
        if not any(to_open) and not any(open_now) and not any(wires) and not any(m.has_output for m in muxes):
            break
    assert [mux.stream_count for mux in muxes] == [0, 0]
    whole = [key for key in ended if key[1] not in cancelled]
    assert len(whole) > 20
    for key in whole:
        assert got.get(key, b"") == sent[key]


def test_a_tick_at_its_time_always_does_something() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        start = rng.random() * 1e6
        dialer = Mux(is_dialer=True, now=start)
        dialer.tick(dialer.next_tick)
        assert dialer.has_output, "else a driver would spin"
        with pytest.raises(Disconnected):
            dialer.tick(dialer.next_tick)


def stream_bytes(seconds_each: float, rounds: int, credit: CreditBudget, rtt_s: float | None) -> int:
    """A remote that sends as much as it may and a consumer that takes it all; returns the last window."""
    dialer = Mux(is_dialer=True, now=0.0, credit=credit, remote=b"r")
    server = Mux(is_dialer=False, now=0.0)
    dialer.measure_rtt = lambda: rtt_s
    stream_id = dialer.open(b"h", Priority.BULK)
    dialer.send(stream_id, b"", fin=True)
    carry(dialer, server)
    server.answer(stream_id, b"ok", Priority.BULK)
    got = 0
    for number in range(1, rounds + 1):
        now = number * seconds_each
        server.send(stream_id, bytes(20 * 1024 * 1024), fin=False)
        got = 0
        while server.has_output:
            for event in dialer.receive(server.next_output(1 << 20).data, now):
                if isinstance(event, Received):
                    got += len(event.data)
        dialer.grant(stream_id, got, now)
        carry(dialer, server, now=now)
    dialer.close()
    return got


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("seconds_each", "rtt_s", "window"),
    [
        (0.1, 0.1, 16 * MIB),  # every round trip takes a whole window: twice that, up to the cap
        (1.0, 0.1, MIB),  # a tenth of the window per round trip is no reason to grow
        (0.1, None, MIB),
    ],
)
def test_windows_grow_to_twice_what_a_round_trip_takes(seconds_each: float, rtt_s: float | None, window: int) -> None:
    assert stream_bytes(seconds_each, 8, CreditBudget(), rtt_s) == window


def test_credit_beyond_the_first_window_is_bounded_and_comes_back() -> None:
    credit = CreditBudget(total_bytes=8 * MIB, per_remote_bytes=3 * MIB)
    assert stream_bytes(0.1, 8, credit, 0.1) == 4 * MIB
    assert credit.take(b"r", 10 * MIB) == 3 * MIB, "the stream has ended and given back all of it"
    assert credit.take(b"s", 10 * MIB) == 3 * MIB
    assert credit.take(b"t", 10 * MIB) == 2 * MIB, "all together"
    credit.give_back(b"s", 3 * MIB)
    assert credit.take(b"t", 10 * MIB) == 1 * MIB
