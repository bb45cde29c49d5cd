"""Bit flips in the file of a store: acts for children of a `ChildServer`.

`flip_blocks` flips bits in stored blocks and in the heads of entries, and reads every message
on its own: each must be as written, or `Damaged` must name topic, shard and offset.
`flip_pages` flips bits anywhere in the file, including LMDB's pages. Reading such a file may
kill the process, so maintenance is tested instead, which must return a result in any case.
"""

from __future__ import annotations

import random
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from polybus.errors import Damaged, PolybusError
from polybus.kernel.blocks import MAGIC
from polybus.model.block import Block
from polybus.model.topic import ALL, Topic
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.store.lmdb import lmdb_store as _loaded_once_for_all_children  # noqa: F401
from polybus.store.lmdb import log_entry, verification
from polybus.store.lmdb import salvage as salvaging
from polybus.store.lmdb.log_entry import MAGIC as ENTRY_MAGIC
from tests.rig.store.checker import bodies_of, read_all
from tests.rig.store.workload import RING, RING_STEP, prepare, ring_bodies, work

HEAD_BYTES = 56  # of an entry, its checksum included
SIZE_AT = 24  # in a block's header

Written = dict[tuple[int, int, int], bytes]  # topic, shard, offset


def fill(folder: str, commits: int) -> None:
    """Create a store of some hundred messages, in blocks of all sizes."""
    with open_store(f"lmdb:{folder}") as store:
        prepare(store)
        work(store, {}, lambda line: None, commits)


def data_file(folder: Path) -> Path:
    (found,) = folder.glob("*/data.mdb")
    return found


def targets(data: bytes) -> list[range]:
    """Return the ranges of blocks and of the heads of entries, including unused copies.

    Partly overwritten copies are left out, because other data follows there.
    """
    found, at = [], data.find(MAGIC)
    while at >= 0:
        size = int.from_bytes(data[at + SIZE_AT : at + SIZE_AT + 4], "little")
        with suppress(Damaged):
            Block.open(data[at : at + size])
            found.append(range(at, at + size))
        at = data.find(MAGIC, at + 1)
    at = data.find(ENTRY_MAGIC)
    while at >= 0:
        with suppress(Damaged):
            log_entry.decode(memoryview(data)[at:])
            found.append(range(at, at + HEAD_BYTES))
        at = data.find(ENTRY_MAGIC, at + 1)
    return found


def flipped(data: bytes, where: range, choices: random.Random) -> bytes:
    """Return a copy with flipped bits within a range, most often one."""
    changed = bytearray(data)
    for _ in range(choices.choice((1, 1, 1, 2, 8))):
        changed[choices.choice(where)] ^= 1 << choices.randrange(8)
    return bytes(changed)


def flip_blocks(folder: str, seed: int, rounds: int) -> dict[str, Any]:
    choices, path = random.Random(seed), data_file(Path(folder))
    data, written = path.read_bytes(), everything(folder)
    places, judge = targets(data), Judge(written)
    for number in range(rounds):
        path.write_bytes(flipped(data, choices.choice(places), choices))
        judge.look(folder, f"round {number}")
    path.write_bytes(data)
    return {"damaged": judge.damaged, "right": judge.right, "faults": judge.faults}


def everything(folder: str) -> Written:
    with open_store(f"lmdb:{folder}", read_only=True) as store:
        return {
            (topic.number, shard, offset): body
            for topic in store.topics()
            for shard in topic.shards
            for offset, _, body in read_all(store, topic, shard)
        }


class Judge:
    """Counts right and damaged messages, and lists all others as faults."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self.right = self.damaged = 0
        self.faults: list[str] = []

    def look(self, folder: str, when: str) -> None:
        with open_store(f"lmdb:{folder}", read_only=True) as store:
            for topic in store.topics():
                for shard in topic.shards:
                    self._look_at(store, topic, shard, when)
                self._look_at_all(store, topic, when)

    def _look_at(self, store: Store, topic: Topic, shard: int, when: str) -> None:
        places = [place for place in self._written if place[:2] == (topic.number, shard)]
        for _, _, offset in places:
            try:
                rows = store.read(topic.number, shard, offset, offset + 1)
            except Damaged as error:
                self._name(topic.name, shard, offset, str(error), when)
                continue
            except Exception as error:
                self.faults.append(f"{when}: {topic.name}, {shard}, {offset}: {error!r}")
                continue
            if bodies_of(rows) == [self._written[topic.number, shard, offset]]:
                self.right += 1
            else:
                self.faults.append(f"{when}: a wrong message: {topic.name}, {shard}, {offset}")

    def _name(self, topic: str, shard: int, offset: int, text: str, when: str) -> None:
        """Check that an error names the offset of the message, or that of its block."""
        self.damaged += 1
        named = re.search(r"topic '(\S+)', shard (\d+), offset (\d+)", text)
        right = named and (named[1], int(named[2])) == (topic, shard) and int(named[3]) <= offset
        if not right:
            self.faults.append(f"{when}: does not say where ({topic}, {shard}, {offset}): {text}")

    def _look_at_all(self, store: Store, topic: Topic, when: str) -> None:
        wanted = {body for (number, _, _), body in self._written.items() if number == topic.number}
        try:
            found = [body for _, _, body in read_all(store, topic, ALL)]
        except Damaged:
            return
        except Exception as error:
            self.faults.append(f"{when}: {topic.name} read as a whole: {error!r}")
            return
        if not wanted.issuperset(found) or (topic.name != RING and len(found) < len(wanted)):
            self.faults.append(f"{when}: {topic.name} read as a whole is wrong")


# --- anywhere in the file


def flip_pages(source: str, folder: str, seed: int) -> None:
    """Copy a store and flip a few bits of one page, most often in its header."""
    choices, target = random.Random(seed), Path(folder)
    shutil.copytree(source, target)
    path = data_file(target)
    data = path.read_bytes()
    page = choices.randrange(len(data) // 4096) * 4096
    size = choices.choice((16, 64, 4096))
    path.write_bytes(flipped(data, range(page, page + size), choices))


def compare(source: str, folder: str) -> dict[str, Any]:
    """Count the right messages of a damaged store. Reading it may kill the process."""
    judge = Judge(everything(source))
    try:
        judge.look(folder, "direct")
    except PolybusError as error:
        judge.faults.append(f"cannot be read: {error}")
    return {"right": judge.right, "harmed": bool(judge.faults or judge.damaged)}


def verify(folder: str) -> list[str]:
    """Return the faults that `verify` reports; a refusal counts as a fault."""
    try:
        report = verification.verify(Path(folder))
    except PolybusError as error:
        return [f"{type(error).__name__}: {error}"]
    return list(report.faults)


def salvage(source: str, folder: str, rescued: str) -> dict[str, int]:
    """Return how many written messages were salvaged, and how many are wrong.

    Trimmed messages may reappear, as documented: they are not counted, but must be right.
    """
    written = everything(source)
    salvaging.salvage(Path(folder), Path(rescued))
    saved = everything(rescued)
    kept = sum(saved.get(place) == body for place, body in written.items())
    strange = {place for place, body in saved.items() if written.get(place, body) != body}
    with open_store(f"lmdb:{source}", read_only=True) as store:
        (ring,) = (topic.number for topic in store.topics() if topic.name == RING)
    for place in saved.keys() - written.keys():
        topic, _, offset = place
        step, at = divmod(offset, RING_STEP)
        if topic != ring or saved[place] != ring_bodies(step + 1)[at]:
            strange.add(place)
    return {"kept": kept, "written": len(written), "wrong": len(strange)}
