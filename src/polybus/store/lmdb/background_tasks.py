"""Background tasks of the writer: expired leases, removal, re-blocking, dead readers.

Each runs in steps of a few milliseconds. While commits keep arriving, the tasks take at
most `SHARE` of the time, so that they delay no commit for long and still make progress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from polybus.store.lmdb.reblocker import Reblocker
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.write_txn import TransactionWriter
from polybus.store.lmdb.writer_state import WriterState

STEP_S: Final = 0.002
SHARE: Final = 0.05
# Commits keep arriving if the last one is more recent than this. A load of a thousand commits
# per second has gaps, too, and a commit at the end of a gap would wait for a step.
RECENT_S: Final = 0.05
# Pause after a task failed, for example because the disk is full; doubled on each failure.
PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
# Dead readers keep LMDB from reusing pages. They are looked for every READERS_S, and when the
# file has grown by GROWN_PAGES, because they may be the cause.
READERS_S: Final = 10.0
GROWN_PAGES: Final = 2048


class BackgroundTasks:
    def __init__(
        self,
        state: WriterState,
        files: StoreFiles,
        txn_writer: TransactionWriter,
        reblocker: Reblocker,
    ) -> None:
        self._state = state
        self._files = files
        self._txn_writer = txn_writer
        self.reblocker = reblocker
        self._readers_s = time.monotonic() + READERS_S
        self._pages = files.current.pages
        self._not_before_s = 0.0
        self._busy_s = -math.inf  # time of the last commit
        self._pause_s = PAUSE_S

    def wait_s(self, due_s: float | None = None) -> float:
        """Return how long the writer may sleep, 0 if a task is due.

        `due_s` is the time of the writer's own next step.
        """
        now = time.monotonic()
        next_s = self._readers_s
        if self._txn_writer.has_removals or self.reblocker.due:
            next_s = self._not_before_s
        else:
            lease_s = self._state.leases.next_expiry_s()
            if lease_s is not None:
                next_s = min(next_s, max(now + lease_s, self._not_before_s))
        if due_s is not None:
            next_s = min(next_s, due_s)
        return max(0.0, next_s - now)

    def is_paused(self) -> bool:
        return time.monotonic() < self._not_before_s

    def run_step(self, busy: bool, settle: Callable[[], None] = lambda: None) -> None:
        """Run one step if a task is due.

        `busy` means that a commit was just written. `settle` is called before the store is
        changed; it must wait until no batch is in flight.
        """
        now = time.monotonic()
        if busy:
            self._busy_s = now
        pages = self._files.current.pages
        if now >= self._readers_s or pages > self._pages + GROWN_PAGES:
            self._readers_s, self._pages = now + READERS_S, pages
            self._files.current.clear_dead_readers()
            self._txn_writer.reserve.fill()
        has_work = self._txn_writer.has_removals or self.reblocker.due
        if not has_work or now < self._not_before_s:
            return
        settle()
        now = time.monotonic()
        # Removal comes first: it frees pages, which the merges can use.
        if self._txn_writer.has_removals:
            self._txn_writer.remove_some(STEP_S)
        else:
            self.reblocker.step()
        self._pause_s = PAUSE_S
        took = time.monotonic() - now
        is_busy = now - self._busy_s < RECENT_S
        # After a step of 2 ms at a share of 5 % the next one comes after 40 ms.
        self._not_before_s = now + took / SHARE if is_busy else 0.0

    def resume(self) -> None:
        """End a pause: there is room again."""
        self._not_before_s, self._pause_s = 0.0, PAUSE_S

    def pause(self) -> None:
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
