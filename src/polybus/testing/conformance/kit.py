"""Helpers of the checks: the engine under test, short verbs, and the contents of a store.

Checks run without pytest. `refused` expects an error and checks that the refused request
changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from polybus.errors import PolybusError, UsageError
from polybus.model.commit import Append, Commit, CommitResult, RecordChange, StoredRecord
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.model.topic import ALL, Bounds, Topic
from polybus.store.contract import Store
from polybus.testing.conformance.sample_blocks import Message, block, messages

TIMEOUT_S = 30.0  # a request that takes longer was lost

T = TypeVar("T")


class Clock:
    """A wall clock that the check sets."""

    def __init__(self, ns: int = 1_000) -> None:
        self.ns = ns

    def __call__(self) -> int:
        return self.ns


@dataclass(frozen=True)
class Engine:
    """An engine under test.

    `open` creates an empty store that takes the time from the given clock. `reopen` closes a
    store and opens it again; None if the engine does not persist data.
    """

    open: Callable[[Callable[[], int]], Store]
    reopen: Callable[[Store], Store] | None = None

    def fresh(self) -> Store:
        return self.open(Clock())


Check = Callable[[Engine], None]


# --- short verbs


def append(topic: Topic, shard: int, *bodies: bytes) -> Append:
    return Append(topic.number, shard, block(*bodies))


def put(
    store: Store,
    *appends: Append,
    stages: Sequence[str] = (),
    changes: Sequence[RecordChange] = (),
    stamp: Stamp | None = None,
    note: bytes = b"",
) -> CommitResult:
    commit = Commit(tuple(appends), tuple(stages), tuple(changes), stamp, note)
    return store.commit(commit).result(TIMEOUT_S)


def stage(store: Store, *appends: Append) -> str:
    """Open a stage with these appends and return its name."""
    name = store.open_stage()
    store.stage(name, appends).result(TIMEOUT_S)
    return name


def producer(store: Store, dense: bool = True, kept_results: int = 16) -> Callable[..., Stamp]:
    """Open producer "p". Returns a function from a counter to a stamp of the new epoch."""
    epoch = store.open_producer("p", ProducerOptions(dense, kept_results)).epoch

    def stamp(counter: int, digest: bytes = b"") -> Stamp:
        return Stamp("p", epoch, counter, digest)

    return stamp


# --- contents


def shard_messages(store: Store, topic: Topic, shard: int) -> list[Message]:
    """Return all messages of a shard."""
    at, found = store.bounds(topic.number).shards[shard].start, list[Message]()
    while rows := messages(store.read(topic.number, shard, at)):
        found += rows
        at = rows[-1].offset + 1
    return found


def all_messages(store: Store, topic: Topic) -> list[Message]:
    """Return all messages of a topic, in the order of their ids."""
    at, found = 0, list[Message]()
    while rows := messages(store.read(topic.number, ALL, at)):
        found += rows
        at = rows[-1].id + 1
    return found


def bodies(store: Store, topic: Topic, shard: int = 0) -> list[bytes]:
    return [message.body for message in shard_messages(store, topic, shard)]


def all_bodies(store: Store, topic: Topic) -> list[bytes]:
    return [message.body for message in all_messages(store, topic)]


@dataclass(frozen=True)
class Contents:
    """Everything that a reader can see of a store."""

    topics: list[Topic]
    bounds: list[Bounds]
    messages: list[list[Message]]
    records: list[StoredRecord]


def contents(store: Store) -> Contents:
    topics = store.topics()
    return Contents(
        topics,
        [store.bounds(topic.number) for topic in topics],
        [all_messages(store, topic) for topic in topics],
        store.scan(b""),
    )


@contextmanager
def refused(wanted: type[PolybusError], store: Store | None = None) -> Generator[None]:
    """Expect exactly this error from the block, and an unchanged store."""
    before = contents(store) if store else None
    try:
        yield
    except PolybusError as error:
        caught: PolybusError | None = error
    else:
        caught = None
    # A subclass of UsageError is as good: an engine may be more specific.
    is_expected = isinstance(caught, wanted) if wanted is UsageError else type(caught) is wanted
    assert is_expected, f"expected {wanted.__name__}, got {caught!r}"
    assert before is None or store is None or contents(store) == before
