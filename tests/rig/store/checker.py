"""Checks that a store holds everything that `workload` wrote: once, in order, complete.

`check(store, reports)` compares every shard with its expected content, byte by byte, and
returns a sentence per fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from tests.rig.store.workload import (
    PRODUCERS,
    RING,
    RING_PRODUCER,
    RING_STEP,
    TOPICS,
    pieces,
    progress_keys,
    ring_bodies,
)

if TYPE_CHECKING:
    from polybus.model.rows import Rows
    from polybus.model.topic import All, Topic
    from polybus.store.contract import Store

Shard = tuple[str, int]
Found = dict[Shard, list[tuple[int, int, bytes]]]  # offset, id, body


@dataclass
class Reported:
    """The acknowledgements that earlier runs of the workload reported."""

    acked: dict[int, int] = field(default_factory=dict)  # last counter of each producer
    places: dict[tuple[int, int], tuple[Shard, int]] = field(default_factory=dict)
    trimmed: int = 0
    duplicates: int = 0

    @classmethod
    def of(cls, lines: Iterable[str]) -> Reported:
        found = cls()
        for line in lines:
            found.add(*line.split())
        return found

    def add(self, kind: str, *words: str) -> None:
        if kind == "a":
            number, counter, topic, shard, offset = words
            self.acked[int(number)] = max(self.acked.get(int(number), 0), int(counter))
            self.places[int(number), int(counter)] = (topic, int(shard)), int(offset)
        elif kind == "t":
            self.trimmed = max(self.trimmed, int(words[0]))
        elif kind == "d":
            self.duplicates += 1


def bodies_of(rows: Rows) -> list[bytes]:
    ends = memoryview(rows.body_offsets).cast("B").cast("i")
    return [bytes(rows.bodies[ends[i] : ends[i + 1]]) for i in range(rows.count)]


def int64s(column: bytes | memoryview) -> Sequence[int]:
    return memoryview(column).cast("B").cast("q")


def read_all(store: Store, topic: Topic, shard: int | All) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, id and body of all messages, in order."""
    start = store.bounds(topic.number).shards[shard].start if isinstance(shard, int) else 0
    while (rows := store.read(topic.number, shard, start, max_rows=1000)).count:
        offsets, ids = int64s(rows.offsets), int64s(rows.ids)
        yield from zip(offsets, ids, bodies_of(rows), strict=True)
        start = (offsets if isinstance(shard, int) else ids)[-1] + 1


def check(store: Store, reported: Reported, *, strict: bool = True) -> list[str]:
    """Return the faults. If not `strict`, any prefix of whole commits is accepted."""
    topics = {topic.name: topic for topic in store.topics()}
    if any(name not in topics for name in (*TOPICS, RING)):
        return ["topics are missing"] if reported.acked and strict else []
    far = {number: progress(store, number) for number in range(PRODUCERS + 1)}
    faults = [f"producer {number}: its records disagree" for number in far if far[number] is None]
    stored = {number: count or 0 for number, count in far.items()}
    if strict:
        faults += missing(stored, reported)
    found = {
        (name, shard): list(read_all(store, topics[name], shard))
        for name, shards in TOPICS.items()
        for shard in range(shards)
    }
    faults += check_shards(found, stored)
    faults += check_places(found, reported if strict else Reported())
    faults += check_ids(store, topics, found)
    faults += check_ring(store, topics[RING], stored[RING_PRODUCER], reported, strict)
    return faults


def progress(store: Store, number: int) -> int | None:
    """Return the stored commits of a producer by its records, None if these disagree."""
    records = [store.get(key) for key in progress_keys(number)]
    values = {record.value if record else b"0" for record in records}
    return int(values.pop()) if len(values) == 1 else None


def missing(stored: dict[int, int], reported: Reported) -> list[str]:
    return [
        f"producer {number}: {counter} commits acknowledged, {stored[number]} there"
        for number, counter in reported.acked.items()
        if stored[number] < counter
    ]


def check_shards(found: Found, stored: dict[int, int]) -> list[str]:
    faults = []
    for where, rows in found.items():
        faults += dense(f"{where}: offsets", [offset for offset, _, _ in rows], 0)
    for (where, number), wanted in expected(stored).items():
        prefix = b"%d " % number
        have = [body for _, _, body in found[where] if body.startswith(prefix)]
        faults += compare(f"{where}, producer {number}", have, wanted)
    return faults


def check_places(found: Found, reported: Reported) -> list[str]:
    """Return faults of commits that are not at their acknowledged offsets."""
    faults = []
    for (number, counter), (where, offset) in reported.places.items():
        here = found.get(where, [])[offset : offset + 1]
        if where in found and not (here and here[0][2].startswith(b"%d %d " % (number, counter))):
            faults.append(f"{where}: commit {number}/{counter} is not at its offset {offset}")
    return faults


def expected(stored: dict[int, int]) -> dict[tuple[Shard, int], list[bytes]]:
    wanted: dict[tuple[Shard, int], list[bytes]] = {
        ((name, shard), number): []
        for name, shards in TOPICS.items()
        for shard in range(shards)
        for number in range(PRODUCERS)
    }
    for number in range(PRODUCERS):
        for counter in range(1, stored[number] + 1):
            for topic, shard, bodies in pieces(number, counter):
                wanted[(topic, shard), number] += bodies
    return wanted


def compare(what: str, have: list[bytes], wanted: list[bytes]) -> list[str]:
    if have == wanted:
        return []
    places = range(min(len(have), len(wanted)))
    first = next((i for i in places if have[i] != wanted[i]), len(places))
    near = [bodies[first : first + 1] for bodies in (have, wanted)]
    words = [body[0][:20] if body else b"(nothing)" for body in near]
    return [f"{what}: {len(have)} of {len(wanted)}; {words[0]!r} for {words[1]!r}, no. {first}"]


def dense(what: str, numbers: list[int], first: int) -> list[str]:
    if numbers == list(range(first, first + len(numbers))):
        return []
    return [f"{what} are not dense: {numbers[:5]} … {numbers[-5:]}"]


def check_ids(store: Store, topics: dict[str, Topic], found: Found) -> list[str]:
    """A read of all shards must return every id once, and the messages of the shards."""
    faults = []
    for name in TOPICS:
        rows = list(read_all(store, topics[name], "all"))
        faults += dense(f"{name}: ids", [number for _, number, _ in rows], 1)
        shards = [rows for (topic, _), rows in found.items() if topic == name]
        if sorted(chain(*shards), key=lambda row: row[1]) != rows:
            faults.append(f"{name}: read as a whole it is not what its shards hold")
    return faults


def check_ring(
    store: Store, topic: Topic, commits: int, reported: Reported, strict: bool
) -> list[str]:
    bounds = store.bounds(topic.number).shards[0]
    faults = []
    if bounds.end != commits * RING_STEP:
        faults.append(f"ring: ends at {bounds.end} after {commits} commits")
    if strict and bounds.start < reported.trimmed:
        faults.append(f"ring: starts at {bounds.start}, was trimmed to {reported.trimmed}")
    rows = list(read_all(store, topic, 0))
    faults += dense("ring: offsets", [offset for offset, _, _ in rows], bounds.start)
    wanted = [body for counter in range(1, commits + 1) for body in ring_bodies(counter)]
    return faults + compare("ring", [body for _, _, body in rows], wanted[bounds.start :])
