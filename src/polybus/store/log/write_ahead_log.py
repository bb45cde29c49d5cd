"""The contract of a log; `polybus.testing.conformance` checks an implementation against it.

A log is a sequence of records that one owner appends. A record holds decided results, such as
ids, offsets and timestamps, so that applying it needs no clock and no policy. The log neither
reads nor changes payloads.

- *Numbers* are dense: the number of a record is that of the record before plus one. The first
  record of an empty log sets the first number.
- *Epochs* never decrease, and the first record after an open must have a higher epoch than
  `tail`. So records that a crash has left behind the end are never taken for new ones.
- A *position* says where the log keeps a record. It grows with every record. The memory log
  and the file log use the number.

Rules for all methods:

- A method may be called from any thread, but records must be appended by one thread at a time.
- `append` reports every error by its Future. A refusal is there when `append` returns, and
  then the number is not used. `append` does not wait for the disk, with one exception: if the
  next records need a segment that is being prepared, it returns once the segment is ready.
- Futures resolve in the order of the records, one at a time, on a thread of the log or on one
  that waits for a Future. A callback must be quick and must not wait for the log. An append
  cannot be cancelled.
- `StoreFault` is final: the log does not know which pending records are stored. Every later
  append fails in the same way until the log is closed and opened again. Then `read` returns
  those that were stored, and they stay.
- A child of a fork must not use the log of its parent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple, Self

Bytes = bytes | bytearray | memoryview


class LogRecord(NamedTuple):
    """One record. The parts are stored as one payload, and must not change until it is stored."""

    epoch: int
    writer: int  # a random number of the process that appends
    number: int
    parts: tuple[Bytes, ...]

    @property
    def payload(self) -> bytes:
        return b"".join(self.parts)


class Tail(NamedTuple):
    """The highest epoch that the log has seen, and the number of the last record, 0 if none."""

    epoch: int
    number: int


class WriteAheadLog(ABC):
    """Records in order, which survive a crash once their append is resolved."""

    # The payload of one record.
    max_record_bytes: int

    @abstractmethod
    def append(self, record: LogRecord) -> Future[int]:
        """Append a record. The Future resolves with its position when it is durable.

        With `durability="interval"` it resolves when a crash of the process cannot lose it; a
        power cut can, until `synced_end` has passed the position.

        Raises `UsageError` for a number or an epoch out of order, `TooLarge` beyond
        `max_record_bytes`, `LimitReached` if too much is pending (retry when appends have
        resolved), `StoreFull` if the log has no room (retry after a trim, or with more room on
        the disk), `StoreFault` and `StoreClosed`.
        """

    @abstractmethod
    def read(self, start: int) -> Iterator[tuple[int, LogRecord]]:
        """Yield positions and records from `start` (inclusive) to the present `end`.

        Raises `Trimmed` if `start` is before the first record or is trimmed while it is read,
        `UsageError` if it is after `end`, and `Damaged` at a record that is not as written.
        """

    @property
    @abstractmethod
    def start(self) -> int:
        """The position of the first record that can be read; `end` if there is none."""

    @property
    @abstractmethod
    def end(self) -> int:
        """The position after the last resolved append."""

    @property
    @abstractmethod
    def synced_end(self) -> int:
        """The position after the last record that a power cut cannot lose."""

    @property
    @abstractmethod
    def tail(self) -> Tail:
        """The epoch that the next owner must exceed, and the number of the last append."""

    @abstractmethod
    def trim(self, before: int) -> None:
        """Forget the records before a position, which is limited to `end`.

        The log may keep some of them: after it was opened again, `start` may be lower. A
        position before `start` has no effect.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the pending appends and release the log.

        Later calls raise `StoreClosed`. Closing again does nothing.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
