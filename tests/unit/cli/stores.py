"""Small real stores for the tests of `polybus store`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polybus.model.commit import Append, Commit
from polybus.model.topic import ALL
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.testing.conformance.sample_blocks import block, messages

# Opens the store, prints a line, and holds the store until its input ends.
HOLDER = """
import sys
from polybus.store.engine_registry import open_store
with open_store(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


def body(topic: str, number: int) -> bytes:
    """A content that is found in the file by searching for it."""
    return f"<{topic} message {number:06d}>".encode() * 4


def append(store: Store, name: str, shard: int, first: int, count: int) -> None:
    (topic,) = (topic for topic in store.topics() if topic.name == name)
    bodies = [body(name, first + at) for at in range(count)]
    store.commit(Commit(appends=(Append(topic.number, shard, block(*bodies)),))).result()


def make_store(folder: Path) -> Path:
    """`orders` with 300 messages in three blocks, `events` with one message in each of 4 shards."""
    with open_store(f"lmdb:{folder}") as store:
        store.create("orders", 1, {"keep": "all"})
        store.create("events", 4, {})
        for first in (0, 100, 200):
            append(store, "orders", 0, first, 100)
        for shard in range(4):
            append(store, "events", shard, shard, 1)
    return folder


def contents(folder: Path) -> dict[str, list[bytes]]:
    """Return all bodies of a store, by topic, in the order of ids."""
    with open_store(f"lmdb:{folder}", read_only=True) as store:
        return {topic.name: _bodies(store, topic.number) for topic in store.topics()}


def _bodies(store: Store, topic: int) -> list[bytes]:
    return [message.body for message in messages(store.read(topic, ALL, 0))]


def damage(folder: Path, needle: bytes) -> None:
    """Change one byte of a stored message, as a failing disk would."""
    for path in (path for path in folder.rglob("data.mdb")):
        data = bytearray(path.read_bytes())
        at = data.find(needle)
        assert at >= 0, f"{needle!r} is not in {path}"
        while at >= 0:
            data[at] ^= 0x40
            at = data.find(needle)
        path.write_bytes(data)


def spoil_format(folder: Path) -> None:
    """Change the format number, as if a later version had written the store."""
    current = folder / "CURRENT"
    title, generation = current.read_text().splitlines()
    current.write_text(f"{title.rpartition(' ')[0]} 99\n{generation}\n")


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Hold the store open in another process. Yields its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"lmdb:{folder}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child.pid
