"""Where reading begins, as people write it."""

from __future__ import annotations

import pytest

from polybus.cli.start_position import parse_start, parse_time_ns
from polybus.errors import UsageError


@pytest.mark.parametrize("text", ["earliest", "latest", "@0", "@2026-01-31", "@2026-01-31T12:00Z"])
def test_words_and_times_are_resolved_by_the_bus(text):
    assert parse_start(text) == text


def test_ids_are_numbers():
    assert parse_start("17") == 17
    assert parse_start(str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("@1700000000123", 1700000000123),
        ("@2023-11-14T22:13:20Z", 1700000000000),
        ("@2023-11-14T22:13:20.123+00:00", 1700000000123),
        ("@2023-11-15T00:13:20+02:00", 1700000000000),
    ],
)
def test_times(text, milliseconds):
    assert parse_time_ns(text) == milliseconds * 1_000_000


@pytest.mark.parametrize("text", ["@2023-11-14T22:13:20", "@2023-11-14"])
def test_time_without_zone_is_local(text, monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC-2")  # two hours east of Greenwich
    time.tzset()
    here = parse_time_ns(text)
    monkeypatch.delenv("TZ")
    time.tzset()
    assert here == parse_time_ns(text + ("+02:00" if "T" in text else "T00:00+02:00"))


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "@", "@x", "@-1", "@2023-13-01", "²", str(2**63), "@1900-01-01"]
)
def test_other_positions_are_errors(text):
    with pytest.raises(UsageError, match="earliest, latest"):
        parse_start(text)
