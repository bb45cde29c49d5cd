"""Backoff and the retry schedule."""

import pytest

from polybus.dialects.fdq.client.acker import Backoff, RetrySchedule
from polybus.errors import UsageError


def test_pauses_double_up_to_the_last():
    backoff = Backoff(0.1, 1.0, random=lambda: 1.0)
    assert [backoff.pause_s(n) for n in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.pause_s(10_000) == 1.0


def test_jitter_takes_at_most_half():
    assert Backoff(0.1, 1.0, random=lambda: 0.0).pause_s(1) == 0.05
    pauses = {Backoff(0.1, 1.0).pause_s(3) for _ in range(50)}
    assert len(pauses) > 10
    assert all(0.2 <= pause <= 0.4 for pause in pauses)


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (2, 1)])
def test_invalid_backoffs_are_refused(first, last):
    with pytest.raises(UsageError, match="backoff"):
        Backoff(first, last)


def test_schedule_returns_due_items_in_order():
    schedule = RetrySchedule()
    for due, what in ((3.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "d")):
        schedule.put(due, what)
    assert schedule.next_s() == 1.0
    assert schedule.take(0.5) == []
    assert schedule.take(3.0) == ["a", "b", "c"]
    assert schedule.next_s() == 9.0
    assert schedule.take(9.0) == ["d"]
    assert schedule.next_s() is None
