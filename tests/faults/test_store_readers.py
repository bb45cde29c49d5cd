"""Readers that are killed or stand still do not make the file of a busy writer grow."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from polybus.testing.nursery import Nursery

ACTS = "polybus.testing.storereaders"
READERS_SABOTAGE = "long-read-transactions"
KILLS = 6
# The writer writes some 70 MB. It looks for dead readers when the file has grown by 8 MiB.
MOST_GROWTH_BYTES = 24 << 20


@pytest.fixture
def nursery(sabotage) -> Iterator[Nursery]:
    """The writer's; its readers are children of its own."""
    own = "" if sabotage == READERS_SABOTAGE else sabotage or ""
    with Nursery(ACTS, {"POLYBUS_SABOTAGE": own}) as nursery:
        yield nursery


@pytest.mark.sabotage("reader-check-off")
def test_pages_that_a_killed_reader_held_are_used_again(nursery, tmp_path):
    found = nursery.ask("killed_readers", str(tmp_path / "store"), KILLS)
    assert not found["wrong"], found["wrong"][0]
    assert found["read"] > 0
    assert found["died"] == signal.SIGKILL
    assert found["after"] < found["before"] + MOST_GROWTH_BYTES, found


@pytest.mark.sabotage(READERS_SABOTAGE)
def test_a_reader_that_stands_still_holds_no_pages_and_keeps_its_rows(nursery, tmp_path, sabotage):
    found = nursery.ask("slow_readers", str(tmp_path / "store"), sabotage or "")
    assert found["same"]
    assert found["changed"] is False
    assert found["after"] < found["before"] + MOST_GROWTH_BYTES, found
