"""Batches that come in on a stream: produced to a topic, or put into a stage.

A stream may have many batches on their way to the disk. What all streams have on
their way together is bounded: over that, whoever brings more waits its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from polybus.errors import StoreClosed, TooLarge
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.commit import CommitResult
    from polybus.model.identity import Identity
    from polybus.model.stamp import Stamp
    from polybus.model.topic import Topic
    from polybus.native.port.producer_registry import ProducerRegistry
    from polybus.native.port.topic_access import TopicAccess

T = TypeVar("T")


class UncommittedBudget:
    """Bytes that may be on their way to the disk at once. Who came first is served first:
    else a large batch could wait for ever behind small ones."""

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
        """Hands over once there is room; gives the room back when it is done."""
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
        """The same for one who waits until it is done."""
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
            raise TooLarge(f"a batch of {size} bytes: at most {self._max_bytes} are taken at once")
        with self._changed:
            if not self._queue and self._used + size <= self._max_bytes and not self._closed:
                self._used += size
            else:
                self._wait_for_turn(size)

    def _wait_for_turn(self, size: int) -> None:
        turn = object()
        self._queue.append(turn)
        try:
            self._changed.wait_for(lambda: self._closed or self._is_next(turn, size))
            if self._closed:
                raise StoreClosed("the bus is stopping")
            self._used += size
        finally:
            self._queue.remove(turn)
            self._changed.notify_all()

    def _is_next(self, turn: object, size: int) -> bool:
        return self._queue[0] is turn and self._used + size <= self._max_bytes

    def _release(self, size: int) -> None:
        with self._changed:
            self._used -= size
            if self._queue:
                self._changed.notify_all()


class ProduceStream:
    """One topic that one caller brings batches for."""

    def __init__(
        self,
        access: TopicAccess,
        owners: ProducerRegistry,
        budget: UncommittedBudget,
        caller: Identity,
        name: str,
        shards: int | None,
    ) -> None:
        """`shards` are those of a topic that is made; None: it must be there."""
        self._access = access
        self._owners = owners
        self._budget = budget
        self._caller = caller
        self._name = name
        self._shards = shards
        self._generation = -1

    def is_ready(self) -> bool:
        """Whether a batch needs nothing but the store."""
        is_known = self._access.durable.find(self._name) is not None
        return is_known and self._generation == self._access.generation

    def open(self) -> Topic:
        """The topic, which is made if need be; `Denied` if the caller may not write to it."""
        if self._generation != self._access.generation:
            generation = self._access.generation
            self._access.check_allowed(self._caller, PRODUCE, self._name)
            self._generation = generation
        if self._shards is None:
            return self._access.durable.get(self._name)
        return self._access.get_or_create(self._caller, self._name, self._shards)

    def produce(self, block: Block, stamp: Stamp | None) -> Future[CommitResult]:
        topic = self.open()
        if stamp is not None:
            self._owners.check(self._caller, stamp.producer)
        durable = self._access.durable
        size = block.size_bytes
        future = self._budget.submit(size, lambda: durable.produce(topic, block, stamp))
        durable.traffic.receive(block.count, size)
        return future

    def stage(self, stage: str, block: Block) -> Future[None]:
        durable, topic = self._access.durable, self.open()
        return self._budget.submit(
            block.size_bytes,
            lambda: durable.store.stage(stage, durable.build_appends(topic, block)),
        )
