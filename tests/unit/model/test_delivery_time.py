"""Delivery times, times to live and durations: valid forms, and errors that name the fault."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from polybus.errors import MalformedRequest, UsageError
from polybus.model.delivery_time import MAX_DELAY_S, DeliveryTime
from polybus.model.duration import parse_duration_ms
from polybus.model.message_ttl import encode_ttl

NOW_NS = 1_700_000_000 * 10**9


def test_a_delay_counts_from_the_clock_of_the_bus_and_is_rounded_up():
    assert DeliveryTime.from_options(None, None) is None
    delay = DeliveryTime.from_options(0.0011, None)
    assert delay == DeliveryTime(delay_ms=2)
    assert delay.due_ns(NOW_NS) == NOW_NS + 2_000_000
    assert DeliveryTime.parse(delay.to_fields()) == delay


def test_a_time_is_a_datetime_with_a_zone_or_seconds_since_1970():
    at = DeliveryTime.from_options(None, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC))
    assert at == DeliveryTime(deliver_at_ns=NOW_NS)
    assert DeliveryTime.from_options(None, 1_700_000_000) == at
    assert at.due_ns(NOW_NS + 10**9) == NOW_NS  # in the past: it is due
    with pytest.raises(UsageError, match="time zone"):
        DeliveryTime.from_options(None, datetime(2023, 11, 14))  # noqa: DTZ001


@pytest.mark.parametrize(
    "bad", [-1, -0.001, MAX_DELAY_S + 1, float("nan"), float("inf"), "2", True]
)
def test_an_invalid_delay_is_refused(bad):
    with pytest.raises(UsageError, match="delay_s must be"):
        DeliveryTime.from_options(bad, None)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), 1e12, "2", True])
def test_an_invalid_time_is_refused(bad):
    with pytest.raises(UsageError, match="deliver_at must be"):
        DeliveryTime.from_options(None, bad)


def test_a_delay_and_a_time_exclude_each_other():
    with pytest.raises(UsageError, match="exclude each other"):
        DeliveryTime.from_options(1, 1)
    with pytest.raises(MalformedRequest, match="exclude each other"):
        DeliveryTime.parse({"delay_ms": 1, "deliver_at_ns": 1})


@pytest.mark.parametrize("bad", [-1, 1.5, "1", True, 1 << 63, [1]])
def test_an_invalid_field_is_malformed(bad):
    with pytest.raises(MalformedRequest, match="delay_ms must be an integer >= 0"):
        DeliveryTime.parse({"delay_ms": bad})


def test_a_time_must_be_within_thirty_days():
    far = DeliveryTime(deliver_at_ns=NOW_NS + (MAX_DELAY_S + 1) * 10**9)
    with pytest.raises(MalformedRequest, match=r"within 30 days, got 30\.0"):
        far.due_ns(NOW_NS)
    with pytest.raises(MalformedRequest, match="within 30 days"):
        DeliveryTime(delay_ms=(1 << 63) - 1).due_ns(NOW_NS)
    assert DeliveryTime(delay_ms=MAX_DELAY_S * 1000).due_ns(NOW_NS) == NOW_NS + MAX_DELAY_S * 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500ms", 500), ("2s", 2000), ("1.5h", 5_400_000), ("7d", 604_800_000), ("0.0001s", 1)],
)
def test_a_duration_has_a_unit(text, expected):
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize("bad", ["", "2", "s", "-2s", "2 s", "1e3s", "2w", "٣s", "1" * 99 + "s"])
def test_an_invalid_duration_is_refused(bad):
    with pytest.raises(UsageError, match="duration must be a number with ms, s, m, h or d"):
        parse_duration_ms(bad)


def test_a_time_to_live_is_positive_and_finite():
    assert encode_ttl(1.5) == b"1500"
    bad: Any
    for bad in (0, -1, float("nan"), float("inf"), 10**12, "1", True):
        with pytest.raises(UsageError, match="ttl_s must be above 0"):
            encode_ttl(bad)
