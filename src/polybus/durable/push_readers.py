"""Push readers of durable topics: each gets committed messages, at its own pace.

A topic with push readers has a *tail*: a position in its log that advances as commits
become visible. The fan-out relays the messages read there to all readers at once, as if
they had just been published. Readers in these states are not part of the tail:

    joining   subscribed while the tail was behind: starts at the end of the log as of then
    behind    its outbox was full when the tail advanced, or the tail had passed its start:
              it has its own cursor and reads from the log as it has room, until it catches up
    leaving   unsubscribed or disconnected

So a slow reader does not delay others, and loses no message until it is cut as slow.
`run_blocking` reads the log on other threads; everything else runs on the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from polybus.errors import PolybusError
from polybus.kernel.fanout import BLOCKED
from polybus.model.topic import ALL

if TYPE_CHECKING:
    from polybus.bus.broker import Logger
    from polybus.bus.connection import Connection
    from polybus.durable.followed_topics import FollowedTopics
    from polybus.durable.topic_registry import DurableTopics
    from polybus.kernel.fanout import Fanout, RouteResult
    from polybus.model.rows import Rows
    from polybus.model.topic import Topic

T = TypeVar("T")
# Per read: small enough that a reader's outbox stays near its high-water mark.
CHUNK_ROWS = 16_384
CHUNK_BYTES = 512 * 1024
INT32_BYTES = 4
INT64_BYTES = 8
NO_ID = 2**63 - 1


class BlockingWorkRunner(Protocol):
    """Runs work on another thread, then passes its future to `then` on the loop."""

    def __call__(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None: ...


# Sends messages of a topic to all push readers. Returns the consumed count and a full reader.
Relay = Callable[[bytes, memoryview, "bytes | memoryview"], "RouteResult"]


class SenderNames(Protocol):
    """The senders of recent messages, for encodings that name them."""

    def when_resolved(self, name: bytes, then: Callable[[], None]) -> None:
        """Call `then` when the ids of all messages in flight to the topic are known."""

    def names_senders(self, encoding: object) -> bool:
        """Return True if readers with this encoding get the sender of a message."""

    def sending_as(self, caller: bytes) -> AbstractContextManager[None]:
        """Encode messages inside the context as sent by this caller."""

    def split_by_sender(self, name: bytes, rows: Rows) -> list[tuple[int, int, bytes]]:
        """Return runs of rows of one sender: start, end (exclusive), sender."""

    def forget_before(self, name: bytes, before_id: int) -> None: ...


class NoSenderNames:
    """No encoding names senders."""

    def when_resolved(self, name: bytes, then: Callable[[], None]) -> None:
        then()

    def names_senders(self, encoding: object) -> bool:
        return False

    def sending_as(self, caller: bytes) -> AbstractContextManager[None]:
        return nullcontext()

    def split_by_sender(self, name: bytes, rows: Rows) -> list[tuple[int, int, bytes]]:
        return [(0, rows.count, b"")]

    def forget_before(self, name: bytes, before_id: int) -> None:
        """Do nothing."""


class LogCursor(ABC):
    """A read position in a topic's log, with one read at a time."""

    def __init__(self, readers: PushReaders, topic: Topic, at_id: int) -> None:
        self._readers = readers
        self.topic = topic
        self.name = topic.name.encode()
        self.at_id = at_id
        self._reading = False
        self._again = False

    def read_next(self) -> None:
        if self._reading:
            self._again = True
            return
        until = self.until()
        if until is not None and until <= self.at_id:
            return
        self._reading = True
        self._again = False
        self._readers.read(
            self.topic, self.at_id, until, lambda future: self._on_read(future, until)
        )

    def until(self) -> int | None:
        """Return the id to stop before, None for no bound."""
        return None

    @abstractmethod
    def on_rows(self, rows: Rows) -> None: ...

    @abstractmethod
    def wants_more(self) -> bool: ...

    @abstractmethod
    def on_empty(self, until: int | None) -> None:
        """Handle a read that returned no rows before `until`."""

    def _on_read(self, future: Future[Rows], until: int | None) -> None:
        if not future.cancelled():  # else the bus is stopping
            # A commit may be visible before the sender's batch has its ids.
            self._readers.senders.when_resolved(self.name, partial(self._pass_rows, future, until))

    def _pass_rows(self, future: Future[Rows], until: int | None) -> None:
        self._reading = False
        try:
            rows = future.result()
        except PolybusError as error:
            # The next commit reads again from the same position.
            self._readers.log.warning("following failed", topic=self.topic.name, reason=str(error))
            return
        before = self.at_id
        if rows.count:
            self.on_rows(rows)
        else:
            self.on_empty(until)
        if (self.at_id != before or self._again) and self.wants_more():
            self.read_next()


