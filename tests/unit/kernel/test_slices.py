"""Scheduler time slices: set for one thread, not for threads that it starts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from polybus.kernel import scheduler


def shortened() -> tuple[bool, int, int]:
    """Run in a thread. Returns the result, its slice, and that of a thread it started."""
    done = scheduler.set_time_slice_us(100)
    with ThreadPoolExecutor(1) as other:
        return (
            done,
            scheduler.get_time_slice_us(),
            other.submit(scheduler.get_time_slice_us).result(),
        )


def test_time_slice_applies_to_the_calling_thread_only():
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(scheduler.get_time_slice_us).result()
        if before == 0:
            pytest.skip("this kernel has no slices to choose")
        assert thread.submit(shortened).result() == (True, 100, before)


def test_existing_priority_is_not_changed():
    def preferred() -> tuple[bool, int]:
        os.setpriority(os.PRIO_PROCESS, 0, -1)
        return scheduler.set_time_slice_us(100), os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as thread:
        try:
            assert thread.submit(preferred).result() == (False, -1)
        except PermissionError:
            pytest.skip("only root can prefer a thread")
