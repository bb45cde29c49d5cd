"""What the checks are written with: an engine to open, short verbs, and what is there.

Checks run without pytest, so a refusal is caught by `refused`, which also wants to see
that nothing was changed by what was refused.
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

TIMEOUT_S = 30.0  # nothing here takes long: an engine that needs more has lost something

T = TypeVar("T")


class Clock:
    """A wall clock that goes when it is told to."""

    def __init__(self, ns: int = 1_000) -> None:
        self.ns = ns

    def __call__(self) -> int:
        return self.ns


@dataclass(frozen=True)
class Engine:
    """What an engine gives to be checked.

    `open` makes a new, empty store that takes its time from the clock; `reopen` closes
    a store and opens what is left of it, None if nothing ever is.
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
    """A new stage with these."""
    name = store.open_stage()
    store.stage(name, appends).result(TIMEOUT_S)
    return name


def producer(store: Store, dense: bool = True, kept_results: int = 16) -> Callable[..., Stamp]:
    """Opens producer "p"; gives stamps of the new epoch by their counter."""
    epoch = store.open_producer("p", ProducerOptions(dense, kept_results)).epoch

    def stamp(counter: int, digest: bytes = b"") -> Stamp:
        return Stamp("p", epoch, counter, digest)

    return stamp


# --- what is there


def shard_messages(store: Store, topic: Topic, shard: int) -> list[Message]:
    """All that a shard has, read from its start to its end."""
    at, found = store.bounds(topic.number).shards[shard].start, list[Message]()
    while rows := messages(store.read(topic.number, shard, at)):
        found += rows
        at = rows[-1].offset + 1
    return found


def all_messages(store: Store, topic: Topic) -> list[Message]:
    """All that a topic has, in the order of its ids."""
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
    """Everything that can be seen of a store."""

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
    """What is done within must raise this very error, and leave the store as it was."""
    before = contents(store) if store else None
    try:
        yield
    except PolybusError as error:
        caught: PolybusError | None = error
    else:
        caught = None
    # Of usage errors there are kinds, which say the same in other words.
    right = isinstance(caught, wanted) if wanted is UsageError else type(caught) is wanted
    assert right, f"expected {wanted.__name__}, not {caught!r}"
    assert before is None or store is None or contents(store) == before
