"""The memory store: a namespace with one writer thread, and one lock between it and readers.

All changes run on the one thread in the order of their submission, as in engines that write
to disk, so that a program that works with this store works with those. Reads run on the
threads of their callers, under the lock.

All stores that open `memory:NAME` in a process share a namespace, which the last close ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from polybus.errors import PolybusError, StoreClosed
from polybus.model.commit import Append, Commit, CommitResult, StoredRecord
from polybus.model.rows import Rows
from polybus.model.stamp import ProducerEpoch, ProducerOptions
from polybus.model.topic import All, Bounds, Topic
from polybus.store import request_checks
from polybus.store.contract import (
    LEASE_S,
    MAX_READ_BYTES,
    MAX_ROWS,
    Excess,
    Listener,
    ShardEnd,
    ShardRange,
    Store,
)
from polybus.store.memory.namespace import Namespace

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("polybus.store")


class SharedNamespace:
    """A namespace with its thread, lock and listeners."""

    def __init__(self, wall_ns: Callable[[], int], clock_s: Callable[[], float]) -> None:
        self.namespace = Namespace(wall_ns, clock_s)
        self.lock = threading.Lock()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="polybus-memory")
        self.listeners: dict[object, Listener] = {}
        self._users = 0
        self._over = False

    def join(self) -> bool:
        """Add a user. Returns False if the last user has left and ended the namespace."""
        with self.lock:
            self._users += not self._over
            return not self._over

    def leave(self) -> None:
        """Wait for submitted changes and remove a user. The last one ends the thread."""
        # A task that does nothing: when it is done, all earlier ones are.
        self.writer.submit(int).result()
        with self.lock:
            self._users -= 1
            # Under the lock, so that `join` cannot revive a namespace whose thread ends.
            self._over = self._users == 0
        if self._over:
            self.writer.shutdown()

    def locked(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return work(*args, **kwargs)

    def commit(self, commit: Commit) -> CommitResult:
        done = self.locked(self.namespace.commit, commit)
        # Outside of the lock: a listener may read. A repeat was reported when it was new.
        if done.spans and not done.duplicate:
            self._notify(
                [ShardEnd(at.topic, at.shard, at.first_offset + at.count) for at in done.spans]
            )
        return done

    def _notify(self, ends: Sequence[ShardEnd]) -> None:
        for listener in list(self.listeners.values()):
            try:
                listener(ends)
            except Exception:
                _log.exception("a listener of the store failed")


class MemoryStore(Store):
    def __init__(
        self,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        clock_s: Callable[[], float] = time.monotonic,
        space: SharedNamespace | None = None,
    ) -> None:
        self._space = space or SharedNamespace(wall_ns, clock_s)
        if not self._space.join():
            raise StoreClosed("the store was closed")
        self._names = self._space.namespace
        self._submit_lock = threading.Lock()  # no change may be submitted after close
        self._closed = False
        self._pid = os.getpid()
        self._watching: list[object] = []

    # --- topics

    def create(self, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
        return self._write(self._names.create, *request_checks.new_topic(name, shards, settings))

    def configure(self, name: str, settings: Mapping[str, object], *, add_shards: int = 0) -> Topic:
        copy, added = request_checks.topic_settings(settings), request_checks.new_shards(add_shards)
        return self._write(self._names.configure, name, copy, added)

    def topics(self) -> list[Topic]:
        return self._read(self._names.topics)

    def drop(self, name: str) -> None:
        self._write(self._names.drop, name)

    # --- writing

    def commit(self, commit: Commit) -> Future[CommitResult]:
        try:
            return self._submit(self._space.commit, request_checks.commit(commit))
        except PolybusError as error:
            return _failed_future(error)

    def open_producer(self, name: str, options: ProducerOptions) -> ProducerEpoch:
        request_checks.producer(name)
        return self._write(
            self._names.producers.open, name, request_checks.producer_options(options)
        )

    def look_up_producer(self, name: str) -> ProducerEpoch | None:
        request_checks.producer(name)
        return self._write(self._names.producers.look_up, name)

    def close_producer(self, name: str, epoch: int) -> None:
        self._write(self._names.producers.close, name, epoch)

    def open_stage(self, lease_s: float = LEASE_S) -> str:
        return self._write(self._names.open_stage, request_checks.lease(lease_s))

    def stage(self, stage: str, appends: Sequence[Append]) -> Future[None]:
        try:
            work = self._names.stage
            return self._submit(
                self._space.locked, work, stage, request_checks.appends(tuple(appends))
            )
        except PolybusError as error:
            return _failed_future(error)

    def reroute_stage(self, stage: str) -> bool:
        return self._write(self._names.reroute_stage, stage)

    def staged_topics(self, stages: Sequence[str]) -> frozenset[int]:
        return self._write(self._names.staged_topics, tuple(stages))

    def renew(self, stage: str, lease_s: float = LEASE_S) -> None:
        self._write(self._names.renew, stage, request_checks.lease(lease_s))

    def discard(self, stage: str) -> None:
        self._write(self._names.discard, stage)

    def trim(self, topic: int, before: Mapping[int, int]) -> None:
        self._write(self._names.trim, topic, dict(before))

    # --- reading

    def bounds(self, topic: int) -> Bounds:
        return self._read(lambda: self._names.log(topic).bounds())

    def end(self, topic: int, shard: int | All) -> int:
        return self._read(self._names.end, topic, shard)

    def read(
        self,
        topic: int,
        shard: int | All,
        start: int,
        end: int | None = None,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        wanted = request_checks.read(start, end, max_rows, max_bytes)
        return self._read(self._names.read, topic, shard, *wanted)

    def read_parts(
        self,
        topic: int,
        parts: Sequence[ShardRange],
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        wanted = request_checks.parts(parts, max_rows, max_bytes)
        return self._read(self._names.read_parts, topic, *wanted)

    def find(self, topic: int, shard: int | All, timestamp_ns: int) -> int:
        return self._read(self._names.find, topic, shard, request_checks.time_ns(timestamp_ns))

    def find_id(self, topic: int, shard: int, message_id: int) -> int:
        return self._read(self._names.find_id, topic, shard, request_checks.message_id(message_id))

    def find_excess(self, topic: int, keep_bytes: int, max_blocks: int) -> Excess:
        request_checks.excess(keep_bytes, max_blocks)
        return self._read(self._names.find_excess, topic, keep_bytes)

    def get(self, key: bytes) -> StoredRecord | None:
        return self._read(self._names.get, request_checks.key(key))

    def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[StoredRecord]:
        request_checks.scan(prefix, after, limit)
        return self._read(self._names.scan, prefix, after, limit)

    def watch(self, listener: Listener) -> Callable[[], None]:
        self._check_open()
        token = object()
        self._watching.append(token)
        self._space.listeners[token] = listener

        def end() -> None:
            self._space.listeners.pop(token, None)

        return end

    # --- close

    def close(self) -> None:
        with self._submit_lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
        self._space.leave()
        # After `leave`: the last commits are still reported.
        for token in self._watching:
            self._space.listeners.pop(token, None)

    # --- running work in the writer's thread or under the lock

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed(
                "the store was opened by another process, the parent of a fork; open it again"
            )
        if self._closed:
            raise StoreClosed("the store was closed")

    def _submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._submit_lock:
            self._check_open()
            try:
                return self._space.writer.submit(work, *args, **kwargs)
            except RuntimeError:  # the interpreter ends the threads of pools before atexit handlers
                raise StoreClosed("the interpreter is shutting down") from None

    def _write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._submit(lambda: self._space.locked(work, *args, **kwargs)).result()

    def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_open()
        return self._space.locked(work, *args, **kwargs)


def _failed_future(error: PolybusError) -> Future[T]:
    future: Future[T] = Future()
    future.set_exception(error)
    return future


_spaces: WeakValueDictionary[str, SharedNamespace] = WeakValueDictionary()
_lock = threading.Lock()


def open_named(name: str) -> MemoryStore:
    """Open the store of this name, created if no open store has it."""
    with _lock:
        space = _spaces.get(name)
        try:
            return MemoryStore(space=space or _new(name))
        except StoreClosed:  # its last user left in this moment
            return MemoryStore(space=_new(name))


def _new(name: str) -> SharedNamespace:
    space = _spaces[name] = SharedNamespace(time.time_ns, time.monotonic)
    return space
