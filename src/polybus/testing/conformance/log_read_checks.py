"""Checks of `read` and `trim`."""

from __future__ import annotations

from polybus.errors import StoreFull, Trimmed, UsageError
from polybus.store.log.write_ahead_log import Tail
from polybus.testing.conformance.log_kit import (
    TIMEOUT_S,
    Appender,
    LogSubject,
    payloads,
    records,
    refused,
)

MOST_BYTES = 1 << 32  # a log that takes more is not bounded


def check_read_begins_at_a_position(subject: LogSubject) -> None:
    with subject.open() as log:
        positions = Appender(log).put(*(b"%d" % number for number in range(20)))
        for index, position in enumerate(positions):
            assert payloads(log, position) == [b"%d" % number for number in range(index, 20)]
        assert payloads(log, log.end) == []


def check_read_after_the_end_is_refused(subject: LogSubject) -> None:
    with subject.open() as log:
        Appender(log).put(b"x")
        with refused(UsageError):
            log.read(log.end + 1)


def check_read_ends_where_the_log_ended(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        appender.put(b"a", b"b")
        iterator = log.read(log.start)
        appender.put(b"c")
        assert [record.payload for _, record in iterator] == [b"a", b"b"]


def check_records_of_many_sizes(subject: LogSubject) -> None:
    with subject.open() as log:
        sizes = [0, 1, 7, 8, 9, 55, 56, 57, 4039, 4040, 4041, 8192]
        written = [bytes([size % 251]) * size for size in sizes * 3]
        appender = Appender(log)
        for payload in written:
            appender.put(payload)
        assert payloads(log) == written


def check_trimmed_records_are_gone(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        positions = appender.put(*(b"%d" % number for number in range(10)))
        log.trim(positions[4])
        assert log.start == positions[4]
        assert payloads(log) == [b"%d" % number for number in range(4, 10)]
        with refused(Trimmed):
            log.read(positions[3])
        log.trim(positions[2])
        assert log.start == positions[4]


def check_trim_is_limited_to_the_end(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        appender.put(b"a", b"b")
        log.trim(log.end + 1000)
        assert log.start == log.end
        assert records(log) == []
        assert log.tail == Tail(1, 2)
        appender.put(b"c")
        assert payloads(log) == [b"c"]


def check_trim_of_an_empty_log_does_nothing(subject: LogSubject) -> None:
    with subject.open() as log:
        log.trim(1000)
        Appender(log).put(b"a")
        assert payloads(log) == [b"a"]


def check_log_is_bounded_and_trim_makes_room(subject: LogSubject) -> None:
    with subject.open() as log:
        appender = Appender(log)
        payload = bytes(log.max_record_bytes)
        written = 0
        while True:
            future = log.append(appender.record(payload))
            if isinstance(future.exception(TIMEOUT_S), StoreFull):
                break
            appender.number += 1
            written += len(payload)
            assert written < MOST_BYTES
        kept = log.end - log.start
        assert kept > 1
        assert len(list(log.read(log.start))) == kept
        # The log may need several records of room, and a moment to reuse it.
        log.trim(log.end)
        while isinstance(log.append(appender.record(b"x")).exception(TIMEOUT_S), StoreFull):
            pass
        appender.number += 1
        for _ in range(kept):
            log.trim(log.end)
            appender.put(payload)
        assert [record.payload for record in records(log)] == [payload]


def check_kept_records_survive_many_trims(subject: LogSubject) -> None:
    """The room of trimmed records is used again, that of others is not."""
    with subject.open() as log:
        appender = Appender(log)
        size = log.max_record_bytes // 3
        for turn in range(60):
            appender.put(b"%d" % turn * (size // 2), b"x" * 100)
            keep = max(log.start, log.end - 6)
            log.trim(keep)
            numbers = [record.number for record in records(log)]
            assert numbers == list(range(keep, appender.number + 1))


def check_reader_of_trimmed_records_is_refused(subject: LogSubject) -> None:
    """It returns the records that it has read before, and no others."""
    with subject.open() as log:
        appender = Appender(log)
        appender.put(*(b"%d" % number for number in range(10)))
        iterator = log.read(log.start)
        assert next(iterator)[1].payload == b"0"
        log.trim(log.end)
        try:
            rest = [record.payload for _, record in iterator]
        except Trimmed:
            return
        assert rest == [b"%d" % number for number in range(1, 10)]
