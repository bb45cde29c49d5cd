"""Counts the calls that a step makes: its cost, without a clock.

few = count_calls(small.disconnect)
many = count_calls(large.disconnect)
assert many == few                   # the cost does not grow
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(step: Callable[[], Any]) -> int:
    """Return the number of Python and C functions that `step` calls on this thread."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    previous, was_enabled = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls what other code has registered for it
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(previous)
        if was_enabled:
            gc.enable()
    return calls
