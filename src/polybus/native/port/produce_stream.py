"""Batches of a stream, produced to a topic or put into a stage.

Commits of all streams in flight together are limited by `UncommittedBudget`; beyond it
callers wait in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from polybus.errors import StoreClosed, TooLarge
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.commit import CommitResult
    from polybus.model.delivery_time import DeliveryTime
    from polybus.model.identity import Identity
    from polybus.model.stamp import Stamp
    from polybus.model.topic import Topic
    from polybus.native.port.producer_registry import ProducerRegistry
    from polybus.native.port.topic_access import TopicAccess

T = TypeVar("T")


class UncommittedBudget:
    """A limit of bytes in uncommitted batches. First come, first served: otherwise small
    batches could starve a large one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._closed = False
        self._changed = Condition()
        self._queue: deque[object] = deque()

    @property
    def used(self) -> int:
        return self._used

    def submit(self, size: int, hand_over: Callable[[], Future[T]]) -> Future[T]:
        """Call `hand_over` once `size` bytes are free; free them when its future is done."""
        self._acquire(size)
        try:
            future = hand_over()
        except BaseException:
            self._release(size)
            raise
        future.add_done_callback(lambda _: self._release(size))
        return future

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold `size` bytes for the length of a `with`."""
        self._acquire(size)
        try:
            yield
        finally:
            self._release(size)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _acquire(self, size: int) -> None:
        if size > self._max_bytes:
            raise TooLarge(f"batch of {size} bytes exceeds the limit of {self._max_bytes}")
        with self._changed:
            if not self._queue and self._used + size <= self._max_bytes and not self._closed:
                self._used += size
                return
            turn = object()

            def can_go_on() -> bool:
                has_room = self._used + size <= self._max_bytes
                return self._closed or (self._queue[0] is turn and has_room)

            self._queue.append(turn)
            try:
                self._changed.wait_for(can_go_on)
                if self._closed:
                    raise StoreClosed("the bus is stopping")
                self._used += size
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()  # the next in the queue may have room, too

    def _release(self, size: int) -> None:
        with self._changed:
            self._used -= size
            if self._queue:
                self._changed.notify_all()


class ProduceStream:
    """The stream of one caller to one topic."""

    def __init__(
        self,
        access: TopicAccess,
        owners: ProducerRegistry,
        budget: UncommittedBudget,
        caller: Identity,
        name: str,
        shards: int | None,
        wall_ns: Callable[[], int],
    ) -> None:
        """`shards` is the number for a new topic; None: the topic must exist."""
        self._access = access
        self._owners = owners
        self._budget = budget
        self._caller = caller
        self._name = name
        self._shards = shards
        self._wall_ns = wall_ns
        self._generation = -1

    def is_ready(self) -> bool:
        """Return whether a batch can be submitted without the event loop."""
        is_known = self._access.durable.find(self._name) is not None
        return is_known and self._generation == self._access.generation

    def open(self) -> Topic:
        """Return the topic, created if missing. Raises `Denied` after a change of the rules."""
        if self._generation != self._access.generation:
            generation = self._access.generation
            self._access.check_allowed(self._caller, PRODUCE, self._name)
            self._generation = generation
        if self._shards is None:
            return self._access.durable.get(self._name)
        return self._access.get_or_create(self._caller, self._name, self._shards)

    def produce(
        self, block: Block, stamp: Stamp | None, delivery: DeliveryTime | None = None
    ) -> Future[CommitResult]:
        """Submit a batch; with `delivery` it is kept aside until it is due."""
        topic = self.open()
        if stamp is not None:
            self._owners.check(self._caller, stamp.producer)
        durable = self._access.durable
        size = block.size_bytes
        if delivery is None:
            future = self._budget.submit(size, lambda: durable.produce(topic, block, stamp))
        else:
            durable.check_intact(topic)  # the commit of records does not
            due_ns = delivery.due_ns(self._wall_ns())
            keep = partial(durable.delayed.produce, topic, block, due_ns, stamp, self._caller)
            future = self._budget.submit(size, keep)
        durable.traffic.receive(block.count, size)
        return future

    def stage(self, stage: str, block: Block) -> Future[None]:
        durable, topic = self._access.durable, self.open()
        return self._budget.submit(
            block.size_bytes,
            lambda: durable.store.stage(stage, durable.build_appends(topic, block)),
        )
