"""A state folder: one client at a time, and kill -9 at every point of every change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polybus.dialects.pirate.client import client_journal
from polybus.dialects.pirate.client.journal_state import (
    EpochOpened,
    JournalState,
    RequestAnswered,
)
from polybus.dialects.pirate.client.state_folder import ClientFolder, default_folder
from polybus.errors import (
    ConfigError,
    DataFolderInUse,
    LimitReached,
    NotConnected,
    StoreFault,
    UsageError,
)
from tests.rig.pirate.kill_points import killed_at
from tests.rig.points import PIRATE


def test_new_folder_gets_a_random_id_and_keeps_it(tmp_path):
    ids = []
    for name in ("a", "a", "b"):
        folder = ClientFolder(tmp_path / name)
        ids.append(folder.state.id)
        folder.close()
    assert ids[0] == ids[1] != ids[2]
    assert {len(one) for one in ids} == {16}


def test_folder_with_a_given_id_refuses_another(tmp_path):
    ClientFolder(tmp_path, b"me").close()
    folder = ClientFolder(tmp_path)
    assert folder.state.id == b"me"
    folder.close()
    with pytest.raises(UsageError, match="belongs to client me, not to you"):
        ClientFolder(tmp_path, b"you")
    ClientFolder(tmp_path, b"me").close()  # and the lock was given back


def test_locked_folder_is_refused(tmp_path):
    with_it = ClientFolder(tmp_path)
    with pytest.raises(DataFolderInUse, match=f"in use by the client with pid {os.getpid()}"):
        ClientFolder(tmp_path)
    with_it.close()
    ClientFolder(tmp_path).close()


def test_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state folder .*: File exists"):
        ClientFolder(tmp_path / "file" / "state")


def test_damaged_folder_is_unlocked(tmp_path):
    ClientFolder(tmp_path).close()
    (tmp_path / client_journal.NAME).write_bytes(b"nonsense")
    for _ in range(2):
        with pytest.raises(StoreFault):
            ClientFolder(tmp_path)


def test_closed_folder_refuses_changes(tmp_path):
    folder = ClientFolder(tmp_path)
    folder.close()
    folder.close()
    with pytest.raises(NotConnected):
        folder.record_read("news", 1)


def test_lower_read_position_is_not_written(tmp_path):
    folder = ClientFolder(tmp_path)
    folder.record_read("news", 5)
    size = (tmp_path / client_journal.NAME).stat().st_size
    for last in (5, 4):
        folder.record_read("news", last)
    assert (tmp_path / client_journal.NAME).stat().st_size == size
    folder.close()


def test_last_counter_is_followed_by_limit_reached(tmp_path):
    folder = ClientFolder(tmp_path)
    folder.record(EpochOpened(1, 2**64 - 2))
    assert folder.record_request("PUT", "news", b"").counter == 2**64 - 1
    folder.settle(RequestAnswered(2**64 - 1, 1, "", True))
    with pytest.raises(LimitReached, match="choose another id"):
        folder.record_request("PUT", "news", b"")
    folder.close()


def test_default_folders_differ_by_bus_and_id():
    home = {"HOME": "/home/me"}
    folders = {
        default_folder("tcp://127.0.0.1:6568", None, home),
        default_folder("tcp://127.0.0.1:6569", None, home),
        default_folder("tcp://127.0.0.1:6568", b"me", home),
        default_folder("tcp://127.0.0.1:6568", b"\\xff/../..", home),
    }
    assert len(folders) == 4
    assert {path.parent for path in folders} == {Path("/home/me/.local/state/polybus-pirate")}
    assert default_folder("x", None, {"XDG_STATE_HOME": "/s"}).parent == Path("/s/polybus-pirate")
    with pytest.raises(ConfigError):
        default_folder("x", None, {})


# --- kills

# The changes of a child, which notes each one when it is done.
CHANGES = """
for number in range(1, 31):
    folder.record(EpochOpened(number, folder.state.counter))
    note(b"opened %d" % number)
    request = folder.record_request("PUT", "news", b"x" * number)
    note(b"asked %d" % request.counter)
    folder.settle(RequestAnswered(request.counter, number, "", True))
    note(b"answered %d" % request.counter)
    folder.record_read("news", number)
    note(b"read %d" % number)
"""
CHILD = f"""
import os, sys
from pathlib import Path
from polybus.dialects.pirate.client import client_journal
from polybus.dialects.pirate.client.journal_state import EpochOpened, RequestAnswered
from polybus.dialects.pirate.client.state_folder import ClientFolder

client_journal.GROWTH_BYTES = 300  # rewritten often
folder = ClientFolder(Path(sys.argv[1]), b"me")
notes = os.open(sys.argv[1] + ".confirmed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(text):
    os.write(notes, text + b"\\n")
{CHANGES}
"""


def child(folder: Path, **env: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)],
        env=os.environ | PIRATE.environment | env,
        timeout=60,
    ).returncode


def confirmed(lines: str) -> dict[str, int]:
    """The last of each kind that the child knew to be done."""
    return {word: int(number) for word, number in map(str.split, lines.splitlines())}


def check(state: JournalState, done: dict[str, int], which: object = "") -> None:
    """Check that all confirmed events are there, and at most one more."""
    assert state.id == b"me", which
    last = state.lasts.get("news", 0)
    answered = state.outcome.counter if state.outcome else 0
    known = {"opened": state.epoch, "asked": state.counter, "answered": answered, "read": last}
    more = {word: known[word] - done.get(word, 0) for word in known}
    assert set(more.values()) <= {0, 1}, (which, more)
    assert sum(more.values()) <= 1, (which, more)
    assert state.pending is None or state.pending.body == b"x" * state.pending.counter, which
    assert (state.pending is None) == (state.counter == answered), which


@pytest.mark.parametrize("point", ["torn", "written", "kept", "rewritten", "renamed"])
def test_folder_killed_at_every_point_has_all_confirmed_events(tmp_path, point):
    for passings in (3,) if point in ("rewritten", "renamed") else (2, 47):
        folder = tmp_path / str(passings)
        assert child(folder, **killed_at(point, passings)) == -signal.SIGKILL, passings
        found = ClientFolder(folder, b"me")  # the lock ended with the process
        check(found.state, confirmed(Path(f"{folder}.confirmed").read_text()), passings)
        found.close()


def test_folder_killed_before_its_first_journal_gets_a_new_id(tmp_path):
    folder = tmp_path / "first"
    assert child(folder, **killed_at("rewritten")) == -signal.SIGKILL
    found = ClientFolder(folder)
    assert found.state.id != b"me"  # that id was never used
    found.close()


def test_child_without_a_kill_completes(tmp_path):
    folder = tmp_path / "whole"
    assert child(folder) == 0
    found = ClientFolder(folder)
    assert found.state.lasts == {"news": 30}
    found.close()
