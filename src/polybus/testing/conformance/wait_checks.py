"""Checks of `watch`: listeners are called when messages become visible."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from polybus.errors import Conflict
from polybus.model.commit import Commit, CommitResult, RecordChange
from polybus.store.contract import ShardEnd, Store
from polybus.testing.conformance.kit import (
    TIMEOUT_S,
    Engine,
    append,
    bodies,
    producer,
    put,
    refused,
    stage,
)

GRACE_S = 0.1


class _Recorder:
    """Records the calls of a listener."""

    def __init__(self, store: Store) -> None:
        self._ends: queue.SimpleQueue[Sequence[ShardEnd]] = queue.SimpleQueue()
        self.stop = store.watch(self._ends.put)

    def until(self, last: ShardEnd) -> list[ShardEnd]:
        """Return all ends up to this one, which must arrive."""
        found = list[ShardEnd]()
        while last not in found:
            found += self._ends.get(timeout=TIMEOUT_S)
        return found


def check_listener_is_called_for_appends(engine: Engine) -> None:
    with engine.fresh() as store:
        one, other = store.create("t", 2, {}), store.create("u", 1, {})
        recorder = _Recorder(store)
        put(store, append(one, 1, b"a", b"b"), append(other, 0, b"c"))
        put(store, append(one, 1, b"d"))
        ends = recorder.until(ShardEnd(one.number, 1, 3))
        # If both commits become visible at once, only the last end is reported.
        of_one = [piece for piece in ends if piece.topic == one.number]
        assert of_one in ([(one.number, 1, 2), (one.number, 1, 3)], [(one.number, 1, 3)])
        assert [piece for piece in ends if piece not in of_one] == [(other.number, 0, 1)]


def check_listener_is_called_for_published_stages(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        recorder = _Recorder(store)
        name = stage(store, append(topic, 0, b"a"))
        put(store, append(topic, 0, b"b"))
        put(store, stages=[name])
        ends = recorder.until(ShardEnd(topic.number, 0, 2))
        assert ends in ([(topic.number, 0, 1), (topic.number, 0, 2)], [(topic.number, 0, 2)])


def check_listener_is_not_called_without_messages(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store)(1)
        put(store, append(topic, 0, b"a"), stamp=stamp)
        recorder = _Recorder(store)
        put(store)
        put(store, changes=[RecordChange(b"k", b"v")])
        put(store, append(topic, 0, b"a"), stamp=stamp)
        with refused(Conflict):
            put(store, append(topic, 0, b"x"), changes=[RecordChange(b"k", b"v", 0)])
        put(store, append(topic, 0, b"b"))
        assert recorder.until(ShardEnd(topic.number, 0, 2)) == [(topic.number, 0, 2)]


def check_messages_are_readable_in_the_listener(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        seen: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        store.watch(lambda _: seen.put(bodies(store, topic)))
        put(store, append(topic, 0, b"a"))
        assert seen.get(timeout=TIMEOUT_S) == [b"a"]


def check_calls_of_a_listener_do_not_overlap(engine: Engine) -> None:
    """Commits take effect one after the other, so their ends are reported in order."""
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        calling, overlapped = threading.Lock(), threading.Event()

        def listen(_ends: Sequence[ShardEnd]) -> None:
            if not calling.acquire(blocking=False):
                overlapped.set()
                return
            try:
                overlapped.wait(GRACE_S)  # for an engine that executes the next commit meanwhile
            finally:
                calling.release()

        store.watch(listen)
        commits = [store.commit(Commit((append(topic, 0, b"x"),))) for _ in range(3)]
        for commit in commits:
            commit.result(TIMEOUT_S)
        assert not overlapped.is_set(), "a listener was called during its call"


def check_listener_is_called_until_stopped(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stopped, recorder = _Recorder(store), _Recorder(store)
        put(store, append(topic, 0, b"a"))
        stopped.until(ShardEnd(topic.number, 0, 1))
        recorder.until(ShardEnd(topic.number, 0, 1))
        stopped.stop()
        stopped.stop()
        put(store, append(topic, 0, b"b"))
        recorder.until(ShardEnd(topic.number, 0, 2))
        put(store)  # listeners of earlier commits were called before this resolves
        assert stopped._ends.empty()


def check_one_listener_may_watch_twice(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        told: queue.SimpleQueue[Sequence[ShardEnd]] = queue.SimpleQueue()
        stop = store.watch(told.put)
        store.watch(told.put)
        stop()
        put(store, append(topic, 0, b"a"))
        assert list(told.get(timeout=TIMEOUT_S)) == [(topic.number, 0, 1)]
        put(store, append(topic, 0, b"b"))
        assert list(told.get(timeout=TIMEOUT_S)) == [(topic.number, 0, 2)]


def check_failing_listener_does_not_affect_others(engine: Engine) -> None:
    def fail(ends: Sequence[ShardEnd]) -> None:
        calls.put(None)
        raise _OnPurposeError

    calls: queue.SimpleQueue[None] = queue.SimpleQueue()
    with _quiet("polybus.store"), engine.fresh() as store:
        topic = store.create("t", 1, {})
        store.watch(fail)
        recorder = _Recorder(store)
        for end in (1, 2):
            put(store, append(topic, 0, b"x"))
            recorder.until(ShardEnd(topic.number, 0, end))
            calls.get(timeout=TIMEOUT_S)


def check_failing_callback_does_not_affect_others(engine: Engine) -> None:
    def fail(future: Future[CommitResult]) -> None:
        calls.put(future.result().spans[0].first_id)
        raise _OnPurposeError

    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _quiet("concurrent.futures"), engine.fresh() as store:
        topic = store.create("t", 1, {})
        for first_id in range(1, 20):
            store.commit(Commit((append(topic, 0, b"x"),))).add_done_callback(fail)
            assert calls.get(timeout=TIMEOUT_S) == first_id


class _OnPurposeError(Exception):
    pass


@contextmanager
def _quiet(logger: str) -> Generator[None]:
    """Hide the log lines of errors that the check raises on purpose."""

    def shown(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], _OnPurposeError))

    logging.getLogger(logger).addFilter(shown)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(shown)
