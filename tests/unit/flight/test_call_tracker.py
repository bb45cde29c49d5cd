"""Calls in progress are counted; a stopping port refuses new ones."""

from __future__ import annotations

import pytest

from polybus.errors import MalformedRequest, StoreClosed
from polybus.transports.flight.call_tracker import CallTracker


def test_call_counts_until_it_ends():
    calls = CallTracker()
    with calls.track_call():
        assert calls.count == 1
    with calls.begin_call():
        assert calls.count == 1
    assert calls.count == 1  # a begun call continues
    calls.end_call()
    assert calls.count == 0


def test_call_that_failed_to_begin_does_not_count():
    calls = CallTracker()
    with pytest.raises(MalformedRequest), calls.begin_call():
        raise MalformedRequest("not so")
    assert calls.count == 0
    assert calls.wait_settled(0)


def test_stopping_waits_for_unanswered_calls():
    calls = CallTracker()
    with calls.begin_call():
        assert calls.wait_settled(0)  # an open stream is owed nothing
    with calls.track_call():
        assert not calls.wait_settled(0.01)
        calls.stop()
        for refused in (
            calls.check_open,
            calls.track_call().__enter__,
            calls.begin_call().__enter__,
        ):
            with pytest.raises(StoreClosed):
                refused()
    assert calls.wait_settled(0)
