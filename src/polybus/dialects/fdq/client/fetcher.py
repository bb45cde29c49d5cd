"""The thread that fetches, a little ahead of the executors.

It follows: the bus tells of rows as they are committed, as many as there is room for.

How far ahead follows how fast they are: about as much as they do in `HORIZON_S`. More would
be of no use, and all that was fetched by a consumer that dies is suspect to the next one,
who then runs it with care. Where they keep up with what comes, there is nothing to be ahead
of: then there is room for as long as the bus may be followed, since to ask anew takes time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition
from typing import TYPE_CHECKING, Any

from polybus.dialects.fdq.client import dispatcher
from polybus.dialects.fdq.client.assigned_shard import AssignedShard
from polybus.errors import Expired
from polybus.native.client.group_fetch import shard_runs

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shard import Committer
    from polybus.dialects.fdq.client.assigned_shards import AssignedShards
    from polybus.dialects.fdq.client.consume_options import ConsumeOptions
    from polybus.dialects.fdq.client.executor import Executor
    from polybus.dialects.fdq.client.group_member import GroupMember

log = logging.getLogger("polybus.fdq")

HORIZON_S = 0.2
FOLLOW_S = 2.0
GROWTH = 4  # of the room, where all of it was used up
KEEP_UP_RATIO = 8  # of so many rows that came one may still wait
MAX_FETCH_BYTES = 16 << 20
MAX_BUFFERED_BYTES = 32 << 20
WAIT_MS = round(FOLLOW_S * 1000)
PAUSED_WAIT_MS = 50  # some shard wants no rows now, and may want them soon
ROOM_POLL_S = 1.0


class FetchWindow:
    """How many rows may be fetched and not begun. No clock: times are passed in."""

    def __init__(self, least: int, most: int) -> None:
        self.rows = least
        self._least = least
        self._most = most

    def adjust(self, begun_rows: int, passed_s: float, *, left_rows: int) -> None:
        """What was begun since the last time, and what is still to begin."""
        keeps_up = left_rows * KEEP_UP_RATIO <= begun_rows
        wanted = (FOLLOW_S if keeps_up else HORIZON_S) * begun_rows / max(passed_s, 1e-6)
        if keeps_up and begun_rows + left_rows >= self.rows:  # it is the fetches that are slow
            wanted = max(wanted, GROWTH * self.rows)
        self.rows = max(self._least, min(self._most, int(wanted)))


def create_window(terms: ConsumeOptions) -> FetchWindow:
    return (
        FetchWindow(16_384, 262_144) if terms.batch else FetchWindow(64 * terms.executors, 16_384)
    )


class FetchBuffer:
    """Counts what was fetched and has not begun, and waits until that is little."""

    def __init__(self, window: FetchWindow) -> None:
        self._window = window
        self._changed = Condition()
        self._rows = 0
        self._bytes = 0
        self._begun = 0
        self._since_s = time.monotonic()
        self.is_closed = False

    def add(self, rows: int, size_bytes: int) -> None:
        with self._changed:
            self._rows += rows
            self._bytes += size_bytes

    def free(self, rows: int) -> None:
        with self._changed:
            if self._rows:
                self._bytes -= self._bytes * min(rows, self._rows) // self._rows
            self._rows = max(0, self._rows - rows)
            self._begun += rows
            if self._has_room():
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> int:
        """How many rows may be fetched; 0 if there was no room for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._has_room(), timeout_s)
            if self.is_closed or not self._has_room():
                return 0
            now_s = time.monotonic()
            if self._begun:
                passed_s = now_s - self._since_s
                self._window.adjust(self._begun, passed_s, left_rows=self._rows)
            self._begun, self._since_s = 0, now_s
            return max(self._window.rows - self._rows, 1)

    def _has_room(self) -> bool:
        return self._rows <= self._window.rows // 2 and self._bytes < MAX_BUFFERED_BYTES


class Fetcher:
    def __init__(
        self,
        terms: ConsumeOptions,
        member: GroupMember,
        holdings: AssignedShards,
        executors: Sequence[Executor],
        committer: Committer,
        buffer: FetchBuffer,
        on_release: Callable[[], None],
    ) -> None:
        self._on_release = on_release
        self._dealer = (
            dispatcher.BatchDispatcher(terms.executors, terms.max_deliver - 1)
            if terms.batch
            else dispatcher.MessageDispatcher(terms.executors)
        )
        self._terms = terms
        self._member = member
        self._holdings = holdings
        self._executors = executors
        self._committer = committer
        self._buffer = buffer

    def fetch_once(self) -> None:
        """One fetch, as soon as there is room for it; it goes on until that is used up."""
        try:
            self._member.retry(self._follow)
        except Expired:
            pass

    def _follow(self) -> None:
        room = self._buffer.wait_for_room(ROOM_POLL_S)
        if not room:
            return
        generation = self._holdings.generation
        held = self._holdings.describe_held()
        waits = any("paused" in one and not one["releasing"] for one in held)
        epochs = {one["shard"]: one["epoch"] for one in held}
        following = self._member.follow(
            held=held,
            max_rows=room,
            max_bytes=MAX_FETCH_BYTES,
            wait_ms=PAUSED_WAIT_MS if waits else WAIT_MS,
        )
        for told, rows in following:
            if told is not None and not self._apply_assignment(told, epochs, generation):
                return
            if rows is not None:
                self._receive_rows(rows, epochs)

    # --- what came

    def _apply_assignment(
        self, told: dict[str, Any], epochs: dict[int, int], generation: int
    ) -> bool:
        """What has changed about its shards. False if that was in a former life."""
        self._drop_lost(told["lost"], epochs)
        for given in told["assigned"]:
            shard = AssignedShard(given, self._terms.executors)
            shard.committer = self._committer
            if not self._holdings.put(shard, generation):
                return False
            epochs[shard.number] = shard.epoch
        self.release_shards(told["release"])
        return True

    def _receive_rows(self, rows: pa.RecordBatch, epochs: dict[int, int]) -> None:
        offsets, found = rows.column("offset"), []
        for number, start, count in shard_runs(rows):
            held = self._holdings.get(number, epochs.get(number, 0))
            if held is not None:
                held.next = offsets[start + count - 1].as_py() + 1
                if held.is_open:
                    found.append((held, start, count))
        if found:
            self._dispatch_rows(rows, found)

    def _dispatch_rows(
        self, batch: pa.RecordBatch, found: list[tuple[AssignedShard, int, int]]
    ) -> None:
        dealt, rows, size_bytes = self._dealer.dispatch(batch, found)
        self._buffer.add(rows, size_bytes)
        for number, pieces in dealt.items():
            self._executors[number].push(pieces)
        time.sleep(0)  # executors first, who wait for this thread's turn to end

    def release_shards(self, numbers: list[int]) -> None:
        """Shards that others are waiting for: nothing more of them is begun."""
        news = [number for number in numbers if self._holdings.start_release(int(number))]
        if news:
            self._refresh_executors()
            self._on_release()

    def _drop_lost(self, numbers: list[int], epochs: dict[int, int]) -> None:
        """By the epochs that were asked with: since then they may have come back.

        One that was released may be told as lost before its release is answered.
        """
        for number in numbers:
            shard = self._holdings.get(number, epochs.get(number, 0))
            if shard is not None:
                level = logging.INFO if shard.is_releasing else logging.WARNING
                place = self._terms.name, number, self._terms.topic
                log.log(level, "%s lost shard %s of %s", *place)
                self._holdings.drop(shard)
                self._refresh_executors()

    def _refresh_executors(self) -> None:
        for executor in self._executors:
            executor.refresh()
