"""The memory log: the contract without a disk, for tests and for stores that keep no files."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice

from polybus.errors import PolybusError, StoreClosed, StoreFull, Trimmed, UsageError
from polybus.store.log import limits
from polybus.store.log.codec import record_bytes
from polybus.store.log.record_order import RecordOrder
from polybus.store.log.write_ahead_log import LogRecord, Tail, WriteAheadLog


class InMemoryLog(WriteAheadLog):
    """Its appends are resolved when `append` returns, on the thread of the caller."""

    max_record_bytes = limits.MAX_RECORD_BYTES

    def __init__(self, max_bytes: int = limits.SEGMENT_BYTES * limits.SEGMENT_COUNT) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._records: deque[LogRecord] = deque()
        self._bytes = 0
        self._end = 1
        self._order = RecordOrder(Tail(0, 0))
        self._is_closed = False

    def append(self, record: LogRecord) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        try:
            with self._lock:
                self._check_open()
                size = record_bytes(self._order.check(record, self.max_record_bytes))
                if self._bytes + size > self._max_bytes:
                    raise StoreFull(
                        f"the log is full: {self._bytes} bytes are in use; "
                        "retry after records are trimmed"
                    )
                self._order.advance(record)
                self._records.append(record._replace(parts=(record.payload,)))
                self._bytes += size
                self._end = record.number + 1
        except PolybusError as error:
            future.set_exception(error)
        else:
            future.set_result(record.number)
        return future

    def read(self, start: int) -> Iterator[tuple[int, LogRecord]]:
        with self._lock:
            self._check_open()
            if start > self._end:
                raise UsageError(f"position must be at most {self._end}, got {start}")
            if start < self.start:
                raise Trimmed(f"records before {self.start} are trimmed, got {start}", self.start)
            kept = list(islice(self._records, start - self.start, None))
        return ((record.number, record) for record in kept)

    @property
    def start(self) -> int:
        return self._end - len(self._records)

    @property
    def end(self) -> int:
        return self._end

    @property
    def synced_end(self) -> int:
        return self._end

    @property
    def tail(self) -> Tail:
        return self._order.tail

    def trim(self, before: int) -> None:
        with self._lock:
            self._check_open()
            while self._records and self._records[0].number < before:
                gone = self._records.popleft()
                self._bytes -= record_bytes(len(gone.payload))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the log was closed")
