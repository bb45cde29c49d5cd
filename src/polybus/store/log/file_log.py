"""The file log: segments in a folder, one write and one fdatasync per group of appends.

    FOLDER/owner.lock                    locked by the owner (`folder_ownership`)
    FOLDER/0000000000000007.segment      (`segment`, `segment_pool`)

An append reserves its place and is pending. One thread at a time takes the pending records of
one segment, writes them with one call, syncs, and resolves their Futures (group commit). This
is the log's own thread, or a caller that waits for a Future: then no other thread has to wake
up for a lone append.

A failed write or sync is final, because the kernel may have dropped the data and a second sync
would succeed without it. Nothing pending is answered as stored; recovery finds out what is.
"""

from __future__ import annotations

import logging
import secrets
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Final

from polybus.errors import (
    Damaged,
    LimitReached,
    PolybusError,
    StoreClosed,
    StoreFault,
    Trimmed,
    UsageError,
)
from polybus.kernel.task_future import TaskFuture
from polybus.store import folder_ownership
from polybus.store.engine import COMMIT_INTERVAL_MS, Durability
from polybus.store.folder_names import make_folder, sync_folder
from polybus.store.log import codec, limits
from polybus.store.log.codec import HEAD_BYTES, SEGMENT_HEADER_BYTES
from polybus.store.log.record_order import RecordOrder
from polybus.store.log.recovery import LogEnd, UsedSegment, recover
from polybus.store.log.segment import PAGE_BYTES, Segment, open_segments
from polybus.store.log.segment_pool import SegmentPool, explain_error
from polybus.store.log.write_ahead_log import Bytes, LogRecord, Tail, WriteAheadLog

_ZEROS: Final = bytes(PAGE_BYTES)

_log = logging.getLogger("polybus.store")


class AppendFuture(TaskFuture, Future[int]):
    """The future of an append, with its record and its place."""

    def __init__(self, log: FileLog, record: LogRecord) -> None:
        super().__init__(None, record)  # the subject is freed when the future is done
        self.set_running_or_notify_cancel()  # an append cannot be cancelled
        self.log = log
        self.length = 0  # of the payload
        self.segment: Segment | None = None
        self.offset = 0

    def result(self, timeout: float | None = None) -> int:
        """Return the position. Without a timeout, this thread may write the pending records."""
        if timeout is None:
            self.log.write_for(self)
        return super().result(timeout)


