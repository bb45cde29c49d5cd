"""The conformance suite of a write-ahead log, and what its checks share.

    from polybus.testing.conformance import log_kit

    subject = log_kit.LogSubject(open=lambda: MyLog())
    for check in log_kit.log_checks(subject):
        check(subject)

A check opens its own logs, closes them, and raises AssertionError if the log breaks the
contract (`polybus.store.log.write_ahead_log`). A log that persists records sets `reopen` and
gets more checks. Positions may have gaps; numbers have none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from polybus.errors import PolybusError
from polybus.store.log.write_ahead_log import LogRecord, WriteAheadLog

TIMEOUT_S = 30.0  # an append that takes longer was lost
WRITER = 0xFFFF_FFFF_0000_0007


@dataclass(frozen=True)
class LogSubject:
    """A log under test.

    `open` returns an empty log. `reopen` closes a log and opens it again; None if the log does
    not persist records.
    """

    open: Callable[[], WriteAheadLog]
    reopen: Callable[[WriteAheadLog], WriteAheadLog] | None = None


LogCheck = Callable[[LogSubject], None]


def log_checks(subject: LogSubject) -> list[LogCheck]:
    """Return the checks that apply to a log."""
    # Imported here, because these modules use this one.
    from polybus.testing.conformance import log_append_checks, log_read_checks, log_reopen_checks

    modules = [log_append_checks, log_read_checks]
    if subject.reopen is not None:
        modules.append(log_reopen_checks)
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_")
    ]


class Appender:
    """Appends payloads under a new epoch, with the numbers that follow."""

    def __init__(self, log: WriteAheadLog, epoch: int | None = None) -> None:
        tail = log.tail
        self.log = log
        self.epoch = tail.epoch + 1 if epoch is None else epoch
        self.number = tail.number

    def record(self, *parts: bytes) -> LogRecord:
        return LogRecord(self.epoch, WRITER, self.number + 1, parts)

    def put(self, *payloads: bytes) -> list[int]:
        """Append a record per payload, all in flight at once. Returns their positions."""
        futures = []
        for payload in payloads:
            futures.append(self.log.append(self.record(payload)))
            self.number += 1
        return [future.result(TIMEOUT_S) for future in futures]


def records(log: WriteAheadLog, start: int | None = None) -> list[LogRecord]:
    """Return all records from a position, or from the start."""
    return [record for _, record in log.read(log.start if start is None else start)]


def payloads(log: WriteAheadLog, start: int | None = None) -> list[bytes]:
    return [record.payload for record in records(log, start)]


@contextmanager
def refused(wanted: type[PolybusError]) -> Generator[None]:
    """Expect exactly this error from the block."""
    caught: PolybusError | None = None
    try:
        yield
    except PolybusError as error:
        caught = error
    assert type(caught) is wanted, f"expected {wanted.__name__}, got {caught!r}"


def refusal(log: WriteAheadLog, record: LogRecord) -> PolybusError:
    """Append a record that must be refused at once, and return the error."""
    future = log.append(record)
    assert future.done(), "the append was not refused at once"
    error = future.exception()
    assert isinstance(error, PolybusError), f"the append was not refused: {error!r}"
    return error