class TailCursor(LogCursor):
    """The cursor of all readers that keep up."""

    def __init__(self, readers: PushReaders, topic: Topic, at_id: int) -> None:
        super().__init__(readers, topic, at_id)
        # Connection → start; starts only rise, so the first has the lowest. A plain dict that
        # is emptied from its front would be searched from there each time.
        self.joining: OrderedDict[Connection, int] = OrderedDict()
        self.behind: dict[Connection, CatchUpCursor] = {}

    def until(self) -> int | None:
        return next(iter(self.joining.values()), None)

    def wants_more(self) -> bool:
        return self._readers.has_push_readers(self)

    def on_rows(self, rows: Rows) -> None:
        if not self._readers.has_push_readers(self):
            return  # readers that subscribed since then have another tail
        self._readers.relay(self, rows)
        self.at_id = _last_id(rows) + 1
        self.admit_joining()
        self._readers.forget_senders(self)

    def on_empty(self, until: int | None) -> None:
        if until is not None:  # the rows were trimmed
            self.at_id = max(self.at_id, until)
            self.admit_joining()

    def admit_joining(self) -> None:
        """Attach joining readers whose start is reached. A read may have passed their start."""
        while (first := self.until()) is not None and first <= self.at_id:
            connection, start = self.joining.popitem(last=False)
            if start == self.at_id:
                self._readers.attach(self, connection)
            else:
                self._readers.begin_catch_up(self, connection, start).read_next()


class CatchUpCursor(LogCursor):
    """The cursor of one reader behind the tail."""

    def __init__(
        self, readers: PushReaders, tail: TailCursor, connection: Connection, at_id: int
    ) -> None:
        super().__init__(readers, tail.topic, at_id)
        self._tail = tail
        self.connection = connection

    def until(self) -> int | None:
        return self._tail.at_id

    def wants_more(self) -> bool:
        return self._is_there() and not self.connection.outbox.full

    def on_rows(self, rows: Rows) -> None:
        if not self._is_there():
            return
        self._readers.send_rows(self.connection, self.name, rows)
        self._reached(_last_id(rows) + 1)

    def on_empty(self, until: int | None) -> None:
        """Skip rows that were trimmed."""
        self._reached(until or 0)

    def _reached(self, at_id: int) -> None:
        self.at_id = max(self.at_id, at_id)
        if self.at_id >= self._tail.at_id and self._is_there():
            self._readers.end_catch_up(self._tail, self.connection)
            self._readers.attach(self._tail, self.connection)

    def _is_there(self) -> bool:
        return self._tail.behind.get(self.connection) is self


