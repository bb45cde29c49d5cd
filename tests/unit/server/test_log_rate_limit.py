"""A flood of one event becomes a few lines and a count."""

from __future__ import annotations

import pytest
from structlog import DropEvent

from polybus.server.log_rate_limit import (
    MAX_KINDS,
    OVERFLOW_KIND,
    TRACEBACK_WINDOW_S,
    EventKind,
    LogRateLimiter,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def passed(
    gate: LogRateLimiter, event: str, times: int, level: str = "info", **fields: object
) -> int:
    count = 0
    for _ in range(times):
        try:
            gate(None, level, {"event": event, **fields})
            count += 1
        except DropEvent:
            pass
    return count


def test_lines_over_the_rate_are_counted(clock):
    gate = LogRateLimiter(20, clock)
    assert passed(gate, "connection refused", 1000, "warning") == 20
    assert gate.summaries() == []  # the second is not over
    clock.now += 1
    assert gate.summaries() == [(EventKind("warning", "connection refused"), 980)]
    assert gate.summaries() == []


def test_events_and_levels_are_counted_separately(clock):
    gate = LogRateLimiter(2, clock)
    assert passed(gate, "a", 5) == 2
    assert passed(gate, "b", 5) == 2
    assert passed(gate, "a", 5, "error") == 2


@pytest.mark.parametrize(
    ("flood", "other"),
    [
        ({"reason": "produce_denied"}, {"reason": "delete_denied"}),
        ({"quota": "quota_bytes"}, {"quota": "quota_topics"}),
        (
            {"user": "uid:1", "reason": "create_denied"},
            {"user": "uid:2", "reason": "create_denied"},
        ),
    ],
)
def test_reasons_quotas_and_users_are_counted_separately(clock, flood, other):
    gate = LogRateLimiter(2, clock)
    assert passed(gate, "refused", 1000, "warning", **flood, topic="x") == 2
    assert passed(gate, "refused", 1, "warning", **other, topic="x") == 1
    clock.now += 1
    ((kind, held_back),) = gate.summaries()
    assert (dict(kind.facts), held_back) == (flood, 998)


def test_peers_are_not_counted_separately(clock):
    gate = LogRateLimiter(2, clock)
    assert sum(passed(gate, "closed", 1, peer=f"127.0.0.1:{port}") for port in range(100)) == 2


def test_next_second_admits_lines_again(clock):
    gate = LogRateLimiter(2, clock)
    assert passed(gate, "a", 5) == 2
    clock.now += 1
    assert passed(gate, "a", 5) == 2
    clock.now += 1
    assert gate.summaries() == [(EventKind("info", "a"), 6)]  # nothing held back is forgotten


def test_event_below_the_rate_has_no_summary(clock):
    gate = LogRateLimiter(2, clock)
    assert passed(gate, "a", 2) == 2
    clock.now += 1
    assert gate.summaries() == []


def test_summary_is_never_suppressed(clock):
    gate = LogRateLimiter(1, clock)
    passed(gate, "a", 5)
    assert passed(gate, "a", 1, repeated=4) == 1


def test_traceback_window_is_a_minute(clock):
    gate = LogRateLimiter(2, clock)
    assert passed(gate, "unexpected error", 3, "error", exc_info=ValueError()) == 2
    clock.now += 2
    assert passed(gate, "unexpected error", 3, "error", exc_info=ValueError()) == 0
    clock.now += TRACEBACK_WINDOW_S
    assert gate.summaries() == [(EventKind("error", "unexpected error"), 4)]


def test_close_reports_all_suppressed_lines(clock):
    gate = LogRateLimiter(1, clock)
    passed(gate, "a", 3)
    assert gate.summaries(final=True) == [(EventKind("info", "a"), 2)]


def test_number_of_event_kinds_is_bounded(clock):
    gate = LogRateLimiter(5, clock)
    count = sum(passed(gate, f"event {i}", 1) for i in range(MAX_KINDS + 500))
    assert count == MAX_KINDS + 5
    clock.now += 1
    assert gate.summaries() == [(OVERFLOW_KIND, 495)]
