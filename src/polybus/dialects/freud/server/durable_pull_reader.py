"""Pull readers of durable topics: subscriptions with a position in the log.

Such a reader is a PullReader whose unread messages are fetched from the log, at most
AHEAD_MESSAGES ahead of its Gets, so taking, confirming and giving back work as for every
reader. Fetched messages are charged to its user; messages still in the log are not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from polybus.bus.quotas import BYTES
from polybus.dialects.freud.server.ephemeral_delivery import find_fitting
from polybus.dialects.freud.server.pull_reader import PullReader
from polybus.dialects.freud.server.unread_queue import Chunk, Range
from polybus.durable.push_readers import LogCursor

if TYPE_CHECKING:
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.server.detached_readers import DetachedReaders
    from polybus.durable.push_readers import PushReaders
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.identity import Identity
    from polybus.model.rows import Rows
    from polybus.model.topic import Topic

# Fetched at once, which is also the most that is held in memory for one reader.
AHEAD_MESSAGES = 1024


class DurablePullReader(PullReader):
    """A subscription that reads the log of `topic`. `fetch` requests more messages."""

    def __init__(self, reader_id: bytes, identity: Identity, topic: Topic) -> None:
        super().__init__(reader_id, identity, None)
        self.topic = topic
        self.fetch: Callable[[], None] = lambda: None
        self.has_more: Callable[[], bool] = lambda: False
        self.on_end: Callable[[], None] = lambda: None

    @property
    def topic_name(self) -> bytes:
        return self.topic.name.encode()

    @property
    def is_behind(self) -> bool:
        """True if the log has messages that were not fetched."""
        return not self.gone and self.has_more()

    def wait(self, wake: Callable[[], None], *, polls: bool = False) -> None:
        super().wait(wake, polls=polls)
        if self.is_behind:
            self.fetch()

    def end(self) -> int:
        """End the subscription. Its unread messages stay in the log."""
        self.on_end()
        return super().end()


class PullCursor(LogCursor):
    """The position of one reader in the log, and its fetches."""

    def __init__(
        self,
        push_readers: PushReaders,
        durable: DurableTopics,
        quotas: Quotas,
        detached: DetachedReaders,
        reader: DurablePullReader,
    ) -> None:
        super().__init__(push_readers, reader.topic, durable.next_id(reader.topic))
        self._durable = durable
        self._quotas = quotas
        self._detached = detached
        self._reader = reader
        self._is_ended = False  # the topic was dropped: rows that arrive later are ignored
        self.is_over_quota = False  # the user's quota has no room: tick() tries again
        reader.fetch = self.read_next
        reader.has_more = self.has_more

    def has_more(self) -> bool:
        return not self._is_ended and self.at_id < self._durable.next_id(self.topic)

    def end(self) -> None:
        self._is_ended = True

    def until(self) -> int | None:
        """Return the end of the next fetch, or the current position for none.

        The end of the log is not consulted: a wake-up may precede the registry's update.
        """
        if self._reader.gone or self._is_ended or self.is_over_quota:
            return self.at_id
        return self.at_id + AHEAD_MESSAGES

    def wants_more(self) -> bool:
        return bool(self._reader.waiters)

    def on_empty(self, until: int | None) -> None:
        """The rows were trimmed, or are not committed yet: skip the trimmed ones."""
        end = min(until or 0, self._durable.next_id(self.topic))
        self.at_id = max(self.at_id, end)
        if not self.has_more():
            self._reader.wake_polls()

    def on_rows(self, rows: Rows) -> None:
        for run in _runs(rows):
            if self._reader.gone or self._is_ended:
                return
            fit = self._charge_fitting(run)
            if len(fit):
                self._reader.put(fit)
            self.at_id = run.first_id + len(fit)
            if len(fit) < len(run):
                self.is_over_quota = True
                break
        self._reader.wake()
        if self.is_over_quota:
            self._reader.wake_polls()

    def _charge_fitting(self, run: Range) -> Range:
        """Charge and return the longest prefix that the user's quota has room for."""
        reader = self._reader
        if self._quotas.charge(reader.identity, BYTES, run.size, trial=True):
            return run
        # Detached readers make room for the next message, and not for those fetched ahead.
        self._detached.make_room(reader.identity, run.sizes()[0])
        if reader.gone:
            return Range(run.chunk, 0, 0)
        fit = find_fitting(run, self._quotas.room(reader.identity, BYTES), len(run)).runs
        first = fit[0] if fit and fit[0].start == run.start else Range(run.chunk, 0, 0)
        self._quotas.charge(reader.identity, BYTES, first.size)
        return first


