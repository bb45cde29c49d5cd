"""Observe a running bus from outside: its counters, its log, its memory.

Tests wait for a condition, never for a time: `until` polls it, and only a test that
has failed reaches the deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybus.server.admin_client import ask, ask_pages

if TYPE_CHECKING:
    from polybus.testing.bus_process import BusProcess

DEADLINE_S = 20.0  # only ever reached when something is wrong
PAUSE_S = 0.01  # between two looks: the bus shall have most of the processor


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition()` is true. Raises AssertionError with the text after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain: {what}")
        time.sleep(PAUSE_S)


async def eventually(
    condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S
) -> None:
    """The same as `until`, for tests on the event loop that they observe."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain: {what}")
        await asyncio.sleep(PAUSE_S / 10)


def stats(bus: BusProcess) -> dict[str, Any]:
    answer: dict[str, Any] = ask(bus.admin_path, "stats")
    return answer


def connections(bus: BusProcess) -> list[dict[str, Any]]:
    return ask_pages(bus.admin_path, "connections", "connections")


def count(bus: BusProcess, *path: str) -> int:
    """One counter by its path, for instance "connections", "closed", "inner_type"."""
    return read_counter(stats(bus), *path)


def read_counter(found: Any, *path: str) -> int:
    """The same, of statistics that were read before."""
    for name in path:
        found = found.get(name, {})
    return found or 0


def log_lines(bus: BusProcess, since: int = 0, /, **fields: object) -> list[dict[str, Any]]:
    """Lines of a JSON log that have all these fields with these values.

    `since` is how long the log was: a peer's name is used again, once its port is free.
    """
    lines = [json.loads(line) for line in bus.log()[since:].splitlines() if line.startswith("{")]
    return [line for line in lines if fields.items() <= line.items()]


def check_unharmed(bus: BusProcess) -> None:
    """Check that the bus counted no unexpected error."""
    assert stats(bus)["faults"] == {}, bus.log()
    errors = log_lines(bus, level="error")
    assert not errors, f"errors in the log: {errors[:3]}"
    assert "Traceback" not in bus.log()


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def thread_count(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])
