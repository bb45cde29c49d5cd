"""Killed and stopped readers do not make the file of a busy writer grow."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.rig.fork_server import ChildServer

ACTS = "tests.rig.store.readers"
KILLS = 6
# The writer writes some 70 MB. It looks for dead readers when the file has grown by 8 MiB.
MOST_GROWTH_BYTES = 24 << 20


@pytest.fixture
def server() -> Iterator[ChildServer]:
    """Return the server of the writer, which starts the readers itself."""
    with ChildServer(ACTS) as server:
        yield server


@pytest.mark.sabotage("reader-check-off", expects=r"assert \d+ < \(\d+ \+ 25165824\)")
def test_pages_of_a_killed_reader_are_reused(server, tmp_path):
    found = server.ask("killed_readers", str(tmp_path / "store"), KILLS)
    assert not found["wrong"], found["wrong"][0]
    assert found["read"] > 0
    assert found["died"] == signal.SIGKILL
    assert found["after"] < found["before"] + MOST_GROWTH_BYTES, found


@pytest.mark.sabotage("long-read-transactions", expects=r"assert \d+ < \(\d+ \+ 25165824\)")
def test_stopped_reader_holds_no_pages_and_keeps_its_rows(server, tmp_path):
    found = server.ask("slow_readers", str(tmp_path / "store"))
    assert found["same"]
    assert found["changed"] is False
    assert found["after"] < found["before"] + MOST_GROWTH_BYTES, found