class DurablePullReaders:
    """All readers of durable topics, by topic."""

    def __init__(
        self,
        durable: DurableTopics,
        push_readers: PushReaders,
        quotas: Quotas,
        detached: DetachedReaders,
    ) -> None:
        self._durable = durable
        self._push_readers = push_readers
        self._quotas = quotas
        self._detached = detached
        self._readers: dict[int, dict[DurablePullReader, PullCursor]] = {}

    def find(self, name: bytes) -> Topic | None:
        return self._durable.find(name.decode("utf-8", "surrogateescape"))

    def is_damaged(self, topic: Topic) -> bool:
        return self._durable.is_damaged(topic)

    def topics(self) -> list[Topic]:
        return self._durable.topics()

    @property
    def topic_count(self) -> int:
        return self._durable.count

    def add(self, reader_id: bytes, caller: Identity, topic: Topic) -> DurablePullReader:
        reader = DurablePullReader(reader_id, caller, topic)
        pull = PullCursor(self._push_readers, self._durable, self._quotas, self._detached, reader)
        self._readers.setdefault(topic.number, {})[reader] = pull
        if self._push_readers.followed.follow(topic.number):
            pull.read_next()
        reader.on_end = partial(self.remove, reader)
        return reader

    def remove(self, reader: DurablePullReader) -> None:
        readers = self._readers.get(reader.topic.number, {})
        pull = readers.pop(reader, None)
        if pull is not None:
            self._push_readers.followed.unfollow(reader.topic.number)
            pull.end()
        if not readers:
            self._readers.pop(reader.topic.number, None)

    def count(self, topic: Topic) -> int:
        """Return the number of readers of the topic, pull and push."""
        pulling = len(self._readers.get(topic.number, ()))
        return pulling + self._push_readers.count(topic)

    def readers(self, topic: Topic) -> list[DurablePullReader]:
        return list(self._readers.get(topic.number, ()))

    def on_commit(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for reader, pull in list(self._readers.get(number, {}).items()):
                if reader.waiters:
                    pull.read_next()

    def tick(self) -> None:
        """Fetch again for readers whose quota had no room: messages may have been read."""
        for readers in self._readers.values():
            for reader, pull in list(readers.items()):
                if pull.is_over_quota:
                    pull.is_over_quota = False
                    if reader.waiters:
                        pull.read_next()


def _runs(rows: Rows) -> Iterator[Range]:
    """Yield the rows as chunks of consecutive ids and equal timestamps."""
    ids, times = array("q"), array("q")
    ids.frombytes(rows.ids)
    times.frombytes(rows.timestamps_ns)
    offsets = array("i")
    offsets.frombytes(rows.body_offsets)
    bodies = memoryview(rows.bodies)
    start = 0
    for at in range(1, rows.count + 1):
        if at < rows.count and ids[at] == ids[at - 1] + 1 and times[at] == times[at - 1]:
            continue
        base = offsets[start]
        places = array("i", [place - base for place in offsets[start : at + 1]])
        body = bytes(bodies[base : offsets[at]])
        chunk = Chunk.of_batch(ids[start], places, body, times[start])
        yield Range(chunk, 0, at - start)
        start = at
