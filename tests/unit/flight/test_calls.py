"""Calls under way: counted, and none once the port stops."""

from __future__ import annotations

import pytest

from polybus.errors import MalformedRequest, StoreClosed
from polybus.transports.flight.call_tracker import Calls


def test_a_call_counts_until_it_leaves():
    calls = Calls()
    with calls.one():
        assert calls.count == 1
    with calls.entering():
        assert calls.count == 1
    assert calls.count == 1  # a call that began goes on
    calls.leave()
    assert calls.count == 0


def test_what_could_not_begin_does_not_count():
    calls = Calls()
    with pytest.raises(MalformedRequest), calls.entering(owed=True):
        raise MalformedRequest("not so")
    assert calls.count == 0
    assert calls.wait_settled(0)


def test_stopping_waits_for_what_is_owed():
    calls = Calls()
    with calls.entering():
        assert calls.wait_settled(0)  # an open stream is owed nothing
    with calls.one():
        assert not calls.wait_settled(0.01)
        calls.stop()
        for refused in (calls.check, calls.one().__enter__, calls.entering().__enter__):
            with pytest.raises(StoreClosed):
                refused()
    assert calls.wait_settled(0)