class PushReaders:
    def __init__(
        self,
        durable: DurableTopics,
        fanout: Fanout,
        relay: Relay,
        run_blocking: BlockingWorkRunner,
        log: Logger,
        followed: FollowedTopics,
    ) -> None:
        self._durable = durable
        self.followed = followed
        self._fanout = fanout
        self._relay = relay
        self._run_blocking = run_blocking
        # A dialect that names the senders of messages installs its own.
        self.senders: SenderNames = NoSenderNames()
        self.log = log
        self._tails: dict[int, TailCursor] = {}
        # The same cursors as in `TailCursor.behind`, so that an event of one connection does
        # not have to visit every tail.
        self._catching_up: dict[Connection, dict[TailCursor, CatchUpCursor]] = {}
        for topic in durable.topics():
            self.on_bound(topic)

    # --- events from the broker

    def on_bound(self, topic: Topic) -> None:
        """Handle a new durable topic: existing subscribers of the name read it from its end."""
        name = topic.name.encode()
        self._fanout.set_durable(name, True)
        if self._fanout.subscriber_count(name):
            self._begin_tail(topic)

    def on_removed(self, topic: Topic) -> None:
        """Handle a dropped topic: its readers stay subscribed to the name."""
        name = topic.name.encode()
        tail = self._tails.get(topic.number)
        if tail is not None:
            self._end_tail(tail)
            for connection in [*tail.joining, *tail.behind]:
                self._fanout.attach(connection.number, name)
            tail.joining.clear()
            for connection in list(tail.behind):
                self.end_catch_up(tail, connection)
        self._fanout.set_durable(name, False)

    def on_subscribed(self, connection: Connection, name: bytes) -> None:
        topic = self._durable.find(name.decode("utf-8", "surrogateescape"))
        if topic is None:
            return
        tail = self._tails.get(topic.number)
        if tail is None or not self.has_push_readers(tail):
            self._begin_tail(topic)
        elif tail.at_id < (start := self._durable.next_id(topic)):
            self._fanout.detach(connection.number, name)
            tail.joining[connection] = start
            tail.read_next()

    def on_unsubscribed(self, connection: Connection, name: bytes) -> None:
        topic = self._durable.find(name.decode("utf-8", "surrogateescape"))
        if topic is not None and topic.number in self._tails:
            self._leave(self._tails[topic.number], connection)

    def on_left(self, connection: Connection, names: Iterable[bytes]) -> None:
        """Handle the end of all subscriptions of a connection, which were to these names."""
        for name in names if self._tails else ():
            self.on_unsubscribed(connection, name)

    def on_room(self, connection: Connection) -> None:
        """Handle an outbox with room: continue the cursors of its reader."""
        for cursor in self._catching_up.get(connection, {}).values():
            cursor.read_next()

    def on_commit(self, numbers: Iterable[int]) -> None:
        """Handle new messages of these topics."""
        for number in numbers:
            tail = self._tails.get(number)
            if tail is not None and self.has_push_readers(tail):
                tail.read_next()
                for cursor in list(tail.behind.values()):
                    if cursor.wants_more():  # its last read has failed
                        cursor.read_next()

    # --- used by cursors

    def read(
        self, topic: Topic, at_id: int, until: int | None, then: Callable[[Future[Rows]], None]
    ) -> None:
        store = self._durable.store
        self._run_blocking(
            lambda: store.read(
                topic.number, ALL, at_id, until, max_rows=CHUNK_ROWS, max_bytes=CHUNK_BYTES
            ),
            then,
        )

    def has_push_readers(self, tail: TailCursor) -> bool:
        """Return True if the topic has push readers. A tail without readers is removed."""
        is_current = self._tails.get(tail.topic.number) is tail
        if is_current and not (
            tail.joining or tail.behind or self._fanout.subscriber_count(tail.name)
        ):
            self._end_tail(tail)
            self.senders.forget_before(tail.name, NO_ID)
            return False
        return is_current

    def is_read_by_push(self, name: bytes) -> bool:
        """Return True if the topic of this name has push readers."""
        topic = self._durable.find(name.decode("utf-8", "surrogateescape"))
        tail = self._tails.get(topic.number) if topic is not None else None
        return tail is not None and self.has_push_readers(tail)

    def relay(self, tail: TailCursor, rows: Rows) -> None:
        """Send rows to all readers that keep up. A full reader gets its own cursor."""
        for done, end, caller in self.senders.split_by_sender(tail.name, rows):
            offsets = memoryview(rows.body_offsets)[: (end + 1) * INT32_BYTES]
            with self.senders.sending_as(caller):
                while self._fanout.subscriber_count(tail.name):  # else all are behind, or joining
                    routed = self._relay(tail.name, offsets[done * INT32_BYTES :], rows.bodies)
                    done += routed.consumed
                    if routed.stop != BLOCKED:
                        break
                    # The full reader continues at the first message that it did not get.
                    connection: Connection = routed.blocker.connection
                    self._fanout.detach(connection.number, tail.name)
                    at_id = int.from_bytes(rows.ids[done * INT64_BYTES :][:INT64_BYTES], "little")
                    self.begin_catch_up(tail, connection, at_id)

    def send_rows(self, connection: Connection, name: bytes, rows: Rows) -> None:
        offsets = memoryview(rows.body_offsets)
        for start, end, caller in self.senders.split_by_sender(name, rows):
            ends = offsets[start * INT32_BYTES : (end + 1) * INT32_BYTES]
            with self.senders.sending_as(caller):
                data = self._fanout.encode_for(connection.number, name, ends, rows.bodies)
            if data:
                connection.outbox.push(data)

    def forget_senders(self, tail: TailCursor) -> None:
        """Forget the senders of messages that all readers have received."""
        behind = tail.behind.values()
        needed = [
            one.at_id for one in behind if self.senders.names_senders(one.connection.encoding)
        ]
        self.senders.forget_before(tail.name, min([tail.at_id, *needed]))

    def begin_catch_up(self, tail: TailCursor, connection: Connection, at_id: int) -> CatchUpCursor:
        """Give a reader a cursor of its own. Returns it before its first read."""
        cursor = CatchUpCursor(self, tail, connection, at_id)
        tail.behind[connection] = cursor
        self._catching_up.setdefault(connection, {})[tail] = cursor
        return cursor

    def end_catch_up(self, tail: TailCursor, connection: Connection) -> None:
        """Remove the cursor of a reader, if it has one of its own."""
        if tail.behind.pop(connection, None) is not None:
            cursors = self._catching_up[connection]
            del cursors[tail]
            if not cursors:
                del self._catching_up[connection]

    def attach(self, tail: TailCursor, connection: Connection) -> None:
        self._fanout.attach(connection.number, tail.name)

    def count(self, topic: Topic) -> int:
        """Return the number of push readers."""
        tail = self._tails.get(topic.number)
        apart = len(tail.joining) + len(tail.behind) if tail else 0
        return apart + self._fanout.subscriber_count(topic.name.encode())

    def _begin_tail(self, topic: Topic) -> None:
        """Follow a topic from its end, as far as the registry knows it."""
        tail = TailCursor(self, topic, self._durable.next_id(topic))
        self._tails[topic.number] = tail
        if self.followed.follow(topic.number):
            tail.read_next()

    def _end_tail(self, tail: TailCursor) -> None:
        del self._tails[tail.topic.number]
        self.followed.unfollow(tail.topic.number)

    def _leave(self, tail: TailCursor, connection: Connection) -> None:
        self.end_catch_up(tail, connection)
        tail.joining.pop(connection, None)
        self.has_push_readers(tail)


def _last_id(rows: Rows) -> int:
    return int.from_bytes(rows.ids[-INT64_BYTES:], "little")
