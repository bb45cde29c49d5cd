"""The rules of a record that every log checks: its values, and its place after the last one."""

from __future__ import annotations

from typing import Final

from polybus.errors import TooLarge, UsageError
from polybus.store.log.limits import MAX_RECORD_PARTS
from polybus.store.log.write_ahead_log import LogRecord, Tail

MAX_NUMBER: Final = (1 << 63) - 1  # as all positions of the store
MAX_WRITER: Final = (1 << 64) - 1


class RecordOrder:
    """Knows the last record, and which one may follow."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self._has_appended = False  # since the log was opened

    def check(self, record: LogRecord, max_bytes: int) -> int:
        """Return the payload's size. Raises `UsageError` or `TooLarge`."""
        epoch, writer, number, parts = record
        for name, value, most in (
            ("epoch", epoch, MAX_NUMBER),
            ("writer", writer, MAX_WRITER),
            ("number", number, MAX_NUMBER),
        ):
            if not 0 <= value <= most:
                raise UsageError(f"{name} of a record must be 0 to {most}, got {value}")
        if len(parts) > MAX_RECORD_PARTS:
            raise TooLarge(f"a record must have at most {MAX_RECORD_PARTS} parts, got {len(parts)}")
        size = sum([memoryview(part).nbytes for part in parts])
        if size > max_bytes:
            raise TooLarge(f"a record must have at most {max_bytes} bytes, got {size}")
        last = self.tail
        if last.number and number != last.number + 1:
            raise UsageError(f"number of the record must be {last.number + 1}, got {number}")
        if not number:
            raise UsageError("number of the first record must be at least 1")
        least = last.epoch if self._has_appended else last.epoch + 1
        if epoch < least:
            raise UsageError(f"epoch of the record must be at least {least}, got {epoch}")
        return size

    def advance(self, record: LogRecord) -> None:
        self.tail = Tail(record.epoch, record.number)
        self._has_appended = True
