"""The segments of an open log: used ones, and those that are ready for the next records.

A thread prepares segments ahead of need, because that takes long and may fail on a full disk:
it renames trimmed ones, or creates new ones up to the limit. So no append waits for it, unless
records come faster than zeros can be written, and no acknowledged write depends on free space.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Final

from polybus.errors import PolybusError, StoreFault, StoreFull
from polybus.store.folder_names import sync_folder
from polybus.store.log.recovery import LogEnd
from polybus.store.log.segment import Segment

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger("polybus.store")


class SegmentPool:
    """All methods but `start` and `close` need the lock of `changed`, which the log owns."""

    def __init__(
        self,
        folder: Path,
        segments: list[Segment],
        end: LogEnd,
        limit: int,
        changed: threading.Condition,
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._changed = changed
        self._size, self._log_id = segments[0].size, segments[0].log_id
        self.used = end.used
        self._ready = deque(segments[len(end.used) :])
        self._freed: deque[Segment] = deque()  # trimmed, and not yet renamed
        self._sequence = segments[-1].sequence
        self._count = len(segments)
        self._is_wanted = False  # the thread has work to try
        self._failure: PolybusError | None = None  # of its last try
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="polybus-segments", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def prepare_next(self) -> None:
        """Have a segment ready soon."""
        if not self._ready and not self._is_wanted and (self._freed or self._count < self._limit):
            self._is_wanted = True
            self._changed.notify_all()

    def take_ready(self, check: Callable[[], None]) -> Segment:
        """Return the next segment; waits while it is prepared.

        Raises `StoreFull` if there can be none now, and what `check` of the log raises.
        """
        while True:
            check()
            if self._ready:
                return self._ready.popleft()
            failure = self._failure
            self.prepare_next()
            if failure is not None:  # refused at once; the thread tries again for later appends
                raise copy(failure)
            if not self._is_wanted:
                raise StoreFull(
                    f"the log is full: {self._limit * self._size} bytes are in use; "
                    "retry after records are trimmed"
                )
            self._changed.wait()

    def has_before(self, start: int) -> bool:
        """Return whether all records of the oldest segment are before a number."""
        return len(self.used) > 1 and self.used[1].first <= start

    def free_before(self, start: int) -> None:
        """Reuse the segments whose records are all before a number."""
        while self.has_before(start):
            self._freed.append(self.used.pop(0).segment)
        if self._freed and not self._is_wanted:
            self._is_wanted = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        for segment in (*(used.segment for used in self.used), *self._ready, *self._freed):
            segment.close()

    # --- on the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_closed)
                if self._is_closed:
                    return
                freed = self._freed[0] if self._freed else None
            try:
                self._prepare(freed)
            except OSError as error:
                self._note_failure(error)

    def _prepare(self, freed: Segment | None) -> None:
        """Prepare one segment: rename a freed one, or create one. Raises OSError."""
        sequence = self._sequence + 1
        is_surplus = freed is not None and self._count > self._limit  # the limit was lowered
        if freed is None:
            segment = Segment.create(self._folder, sequence, self._size, self._log_id)
        else:
            segment = freed
            if is_surplus:
                segment.path.unlink(missing_ok=True)
                sync_folder(self._folder)
                segment.close()
            else:
                segment.move_to(sequence)
        with self._changed:
            if freed is not None:
                self._freed.popleft()
            self._count += (freed is None) - is_surplus
            if not is_surplus:
                self._sequence = sequence
                self._ready.append(segment)
            self._failure = None
            self._is_wanted = bool(self._freed)
            self._changed.notify_all()

    def _note_failure(self, error: OSError) -> None:
        _log.warning("a segment of the log could not be prepared: %s", error)
        with self._changed:
            self._failure = explain_error("no segment of the log could be prepared", error)
            self._is_wanted = False
            self._changed.notify_all()


def explain_error(what: str, error: OSError) -> PolybusError:
    kind = StoreFull if error.errno in FULL else StoreFault
    return kind(f"{what}: {error}")
