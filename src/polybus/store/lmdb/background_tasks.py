"""What the writer does besides: leases that ran out, removal, re-blocking, dead readers.

Each is done in steps of a few milliseconds. While commits keep coming, chores take at
most `SHARE` of the time, so that they hold up nobody and still get done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from polybus.store.lmdb import staged_blocks
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.write_txn import TransactionWriter
from polybus.store.lmdb.writer_state import WriterState

if TYPE_CHECKING:
    from polybus.store.lmdb.reblocker import Reblocker
    from polybus.store.lmdb.write_batch import WriteBatch

STEP_S: Final = 0.003
SHARE: Final = 0.05
# Commits keep coming if the last one was so recent: what comes a thousand times a second leaves
# gaps, too, and whoever came at their end would wait for a step.
RECENT_S: Final = 0.05
# After a chore failed, say because the disk is full: so long, then twice as long each time.
PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
# Dead readers keep pages from being used again: looked for so often, and whenever the file
# has grown by so many pages, for it may be their fault.
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
        self._reblocker = reblocker
        self._readers_s = time.monotonic() + READERS_S
        self._pages = files.current.pages
        self._not_before_s = 0.0
        self._busy_s = -math.inf  # when there was a commit last
        self._pause_s = PAUSE_S

    def note_batch(self, batch: WriteBatch) -> None:
        """What the batch brings for the re-blocker to do; before its blocks are encoded."""
        self._reblocker.add_small_bytes(batch.small_bytes())

    def wait_s(self) -> float:
        """How long the writer may sleep: 0 if there is something to be done."""
        now = time.monotonic()
        if self._pending():
            return max(0.0, self._not_before_s - now)
        lease_s = self._state.leases.next_expiry_s()
        readers_s = max(0.0, self._readers_s - now)
        if lease_s is None:
            return readers_s
        return min(max(lease_s, self._not_before_s - now), readers_s)

    def expiry_task(self) -> Callable[[WriterState, None, int], None] | None:
        """A task that collects the stages whose leases ran out, if there are any."""
        stages = self._state.leases.expired()
        if not stages or time.monotonic() < self._not_before_s:
            return None

        def collect(state: WriterState, _subject: None, _now_ns: int) -> None:
            for stage in stages:
                staged_blocks.collect(state, stage)

        return collect

    def run_step(self, busy: bool, settle: Callable[[], None] = lambda: None) -> None:
        """One step, if there is something to do and it is the time for it.

        `busy`: there was a commit just now. `settle` is called before the store is changed.
        """
        now = time.monotonic()
        if busy:
            self._busy_s = now
        self._clear_dead_readers(now)
        if not self._pending() or now < self._not_before_s:
            return
        settle()
        now = time.monotonic()
        if self._txn_writer.has_removals:
            self._txn_writer.remove_some(STEP_S)
        else:
            self._reblocker.step()
        self._pause_s = PAUSE_S
        took = time.monotonic() - now
        is_busy = now - self._busy_s < RECENT_S
        self._not_before_s = now + took / SHARE if is_busy else 0.0

    def pause(self) -> None:
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _clear_dead_readers(self, now: float) -> None:
        pages = self._files.current.pages
        if now >= self._readers_s or pages > self._pages + GROWN_PAGES:
            self._readers_s, self._pages = now + READERS_S, pages
            self._files.current.clear_dead_readers()

    def _pending(self) -> bool:
        return self._txn_writer.has_removals or self._reblocker.is_due()
