"""Readers that are killed or stopped beside a busy writer: acts for a `ChildServer`.

The writer appends and trims, so its file reaches a size and stays there, because freed pages
are reused unless a reader pins them. The tests compare the size before and after.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polybus.model.commit import Append, Commit
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.store.lmdb import lmdb_store as _loaded_once_for_all_children  # noqa: F401
from polybus.store.lmdb.store_files import StoreFiles
from tests.rig.fork_server import AnsweringChild, ChildServer
from tests.rig.store.checker import bodies_of
from tests.rig.store.workload import block_of

TOPIC = "turned-over"
MESSAGES = 20
BODY_BYTES = 4000
KEPT = 400  # messages
SETTLE_TURNS = 100  # until the file no longer grows
TURNS = 450  # they write several times the size of the file


class Turner:
    """The writer. Each message contains its offset."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, Path(folder)
        names = {topic.name: topic for topic in store.topics()}
        topic = names.get(TOPIC) or store.create(TOPIC, 1, {})
        self.topic = topic.number
        self._end = store.bounds(self.topic).shards[0].end

    def turn(self, turns: int) -> int:
        """Append and trim `turns` times. Returns the size of the file."""
        for _ in range(turns):
            bodies = [body(self._end + i) for i in range(MESSAGES)]
            append = Append(self.topic, 0, block_of(bodies))
            self._store.commit(Commit((append,))).result()
            self._end += MESSAGES
            self._store.trim(self.topic, {0: max(0, self._end - KEPT)})
        return sum(file.stat().st_size for file in self._folder.glob("*/data.mdb"))


def body(offset: int) -> bytes:
    return b"%d " % offset + bytes([offset % 251]) * BODY_BYTES


@contextmanager
def turning(folder: str) -> Iterator[tuple[Turner, ChildServer, int]]:
    """Yield the writer of a store whose file no longer grows, and a server for readers."""
    with ChildServer(__name__) as server, open_store(f"lmdb:{folder}") as store:
        turner = Turner(store, folder)
        yield turner, server, turner.turn(SETTLE_TURNS)


# --- killed readers


def killed_readers(folder: str, kills: int) -> dict[str, Any]:
    """Kill readers at random places of their loop, and the last one within a read."""
    read, wrong = 0, []
    with turning(folder) as (turner, server, before):
        for number in range(kills):
            report = Path(f"{folder}.reader{number}")
            child = server.start("read_in_a_loop", folder, str(report))
            await_file(report, child)
            turner.turn(3)
            child.kill()
            ended = child.wait()
            wrong += [ended.failure] if ended.failure else []
            read += len(report.read_bytes())
        died = server.run("die_reading", folder)
        after = turner.turn(TURNS)
    return {"before": before, "after": after, "read": read, "wrong": wrong, "died": died.signal}


def read_in_a_loop(folder: str, report: str) -> None:
    """Read until killed, at most a minute, and check each message. Writes a byte per read."""
    ends = time.monotonic() + 60
    said = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open_store(f"lmdb:{folder}", read_only=True) as store:
        topic = next(topic for topic in store.topics() if topic.name == TOPIC).number
        while time.monotonic() < ends:
            read_once(store, topic)
            os.write(said, b".")


def read_once(store: Store, topic: int) -> list[bytes]:
    rows = store.read(topic, "all", 0)
    found = bodies_of(rows)
    offsets = memoryview(rows.offsets).cast("B").cast("q")
    assert found == [body(offset) for offset in offsets]
    return found


def die_reading(folder: str) -> None:
    """Kill this process while a read transaction is open."""
    with StoreFiles(Path(folder), read_only=True).snapshot() as transaction:
        assert transaction.stat()["entries"] > 0
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


# --- stopped readers


def slow_readers(folder: str) -> dict[str, Any]:
    """Stop two readers after a read: one in another process, one in the writer's."""
    report = Path(f"{folder}.reader")
    with turning(folder) as (turner, server, before):
        child = server.start("read_and_wait", folder, str(report))
        await_file(report, child)
        with open_store(f"lmdb:{folder}", read_only=True) as store:
            rows = store.read(turner.topic, "all", 0)
            kept = [bytes(rows.bodies), bytes(rows.offsets)]
            after = turner.turn(TURNS)
            same = kept == [bytes(rows.bodies), bytes(rows.offsets)]
        child.kill(signal.SIGTERM)
        ended = child.wait()
    return {"before": before, "after": after, "same": same, "changed": ended.answer}


def read_and_wait(folder: str, report: str) -> bool | None:
    """Read some rows and wait for SIGTERM. Returns True if the rows have changed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with open_store(f"lmdb:{folder}", read_only=True) as store:
        topic = next(topic for topic in store.topics() if topic.name == TOPIC).number
        rows = store.read(topic, "all", 0, max_rows=50)
        before = bytes(rows.bodies)
        Path(report).write_bytes(b"reading")
        signal.sigwait({signal.SIGTERM})
        return before != bytes(rows.bodies)


def await_file(path: Path, child: AnsweringChild) -> None:
    """Wait until the child has written to a file. Fails if the child ends first."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size):
        assert not child.has_ended, "the reader has ended"
        assert time.monotonic() < deadline, "the reader does not read"
        time.sleep(0.001)
