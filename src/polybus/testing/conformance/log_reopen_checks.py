"""Checks of logs that persist: an opened log continues where the last owner ended."""

from __future__ import annotations

from polybus.errors import UsageError
from polybus.store.log.write_ahead_log import Tail, WriteAheadLog
from polybus.testing.conformance.log_kit import (
    Appender,
    LogSubject,
    payloads,
    records,
    refusal,
)


def _reopen(subject: LogSubject, log: WriteAheadLog) -> WriteAheadLog:
    assert subject.reopen is not None
    return subject.reopen(log)


def check_records_survive(subject: LogSubject) -> None:
    log = subject.open()
    written = [b"%d" % number * 200 for number in range(50)]
    Appender(log).put(*written)
    start, end, tail = log.start, log.end, log.tail
    with _reopen(subject, log) as log:
        assert (log.start, log.end, log.synced_end, log.tail) == (start, end, end, tail)
        assert payloads(log) == written


def check_owners_continue(subject: LogSubject) -> None:
    log = subject.open()
    for turn in range(5):
        appender = Appender(log)
        appender.put(*(b"%d" % turn for _ in range(turn)))
        log = _reopen(subject, log)
    with log:
        found = records(log)
        assert [record.payload for record in found] == [
            b"%d" % t for t in range(5) for _ in range(t)
        ]
        assert [record.number for record in found] == list(range(1, 11))
        assert log.tail == Tail(found[-1].epoch, 10)


def check_epoch_of_a_former_owner_is_refused(subject: LogSubject) -> None:
    log = subject.open()
    Appender(log, 3).put(b"a")
    with _reopen(subject, log) as log:
        for epoch in (2, 3):
            assert type(refusal(log, Appender(log, epoch).record(b"x"))) is UsageError
        Appender(log, 4).put(b"b")
        assert payloads(log) == [b"a", b"b"]


def check_empty_log_stays_empty(subject: LogSubject) -> None:
    with _reopen(subject, subject.open()) as log:
        assert log.start == log.end == log.synced_end
        assert records(log) == []
        appender = Appender(log)
        appender.number = 41
        appender.put(b"x")
    assert appender.number == 42


def check_records_after_a_trim_survive(subject: LogSubject) -> None:
    log = subject.open()
    appender = Appender(log)
    size = log.max_record_bytes // 4
    for number in range(40):
        appender.put(b"%d" % number + bytes(size))
        log.trim(log.end - 3)
    kept, end = log.start, log.end
    with _reopen(subject, log) as log:
        assert log.start <= kept
        assert log.end == end
        found = records(log)
        assert [record.number for record in found] == list(range(found[0].number, 41))
        for record in found:
            assert record.payload == b"%d" % (record.number - 1) + bytes(size)


def check_all_trimmed_log_keeps_its_numbers(subject: LogSubject) -> None:
    log = subject.open()
    Appender(log).put(b"a", b"b")
    log.trim(log.end)
    with _reopen(subject, log) as log:
        assert log.tail == Tail(1, 2)
        Appender(log).put(b"c")
        assert records(log)[-1].number == 3