class FileLog(WriteAheadLog):
    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability = "fsync",
        commit_interval_ms: int = COMMIT_INTERVAL_MS,
        segment_bytes: int = limits.SEGMENT_BYTES,
        segment_count: int = limits.SEGMENT_COUNT,
    ) -> None:
        """Own and recover the log in a folder, created if it is missing.

        `segment_bytes` is for a new log; an existing one keeps its size.

        Raises `DataFolderInUse`, `Damaged`, `WrongFormat`, `StoreFault` and `StoreFull`.
        """
        least, most = limits.LEAST_SEGMENT_BYTES, limits.MOST_SEGMENT_BYTES
        if not least <= segment_bytes <= most or segment_bytes % PAGE_BYTES:
            raise UsageError(
                f"segment_bytes must be {least} to {most} and a multiple of {PAGE_BYTES}, "
                f"got {segment_bytes}"
            )
        if segment_count < 2:
            raise UsageError(f"segment_count must be at least 2, got {segment_count}")
        self._folder = folder
        self._interval_s = commit_interval_ms / 1000 if durability == "interval" else None
        # Guards everything below, and is notified of segments, a fault and the close.
        self._changed = threading.Condition(threading.Lock())
        self._pending: deque[AppendFuture] = deque()
        self._pending_bytes = 0
        self._fault: StoreFault | None = None
        self._is_closed = False
        segments, end = _open(folder, segment_bytes)
        self._log_id = segments[0].log_id
        self._segment_bytes = segments[0].size
        room = self._segment_bytes - SEGMENT_HEADER_BYTES - 2 * HEAD_BYTES  # with a mark
        self.max_record_bytes = min(limits.MAX_RECORD_BYTES, room)
        self._order = RecordOrder(end.tail)
        self._start = self._first = end.used[0].first or 1
        self._end = end.tail.number + 1
        self._synced = end.tail.number  # the number of the last record that is on disk, or 0
        self._offset = end.offset  # of the next append, in the last used segment
        self._pool = SegmentPool(folder, segments, end, segment_count, self._changed)
        self._pool.start()
        self._turn = threading.Lock()  # held by the thread that writes and resolves
        self._wakeup = threading.Lock()  # released when there is work for the log's thread
        self._wakeup.acquire()
        self._unsynced: set[Segment] = set()  # with intervals
        self._sync_turn = threading.Lock()  # held by the thread that syncs them
        self._threads = [threading.Thread(target=self._run, name="polybus-log", daemon=True)]
        if self._interval_s is not None:
            name = "polybus-log-sync"
            self._threads.append(threading.Thread(target=self._sync_often, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    # --- appends

    def append(self, record: LogRecord) -> Future[int]:
        future = AppendFuture(self, record)
        try:
            with self._changed:
                self._accept(future)
        except PolybusError as error:
            future.set_exception(error)
        return future

    def _accept(self, future: AppendFuture) -> None:
        """Check an append and give it its place."""
        self._check_usable()
        record: LogRecord = future.subject
        future.length = length = self._order.check(record, self.max_record_bytes)
        if len(self._pending) >= limits.MAX_PENDING:
            raise LimitReached("MAX_PENDING", f"{limits.MAX_PENDING} appends are pending; retry")
        if self._pending_bytes + length > limits.MAX_PENDING_BYTES:
            text = f"pending appends must have at most {limits.MAX_PENDING_BYTES} bytes; retry"
            raise LimitReached("MAX_PENDING_BYTES", text)
        size = codec.record_bytes(length)
        # The mark of a clean close must fit behind every record.
        if self._offset + size + HEAD_BYTES > self._segment_bytes:
            segment = self._pool.take_ready(self._check_usable)
            self._pool.used.append(UsedSegment(segment, record.number))
            self._offset = SEGMENT_HEADER_BYTES
        if not self._order.tail.number:  # the first record of all sets the numbers
            self._pool.used[0].first = self._start = self._first = self._end = record.number
        future.segment, future.offset = self._pool.used[-1].segment, self._offset
        self._offset += size
        if self._offset > self._segment_bytes // 2:
            self._pool.prepare_next()
        self._order.advance(record)
        self._pending.append(future)
        self._pending_bytes += length
        if self._wakeup.locked():
            self._wakeup.release()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StoreClosed("the log was closed")
        if self._fault is not None:
            raise copy(self._fault)

    # --- groups

    def write_for(self, future: AppendFuture) -> None:
        """Write pending records until this one is resolved, unless another thread writes."""
        while not future.done() and self._turn.acquire(blocking=False):
            try:
                self._write_group()
            finally:
                self._turn.release()

    def _run(self) -> None:
        """Write the records that no caller waits for: the log's own thread."""
        while True:
            self._wakeup.acquire()
            is_last = self._is_closed  # read before the queue: nothing is added after it is set
            with self._turn:
                while self._write_group():
                    pass
            if is_last:
                return

    def _write_group(self) -> bool:
        """Write the oldest pending records, sync, and resolve them. Returns False if none was."""
        with self._changed:
            group = self._take_group()
            synced = self._synced
        if not group:
            return False
        try:
            segment = group[0].segment
            assert segment is not None
            segment.write(self._encode(group, synced), group[0].offset)
            if self._interval_s is None:
                segment.sync()
        except BaseException as error:
            self._fail(error, group)
            if not isinstance(error, Exception):
                raise
            return False
        with self._changed:
            self._end = group[-1].subject.number + 1
            if self._interval_s is None:
                self._synced = self._end - 1
                self._free_segments()
            else:
                self._unsynced.add(segment)
            self._pending_bytes -= sum([future.length for future in group])
        for future in group:
            future.set_result(future.subject.number)
        return True

    def _encode(self, group: list[AppendFuture], synced: int) -> list[Bytes]:
        buffers: list[Bytes] = []
        for future in group:
            buffers += codec.encode_record(self._log_id, future.subject, future.length, synced)
        end = group[-1].offset + codec.record_bytes(group[-1].length)
        # A page that is written as a whole need not be read from the disk first. There is room,
        # because a segment ends with a page.
        buffers.append(_ZEROS[: -end % PAGE_BYTES])
        return buffers

    def _take_group(self) -> list[AppendFuture]:
        group: list[AppendFuture] = []
        buffers = size = 0
        while self._pending and buffers < limits.GROUP_BUFFERS and size < limits.GROUP_BYTES:
            first = self._pending[0]
            if group and first.segment is not group[0].segment:
                break  # one write is in one file
            buffers += len(first.subject.parts) + 2
            if group and buffers > limits.GROUP_BUFFERS:
                break
            size += first.length
            group.append(self._pending.popleft())
        return group

    def _fail(self, error: BaseException, group: list[AppendFuture]) -> None:
        """Refuse everything from now on. The caller holds the turn, or nothing is pending."""
        text = f"writing the log failed: {error!r}; close it and open it again to recover"
        with self._changed:
            if self._fault is None:
                _log.error("%s", text)
                self._fault = StoreFault(text)
            group = [*group, *self._pending]
            self._pending.clear()
            self._pending_bytes = 0
            self._changed.notify_all()
        for future in group:
            future.set_exception(copy(self._fault))

    # --- syncs at intervals

    def _sync_often(self) -> None:
        interval_s = self._interval_s
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, interval_s):
                    return
            self._sync_written()

    def _sync_written(self) -> None:
        """Sync what was written before this call. Writes go on meanwhile."""
        with self._sync_turn:
            with self._changed:
                end, segments = self._end, self._unsynced
                self._unsynced = set()
            try:
                for segment in segments:
                    segment.sync()
            except OSError as error:
                with self._turn:
                    self._fail(error, [])
                return
            with self._changed:
                if self._fault is None:
                    self._synced = max(self._synced, end - 1)

    # --- reads

    def read(self, start: int) -> Iterator[tuple[int, LogRecord]]:
        with self._changed:
            if self._is_closed:
                raise StoreClosed("the log was closed")
            end = self._end
            if start > end:
                raise UsageError(f"position must be at most {end}, got {start}")
            self._check_kept(start)
            if start == end:
                return iter(())
            used = list(self._pool.used)
        index = max(0, bisect_right([one.first for one in used], start) - 1)
        return self._records(used[index:], start, end)

    def _records(
        self, used: list[UsedSegment], start: int, end: int
    ) -> Iterator[tuple[int, LogRecord]]:
        number, place = used[0].first, (used[0].segment, SEGMENT_HEADER_BYTES)
        for one in used:
            if number != one.first:
                break
            place = one.segment, SEGMENT_HEADER_BYTES
            for entry in one.segment.scan():
                head = entry.head
                if number >= end or head.number != number or head.kind != codec.RECORD:
                    break
                codec.check_version(head, f"{one.segment.path} at offset {entry.offset}")
                # The bytes were read before this check, so no other record has replaced them.
                self._check_kept(max(number, start))
                if number >= start:
                    yield number, LogRecord(head.epoch, head.writer, number, (entry.payload,))
                number, place = number + 1, (one.segment, entry.end)
            if number >= end:
                return
        self._check_kept(max(number, start))
        segment, offset = place
        raise Damaged(f"{segment.path} at offset {offset}: record {number} is damaged")

    def _check_kept(self, position: int) -> None:
        if position < self._start:
            raise Trimmed(f"records before {self._start} are trimmed, got {position}", self._start)

    @property
    def start(self) -> int:
        return self._start

    @property
    def end(self) -> int:
        return self._end

    @property
    def synced_end(self) -> int:
        return self._synced + 1 if self._synced else self._first

    @property
    def tail(self) -> Tail:
        return self._order.tail

    # --- trim and close

    def trim(self, before: int) -> None:
        with self._changed:
            if self._is_closed:
                raise StoreClosed("the log was closed")
            self._start = max(self._start, min(before, self._end))
            needs_sync = self._pool.has_before(self._start) and self._start > self._synced
        if needs_sync and self._interval_s is not None:
            self._sync_written()
        with self._changed:
            self._free_segments()

    def _free_segments(self) -> None:
        # The oldest segment must begin with a record that a power cut cannot lose: otherwise
        # the log could come back without any, and its numbers would begin again.
        self._pool.free_before(min(self._start, self._synced))

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            if self._wakeup.locked():
                self._wakeup.release()
        for thread in self._threads:
            thread.join()
        self._sync_written()
        if self._fault is None:
            self._mark_closed()
        self._pool.close()
        folder_ownership.release(self._folder)

    def _mark_closed(self) -> None:
        """Write the mark of a clean close. Without it the next owner reads all records."""
        tail, segment = self._order.tail, self._pool.used[-1].segment
        mark = codec.encode_mark(self._log_id, tail.number + 1, tail.epoch)
        with suppress(OSError):
            segment.write([mark], self._offset)
            segment.sync()


def _open(folder: Path, segment_bytes: int) -> tuple[list[Segment], LogEnd]:
    """Own a folder, and recover its segments; the first one is created if there is none."""
    segments: list[Segment] = []
    is_owned = False
    try:
        make_folder(folder)
        folder_ownership.take(folder)
        is_owned = True
        # A former owner may have been killed between a rename and its sync.
        sync_folder(folder)
        segments = open_segments(folder)
        if not segments:
            log_id = secrets.randbits(64)
            segments = [Segment.create(folder, 1, segment_bytes, log_id)]
        return segments, recover(segments)
    except BaseException as error:
        for segment in segments:
            segment.close()
        if is_owned:
            folder_ownership.release(folder)
        if isinstance(error, OSError):
            raise explain_error(f"the log in {folder} cannot be opened", error) from error
        raise
