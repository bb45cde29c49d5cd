"""Calls under way: bounded, counted, and none once the port stops."""

from __future__ import annotations

import pytest

from polybus.errors import LimitReached, StoreClosed
from polybus.transports.flight.calls import Calls


def test_one_too_many():
    calls = Calls(1)
    with calls.one():
        with pytest.raises(LimitReached) as caught, calls.one():
            pass
        assert caught.value.limit == "max_calls"
        assert calls.count == 1
    with calls.one():
        assert calls.count == 1
    assert calls.count == 0


def test_stopping_waits_for_what_is_owed():
    calls = Calls(10)
    with calls.one():
        assert calls.wait_settled(0)  # an open stream is owed nothing
        with calls.owing():
            assert not calls.wait_settled(0.01)
            calls.stop()
            for refused in (calls.check, calls.owe, calls.one().__enter__):
                with pytest.raises(StoreClosed):
                    refused()
        assert calls.wait_settled(0)
