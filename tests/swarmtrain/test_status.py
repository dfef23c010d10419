"""The status that strangers write: always small, and never more than an empty one when it is wrong."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.status import MAX_STATUS_BYTES, FinalReplica, Status, decode_status, estimate_step

LARGEST = 2**60
WORST = Status(
    step=LARGEST,
    total_steps=LARGEST,
    loss=1 / 3,
    validation_loss=1 / 3,
    tokens_per_s=1 / 3,
    tokens_total=LARGEST,
    last_partner=bytes(4),
    staleness=LARGEST,
    exchanges=LARGEST,
    rejected=LARGEST,
    bytes_sent=LARGEST,
    bytes_received=LARGEST,
    exchange_share=1 / 3,
    final=FinalReplica(bytes(32), bytes(32), LARGEST, LARGEST),
    merged=True,
)


def is_empty(status: Status) -> bool:
    return status.encode() == Status().encode()


def test_the_worst_case_fits_into_a_record() -> None:
    assert len(WORST.encode()) <= MAX_STATUS_BYTES
    assert decode_status(WORST.encode()) == WORST


def test_an_empty_status_survives_with_unknown_losses() -> None:
    status = decode_status(Status().encode())
    assert is_empty(status)
    assert math.isnan(status.loss)


@given(st.binary(max_size=600))
def test_hostile_bytes_never_raise(data: bytes) -> None:
    assert isinstance(decode_status(data), Status)


def test_mutations_never_raise() -> None:
    numbers = random.Random(3)
    for _ in range(3000):
        data = bytearray(WORST.encode())
        for _ in range(numbers.choice([1, 2, 6])):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        status = decode_status(bytes(data[: numbers.choice([len(data), numbers.randrange(len(data))])]))
        assert 0 <= status.step <= LARGEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 512,
        b"\x91" * 513,
        WORST.encode() + b"\0",
        WORST.encode()[:-1],
        bytes(MAX_STATUS_BYTES + 1),
        msgspec.msgpack.encode({"step": 1}),
    ],
)
def test_what_is_no_status_is_an_empty_one(data: bytes) -> None:
    assert is_empty(decode_status(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": LARGEST + 1},
        {"step": "5"},
        {"loss": "low"},
        {"loss": None},
        {"last_partner": bytes(5)},
        {"merged": 1},
        {"final": [bytes(31), bytes(32), 1, 1]},
        {"final": [bytes(32), bytes(32), -1, 1]},
        {"final": [bytes(32), bytes(32), 1]},
    ],
)
def test_values_out_of_bounds_make_the_whole_status_empty(changes: dict[str, Any]) -> None:
    fields = {**msgspec.structs.asdict(Status(step=7)), **changes}
    assert is_empty(decode_status(msgspec.msgpack.encode(list(fields.values()))))


def test_more_fields_than_we_know_are_refused() -> None:
    fields = [*msgspec.structs.asdict(Status()).values(), 1]
    assert is_empty(decode_status(msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize("absurd", [1e308, -1e300, math.inf, -math.inf])
def test_figures_that_no_measurement_can_be_are_not_known(absurd: float) -> None:
    told = Status(step=3, loss=absurd, tokens_per_s=absurd, validation_loss=2.5)
    heard = decode_status(told.encode())
    assert math.isnan(heard.loss)
    assert math.isnan(heard.tokens_per_s)
    assert (heard.step, heard.validation_loss) == (3, 2.5)


@pytest.mark.parametrize(
    ("step", "speed", "age_s", "expected"),
    [
        (100, 640.0, 5.0, 150),
        (100, 0.0, 5.0, 100),
        (100, math.nan, 5.0, 100),
        (990, 640.0, 60.0, 1000),
        (100, -1e9, 5, 100),
    ],
)
def test_old_news_is_carried_forward_at_the_peers_own_speed(
    step: int, speed: float, age_s: float, expected: int
) -> None:
    status = Status(step=step, total_steps=1000, tokens_per_s=speed)
    assert estimate_step(status, age_s, tokens_per_step=64) == expected
