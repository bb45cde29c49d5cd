"""Checks of `append`, its refusals, and `close`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from polybus.errors import StoreClosed, TooLarge, UsageError
from polybus.store.log.write_ahead_log import LogRecord, Tail
from polybus.testing.conformance.log_kit import (
    TIMEOUT_S,
    WRITER,
    Appender,
    LogSubject,
    payloads,
    records,
    refusal,
    refused,
)


def check_appended_record_is_read_as_it_was(subject: LogSubject) -> None:
    with subject.open() as log:
        record = LogRecord(7, WRITER, 1, (b"one", bytearray(b"two"), memoryview(b"three")))
        position = log.append(record).result(TIMEOUT_S)
        ((found_position, found),) = log.read(log.start)
        assert found_position == position
        assert (found.epoch, found.writer, found.number) == (7, WRITER, 1)
        assert found.payload == b"onetwothree"


def check_payload_may_be_empty(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        log.append(appender.record()).result(TIMEOUT_S)
        appender.number += 1
        appender.put(b"", b"x")
        assert payloads(log) == [b"", b"", b"x"]


def check_largest_record_fits_and_a_larger_one_does_not(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        largest = bytes(range(256)) * (log.max_record_bytes // 256 + 1)
        assert type(refusal(log, appender.record(largest))) is TooLarge
        appender.put(largest[: log.max_record_bytes])
        appender.put(b"next")
        assert payloads(log) == [largest[: log.max_record_bytes], b"next"]


def check_too_many_parts_are_refused(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        assert type(refusal(log, appender.record(*[b"x"] * 100_000))) is TooLarge
        appender.put(b"next")


def check_positions_grow_and_ends_follow(subject: LogSubject) -> None:
    with subject.open() as log:
        assert log.start == log.end == log.synced_end
        appender = Appender(log)
        last = log.end - 1
        for _ in range(5):
            (position,) = appender.put(b"x")
            assert position > last
            assert log.end == position + 1
            assert log.synced_end <= log.end
            last = position


def check_numbers_leave_no_gap(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        appender.put(b"a", b"b")
        for number in (0, 1, 2, 4, 1 << 63):
            wrong = LogRecord(appender.epoch, WRITER, number, (b"wrong",))
            assert type(refusal(log, wrong)) is UsageError
        appender.put(b"c")
        assert [record.number for record in records(log)] == [1, 2, 3]


def check_first_record_sets_the_number(subject: LogSubject) -> None:
    with subject.open() as log:
        assert log.tail == Tail(0, 0)
        for number in (0, -1):
            assert type(refusal(log, LogRecord(1, WRITER, number, ()))) is UsageError
        appender = Appender(log)
        appender.number = 1000
        appender.put(b"a", b"b")
        assert [record.number for record in records(log)] == [1001, 1002]
        assert log.tail == Tail(1, 1002)


def check_epochs_never_decrease(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log, 5)
        appender.put(b"a", b"b")
        for epoch in (4, 0, -1, 1 << 63):
            wrong = LogRecord(epoch, WRITER, 3, (b"wrong",))
            assert type(refusal(log, wrong)) is UsageError
        appender.epoch = 9
        appender.put(b"c")
        assert [record.epoch for record in records(log)] == [5, 5, 9]
        assert log.tail == Tail(9, 3)


def check_first_epoch_exceeds_the_tail(subject: LogSubject) -> None:
    with subject.open() as log:
        assert type(refusal(log, LogRecord(0, WRITER, 1, ()))) is UsageError
        Appender(log, 1).put(b"a")


def check_futures_resolve_in_order(subject: LogSubject) -> None:
    """Also those that a thread waits for, and those that have callbacks alone."""
    with subject.open() as log:
        order: list[int] = []
        resolving = threading.Lock()
        overlaps: list[int] = []

        def note(future: Future[int]) -> None:
            if not resolving.acquire(blocking=False):
                overlaps.append(future.result())
                return
            order.append(future.result())
            resolving.release()

        appender = Appender(log)
        futures = []
        for number in range(300):
            future = log.append(appender.record(b"%d" % number))
            future.add_done_callback(note)
            futures.append(future)
            appender.number += 1
            if number % 50 == 49:
                future.result()
        positions = [future.result(TIMEOUT_S) for future in futures]
        log.close()  # after it all callbacks have run
        assert not overlaps, "two futures were resolved at once"
        # A callback that is added to a resolved future runs at once, on the caller's thread.
        assert sorted(order) == positions


def check_record_is_readable_when_its_append_resolves(subject: LogSubject) -> None:
    with subject.open() as log:
        found: list[bytes] = []
        done = threading.Event()

        def read(future: Future[int]) -> None:
            found.extend(record.payload for _, record in log.read(future.result()))
            done.set()

        log.append(Appender(log).record(b"mine")).add_done_callback(read)
        assert done.wait(TIMEOUT_S)
        assert found == [b"mine"]


def check_append_cannot_be_cancelled(subject: LogSubject) -> None:
    with subject.open() as log:
        future = log.append(Appender(log).record(b"x"))
        assert not future.cancel()
        future.result(TIMEOUT_S)
        assert payloads(log) == [b"x"]


def check_threads_may_append_in_turn(subject: LogSubject) -> None:
    with subject.open() as log:
        appender, turn = Appender(log), threading.Lock()

        def work() -> None:
            for _ in range(50):
                with turn:
                    future = log.append(appender.record(b"x"))
                    appender.number += 1
                future.result()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert [record.number for record in records(log)] == list(range(1, 201))


def check_close_finishes_pending_appends(subject: LogSubject) -> None:
    log = subject.open()
    appender = Appender(log)
    futures = []
    for _ in range(50):
        futures.append(log.append(appender.record(b"x")))
        appender.number += 1
    log.close()
    assert all(future.done() for future in futures)
    assert all(future.exception() is None for future in futures)


def check_calls_after_close_are_refused(subject: LogSubject) -> None:
    log = subject.open()
    appender = Appender(log)
    appender.put(b"x")
    log.close()
    log.close()
    calls: list[Callable[[], object]] = [lambda: log.read(1), lambda: log.trim(1)]
    for call in calls:
        with refused(StoreClosed):
            call()
    assert type(refusal(log, appender.record(b"y"))) is StoreClosed
