"""`polybus store` on real stores: the effect, output and exit code of each command.

Commands run in the test's process, as `polybus` runs them; one test starts a process.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from polybus.cli import main
from polybus.store.engine_registry import open_store
from polybus.testing.bus_process import POLYBUS, clean_environment, run
from tests.unit.cli.stores import append, body, contents, damage, held, make_store, spoil_format

ORDERS = [body("orders", number) for number in range(300)]
EVENTS = [body("events", number) for number in range(4)]
SMALL = 16 * 1024  # bytes
ALL_OF_IT = {"events": EVENTS, "orders": ORDERS}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


def call(*args: str | Path) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main.run(["store", *map(str, args)])
    return Done(code, out.getvalue(), err.getvalue())


def polybus(*args: str | Path, code: int = 0) -> str:
    """Return the command's stdout. Its stderr must be empty."""
    done = call(*args)
    assert (done.code, done.stderr) == (code, ""), done
    return done.stdout


def complaint(*args: str | Path) -> str:
    """Return the one error line of a command that fails."""
    done = call(*args)
    assert (done.code, done.stdout) == (2, ""), done
    assert done.stderr.startswith("polybus: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("polybus: ").rstrip("\n")


# --- info


def test_command_runs_as_a_separate_process(store, tmp_path):
    done = run("store", "info", str(store), env=clean_environment(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == polybus("info", store)
    damage(store, body("orders", 142))
    done = run("store", "verify", str(store), env=clean_environment(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 fault found" in done.stdout


def test_info_lists_topics(store):
    lines = polybus("info", f"lmdb:{store}").splitlines()
    assert lines[0].startswith(f"{store}: ")
    assert lines[0].endswith("; no owner")
    assert lines[1].split() == ["topic", "shards", "messages", "bytes", "next", "id"]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["events", "4", "4"],
        ["orders", "1", "300"],
    ]


def test_info_as_json(store):
    found = json.loads(polybus("info", store, "--json"))
    events, orders = found["topics"]
    assert orders["name"] == "orders"
    assert orders["settings"] == {"keep": "all"}
    assert (orders["first_id"], orders["next_id"], orders["messages"]) == (1, 301, 300)
    assert [shard["end"] for shard in events["shards"]] == [1, 1, 1, 1]
    assert found["file"]["file_bytes"] >= found["file"]["used_bytes"] > 0
    assert found["file"]["owner_pid"] is None


def test_info_names_the_owner(store):
    with held(store) as pid:
        assert f"owned by pid {pid}" in polybus("info", store)


def test_info_of_an_empty_store(tmp_path):
    open_store(f"lmdb:{tmp_path / 'new'}").close()
    assert polybus("info", tmp_path / "new").splitlines()[1:] == ["no topics"]


# --- which store


def test_data_folder_of_a_bus_names_its_store(tmp_path):
    make_store(tmp_path / "data" / "store")
    found = json.loads(polybus("info", tmp_path / "data", "--json"))
    assert found["store"] == str(tmp_path / "data" / "store")


def test_folder_without_a_store_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert complaint("info", tmp_path).startswith(f"no store in {tmp_path}; give ")
    missing = tmp_path / "missing"
    assert complaint("verify", missing).startswith(f"{missing}: no such folder; ")
    assert complaint("verify", tmp_path / "file").startswith(f"{tmp_path / 'file'}: no such folder")
    for url in ("memory:", "polybus://127.0.0.1:6570"):
        assert complaint("verify", url) == f"{url} has no files; give lmdb:PATH or a folder"


def test_store_of_another_format_is_refused(store, tmp_path):
    spoil_format(store)
    assert "format" in complaint("info", store)
    assert "format" in complaint("verify", store)
    assert "format" in complaint("compact", store)
    assert "format" in complaint("backup", store, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# --- verify and salvage


def test_verify_of_an_intact_store(store):
    said = polybus("verify", store)
    assert said.startswith("no damage: 304 messages in 7 blocks, ")
    found = json.loads(polybus("verify", store, "--json"))
    assert (found["messages"], found["blocks"], found["topics"]) == (304, 7, 2)
    assert (found["faults"], found["fault_count"]) == ([], 0)


def test_verify_names_the_damaged_block(store):
    damage(store, body("orders", 142))
    *faults, summary = polybus("verify", store, code=1).splitlines()
    assert len(faults) == 1
    assert all(word in faults[0] for word in ("orders", "shard 0", "100"))
    assert summary.startswith("1 fault found; intact: 204 messages in 6 blocks, ")
    assert json.loads(polybus("verify", store, "--json", code=1))["fault_count"] == 1


def test_verify_beside_the_owner(store):
    with held(store):
        assert polybus("verify", store).startswith("no damage: 304 messages")


def test_salvage_keeps_intact_messages(store, tmp_path):
    damage(store, body("orders", 142))
    lost, saved = polybus("salvage", store, tmp_path / "saved", code=1).splitlines()
    assert lost == "lost: topic 'orders', shard 0: offsets 100 to 199"
    assert saved.startswith(f"salvaged into {tmp_path / 'saved'}: 204 messages of 2 topics, ")
    gap, _ = polybus("verify", tmp_path / "saved", code=1).splitlines()
    assert gap == "topic 'orders', shard 0, offset 100: no entries up to 200"
    assert contents(tmp_path / "saved") == {"events": EVENTS, "orders": ORDERS[:100] + ORDERS[200:]}


def test_salvage_needs_nothing_but_the_data_file(store, tmp_path):
    (store / "CURRENT").unlink()
    polybus("salvage", store, tmp_path / "saved")
    assert contents(tmp_path / "saved") == ALL_OF_IT


def test_salvage_of_an_owned_store_is_refused(store, tmp_path):
    with held(store) as pid:
        assert f"in use (pid {pid})" in complaint("salvage", store, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_salvage_of_an_intact_store_is_a_copy(store, tmp_path):
    found = json.loads(polybus("salvage", store, tmp_path / "saved", "--json"))
    assert (found["messages"], found["lost"]) == (304, [])
    assert contents(tmp_path / "saved") == ALL_OF_IT


# --- backup, restore


def test_backup_beside_the_owner_and_restore(store, tmp_path):
    copy, again = tmp_path / "copy", tmp_path / "again"
    with held(store):
        said = polybus("backup", f"lmdb:{store}", copy)
    assert said.startswith(f"backed up {store} into {copy}: ")
    assert contents(copy) == ALL_OF_IT
    with open_store(f"lmdb:{store}") as live:
        append(live, "orders", 0, 300, 1)
    assert polybus("restore", copy, again).startswith(f"restored {copy} into {again}: ")
    assert contents(again) == ALL_OF_IT


def test_restored_store_takes_commits(store, tmp_path):
    polybus("backup", store, tmp_path / "copy")
    polybus("restore", tmp_path / "copy", tmp_path / "again")
    with open_store(f"lmdb:{tmp_path / 'again'}") as again:
        append(again, "orders", 0, 300, 1)
    assert contents(tmp_path / "again")["orders"] == [*ORDERS, body("orders", 300)]


@pytest.mark.parametrize("verb", ["backup", "restore", "salvage"])
def test_unusable_target_is_refused(verb, store, tmp_path):
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "something").touch()
    file.touch()
    assert f"{full} is not empty" in complaint(verb, store, full)
    assert f"{file} is not a folder" in complaint(verb, store, file)
    nowhere = tmp_path / "no" / "where"
    assert f"there is no folder {nowhere.parent}" in complaint(verb, store, nowhere)
    assert complaint(verb, store, "/proc/copy").startswith("/proc/copy: ")
    assert [path.name for path in full.iterdir()] == ["something"]


@pytest.mark.parametrize("verb", ["backup", "restore", "salvage", "compact"])
def test_full_disk_leaves_no_copy(verb, store, tmp_path):
    """Stood in for by a limit on the size of files, which anyone may set for himself."""
    to = [] if verb == "compact" else [str(tmp_path / "copy")]
    done = subprocess.run(
        [*POLYBUS, "store", verb, str(store), *to],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("polybus: the store has no room: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "copy").exists()
    assert contents(store) == ALL_OF_IT


def test_backup_into_an_empty_folder(store, tmp_path):
    (tmp_path / "empty").mkdir()
    polybus("backup", store, tmp_path / "empty")
    assert contents(tmp_path / "empty") == ALL_OF_IT


# --- compact


def test_compact_frees_space(store):
    with open_store(f"lmdb:{store}") as live:
        live.create("large", 1, {})
        for first in range(0, 20_000, 2000):
            append(live, "large", 0, first, 2000)
        live.drop("large")
    found = json.loads(polybus("compact", store, "--json"))
    assert found["after_bytes"] < found["before_bytes"] / 2
    assert contents(store) == ALL_OF_IT
    assert polybus("verify", store).startswith("no damage: 304 messages")


def test_compact_of_an_owned_store_asks_the_bus(store, tmp_path):
    with held(store) as pid:
        said = complaint("compact", store, "--admin", tmp_path / "admin.sock")
    assert f"pid {pid}" in said
    assert "no bus answers" in said
    assert contents(store) == ALL_OF_IT
