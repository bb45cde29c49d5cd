"""Producers that fill a store with content that can be checked byte by byte.

The content of commit `counter` of producer `number` follows from these two numbers alone:
messages for several shards of two topics, sometimes through a stage, and two records with
the progress of the producer. So the last counter of each producer determines the content
of every shard, which `checker` compares.

In addition there is a ring: a topic whose messages contain their offsets and which is trimmed
near its end. Each acknowledgement is reported at once, as a line:

    a NUMBER COUNTER TOPIC SHARD OFFSET    a commit, and where its first messages stand
    d NUMBER COUNTER                       a repeat, whose first commit is stored
    t OFFSET                               the ring was trimmed up to here
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult, RecordChange
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.store.contract import Store

PRODUCERS = 4
TOPICS = {"wide": 4, "narrow": 1}
RING = "ring"
RING_PRODUCER = PRODUCERS  # its number, after the others
RING_STEP = 5  # messages per commit
RING_KEPT = 60
STAGED_EVERY = 9
IN_FLIGHT = 3

Report = Callable[[str], None]


class Piece(NamedTuple):
    topic: str
    shard: int
    bodies: tuple[bytes, ...]


def pieces(number: int, counter: int) -> list[Piece]:
    """Return the shards that a commit appends to, each at most once."""
    choices = random.Random(number << 32 | counter)
    shards = [(topic, shard) for topic, count in TOPICS.items() for shard in range(count)]
    chosen = choices.sample(shards, choices.randint(1, len(shards)))
    place, found = 0, []
    for topic, shard in sorted(chosen):
        count = choices.choice((1, 1, 2, 3, 9))
        bodies = tuple(body(number, counter, place + i, choices) for i in range(count))
        found.append(Piece(topic, shard, bodies))
        place += count
    return found


def body(number: int, counter: int, place: int, choices: random.Random) -> bytes:
    size = choices.choice((0, 10, 100, 100, 400, 3000))
    return b"%d %d %d " % (number, counter, place) + bytes([place % 251]) * size


def ring_bodies(counter: int) -> tuple[bytes, ...]:
    """Return the messages of a commit to the ring. Each contains its offset."""
    first = (counter - 1) * RING_STEP
    return tuple(b"%d" % (first + i) + bytes(200) for i in range(RING_STEP))


def block_of(bodies: Sequence[bytes]) -> Block:
    ends = array("i", [0])
    for body in bodies:
        ends.append(ends[-1] + len(body))
    return Block.from_columns(b"".join(bodies), ends, insertion_ms=1)


def progress_keys(number: int) -> tuple[bytes, bytes]:
    return b"progress/%d" % number, b"mirror/%d" % number


def prepare(store: Store) -> None:
    """Create missing topics and producers. A kill may have interrupted an earlier run here."""
    there = {topic.name for topic in store.topics()}
    for name, shards in {**TOPICS, RING: 1}.items():
        if name not in there:
            store.create(name, shards, {})
    for number in range(PRODUCERS + 1):
        if store.get(b"opened/%d" % number) is None:
            # After a kill between these two the epoch is raised again; the older one is unused.
            epoch = store.open_producer(name_of(number), ProducerOptions()).epoch
            change = RecordChange(b"opened/%d" % number, b"%d" % epoch)
            store.commit(Commit(changes=(change,))).result()


def name_of(number: int) -> str:
    return f"producer-{number}"


class Worker:
    """One producer. Starts after `acked`, even if later commits are stored."""

    def __init__(self, store: Store, number: int, acked: int, report: Report) -> None:
        self._store, self._number, self._report = store, number, report
        self._counter = acked
        self._topics = {topic.name: topic.number for topic in store.topics()}
        self._names = {number: name for name, number in self._topics.items()}
        opened = store.get(b"opened/%d" % number)
        assert opened is not None
        self._epoch = int(opened.value)
        self._waiting: deque[tuple[int, Future[CommitResult]]] = deque()

    def work(self, until: Callable[[], bool]) -> None:
        while not until():
            self._counter += 1
            self._waiting.append((self._counter, self._store.commit(self._commit())))
            if len(self._waiting) == IN_FLIGHT:
                self._settle()
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        counter, future = self._waiting.popleft()
        committed = future.result()
        if committed.duplicate:
            self._report(f"d {self._number} {counter}")
        span = committed.spans[0]
        place = f"{self._names[span.topic]} {span.shard} {span.first_offset}"
        self._report(f"a {self._number} {counter} {place}")
        if self._number == RING_PRODUCER:
            self._trim(counter)

    def _commit(self) -> Commit:
        found = list(self._appends())
        stamp = Stamp(name_of(self._number), self._epoch, self._counter)
        value = b"%d" % self._counter
        changes = tuple(RecordChange(key, value) for key in progress_keys(self._number))
        if self._counter % STAGED_EVERY:
            return Commit(tuple(found), changes=changes, stamp=stamp)
        stage = self._store.open_stage()
        self._store.stage(stage, found).result()
        return Commit(stages=(stage,), changes=changes, stamp=stamp)

    def _appends(self) -> Iterator[Append]:
        for topic, shard, bodies in self._pieces():
            yield Append(self._topics[topic], shard, block_of(bodies))

    def _pieces(self) -> list[Piece]:
        if self._number == RING_PRODUCER:
            return [Piece(RING, 0, ring_bodies(self._counter))]
        return pieces(self._number, self._counter)

    def _trim(self, counter: int) -> None:
        end = counter * RING_STEP
        if counter % 8 == 0 and end > RING_KEPT:
            self._store.trim(self._topics[RING], {0: end - RING_KEPT})
            self._report(f"t {end - RING_KEPT}")


def work(store: Store, acked: dict[int, int], report: Report, commits: int) -> None:
    """Run all producers at once until `commits` were submitted in total."""
    left = threading.Semaphore(commits)
    workers = [Worker(store, at, acked.get(at, 0), report) for at in range(PRODUCERS + 1)]
    with ThreadPoolExecutor(len(workers)) as pool:
        done = [
            pool.submit(each.work, lambda: not left.acquire(blocking=False)) for each in workers
        ]
    for future in done:
        future.result()
