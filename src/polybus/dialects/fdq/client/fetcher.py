"""The fetcher: one thread that reads rows ahead of the executors.

The bus streams rows as they are committed, as many as there is room for. The fetcher stays
ahead by about the rows that the executors process in `HORIZON_S`. More would not help, and
all fetched rows of a consumer that dies are suspect to the next one, which runs them one by
one. Where the executors keep up with new messages, there is nothing to read ahead. Then the
room covers `FOLLOW_S`, because each new request takes time.

Dispatchers choose the executor: for messages by key, for batches by shard. Rows of all shards
of a fetch become lists together, and the executor's lock is taken once per fetch.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from threading import Condition
from typing import TYPE_CHECKING, Any

import xxhash

from polybus.dialects.fdq.client.assigned_shards import AssignedShard
from polybus.dialects.fdq.client.handler_run import (
    MAX_ROWS,
    FetchedRows,
    QueuedBatches,
    QueuedMessages,
    split_runs,
)
from polybus.errors import Expired
from polybus.native.client.group_fetch import shard_runs

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shards import AssignedShards, Committer
    from polybus.dialects.fdq.client.consumer import ConsumeOptions
    from polybus.dialects.fdq.client.executor import Executor
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import QueuedRows

log = logging.getLogger("polybus.fdq")

HORIZON_S = 0.2
FOLLOW_S = 2.0
GROWTH = 4  # factor of the window when a fetch has used all of it
KEEP_UP_RATIO = 8  # the executors keep up if at most 1 of 8 rows has not begun
MAX_FETCH_BYTES = 16 << 20
MAX_BUFFERED_BYTES = 32 << 20
WAIT_MS = round(FOLLOW_S * 1000)
PAUSED_WAIT_MS = 50  # while a shard is paused, which may end soon
ROOM_POLL_S = 1.0
CHUNK_ROWS = 128  # per QueuedRows; room is freed when one is used up
ROW_BYTES = 200  # memory of a message beside its body

ShardSlices = list[tuple["AssignedShard", int, int]]  # shard, first row, number of rows
RowsByExecutor = dict[int, list["QueuedRows"]]


class MessageDispatcher:
    """Dispatches single messages by their key."""

    def __init__(self, executors: int) -> None:
        self._executors = executors

    def dispatch(
        self, batch: pa.RecordBatch, slices: ShardSlices
    ) -> tuple[RowsByExecutor, int, int]:
        """Return the rows by executor, and the number of rows and bytes."""
        rows = FetchedRows(batch)
        by_executor: RowsByExecutor = defaultdict(list)
        count = 0
        for shard, start, length in slices:
            pending: Sequence[int] = range(start, start + length)
            if shard.is_done(rows.offsets[start], rows.offsets[start + length - 1] + 1):
                pending = [at for at in pending if not shard.is_done(rows.offsets[at])]
            count += len(pending)
            chosen: dict[int, Sequence[int]] = {0: pending}
            if self._executors > 1:
                numbers = choose_executors(rows, pending, self._executors)
                chosen = {
                    number: [
                        at for at, other in zip(pending, numbers, strict=True) if other == number
                    ]
                    for number in set(numbers)
                }
            for number, indices in chosen.items():
                by_executor[number] += [
                    QueuedMessages(shard, rows, indices[at : at + CHUNK_ROWS])
                    for at in range(0, len(indices), CHUNK_ROWS)
                ]
        return by_executor, count, sum(map(len, rows.bodies)) + count * ROW_BYTES


class BatchDispatcher:
    """Dispatches batches by their shard."""

    def __init__(self, executors: int, last_attempt: int) -> None:
        self._executors = executors
        self._last_attempt = last_attempt

    def dispatch(
        self, batch: pa.RecordBatch, slices: ShardSlices
    ) -> tuple[RowsByExecutor, int, int]:
        by_executor: RowsByExecutor = defaultdict(list)
        for shard, start, length in slices:
            executor = shard.number % self._executors
            for first, part in _pending_parts(shard, batch.slice(start, length)):
                by_executor[executor] += [
                    QueuedBatches(shard, part.slice(at, MAX_ROWS), first + at, self._last_attempt)
                    for at in range(0, part.num_rows, MAX_ROWS)
                ]
        count = sum(rows.rows for queued in by_executor.values() for rows in queued)
        return by_executor, count, int(batch.nbytes)


def _pending_parts(
    shard: AssignedShard, batch: pa.RecordBatch
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield consecutive rows of one shard that are not done, with their first offset."""
    offsets = batch.column("offset")
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    if last - first + 1 == batch.num_rows and not shard.is_done(first, last + 1):
        yield first, batch
        return
    indices = {offset: index for index, offset in enumerate(offsets.to_pylist())}
    pending = [offset for offset in indices if not shard.is_done(offset)]
    for start, end, _ in split_runs(pending, {}, 1):  # at each row that is done
        yield start, batch.slice(indices[start], end - start)


def choose_executors(rows: FetchedRows, indices: Sequence[int], count: int) -> list[int]:
    """Return the executor of each row.

    It is chosen by the upper half of the key's hash, because the lower half has chosen the
    shard. Rows without a key are spread by their offset.
    """
    keys, offsets = rows.keys, rows.offsets
    hash_key = xxhash.xxh64_intdigest
    return [
        offsets[at] % count if (key := keys[at]) is None else (hash_key(key.encode()) >> 32) % count
        for at in indices
    ]


class FetchWindow:
    """The number of rows that may be fetched and not begun. It has no clock."""

    def __init__(self, least: int, most: int) -> None:
        self.rows = least
        self._least = least
        self._most = most

    def adjust(self, begun_rows: int, passed_s: float, *, left_rows: int) -> None:
        """Adapt to the rows that have begun in `passed_s`, and those that have not begun."""
        keeps_up = left_rows * KEEP_UP_RATIO <= begun_rows
        wanted = (FOLLOW_S if keeps_up else HORIZON_S) * begun_rows / max(passed_s, 1e-6)
        if keeps_up and begun_rows + left_rows >= self.rows:  # fetches are the bottleneck
            wanted = max(wanted, GROWTH * self.rows)
        self.rows = max(self._least, min(self._most, int(wanted)))


def create_window(options: ConsumeOptions) -> FetchWindow:
    if options.batch:
        return FetchWindow(16_384, 262_144)
    return FetchWindow(64 * options.executors, 16_384)


class FetchBuffer:
    """Counts rows that were fetched and have not begun, and waits for room."""

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
                # Sizes of single rows are not kept: free the average.
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
        """Return how many rows may be fetched, or 0 on a timeout."""
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
        options: ConsumeOptions,
        member: GroupMember,
        shards: AssignedShards,
        executors: Sequence[Executor],
        committer: Committer,
        buffer: FetchBuffer,
        on_release: Callable[[], None],
    ) -> None:
        self._on_release = on_release
        self._dispatcher = (
            BatchDispatcher(options.executors, options.max_deliver - 1)
            if options.batch
            else MessageDispatcher(options.executors)
        )
        self._options = options
        self._member = member
        self._shards = shards
        self._executors = executors
        self._committer = committer
        self._buffer = buffer

    def fetch_once(self) -> None:
        """Fetch as soon as there is room, until the room is used up."""
        try:
            self._member.retry(self._follow)
        except Expired:
            pass

    def _follow(self) -> None:
        room = self._buffer.wait_for_room(ROOM_POLL_S)
        if not room:
            return
        # Read before the request: its response is void if all shards are lost meanwhile.
        generation = self._shards.generation
        held = self._shards.describe_held()
        has_paused = any("paused" in entry and not entry["releasing"] for entry in held)
        epochs = {entry["shard"]: entry["epoch"] for entry in held}
        responses = self._member.follow(
            held=held,
            max_rows=room,
            max_bytes=MAX_FETCH_BYTES,
            wait_ms=PAUSED_WAIT_MS if has_paused else WAIT_MS,
        )
        for changes, rows in responses:
            if changes is not None and not self._apply_assignment(changes, epochs, generation):
                return
            if rows is not None:
                self._receive_rows(rows, epochs)

    def _apply_assignment(
        self, changes: dict[str, Any], epochs: dict[int, int], generation: int
    ) -> bool:
        """Apply assignment changes. Returns False if they belong to an earlier generation."""
        for number in changes["lost"]:
            # By the epoch of the request: the shard may be assigned again since.
            lost = self._shards.get(number, epochs.get(number, 0))
            if lost is not None:
                # A released shard may be reported as lost before its release is answered.
                level = logging.INFO if lost.is_releasing else logging.WARNING
                place = self._options.name, number, self._options.topic
                log.log(level, "%s lost shard %s of %s", *place)
                self._shards.drop(lost)
                self._refresh_executors()
        for assignment in changes["assigned"]:
            shard = AssignedShard(assignment, self._options.executors)
            shard.committer = self._committer
            if not self._shards.put(shard, generation):
                return False
            epochs[shard.number] = shard.epoch
        self.release_shards(changes["release"])
        sealed = [self._shards.get(n, epochs.get(n, 0)) for n in changes.get("sealed", ())]
        for shard in filter(None, sealed):
            shard.is_sealed = True
            self._on_release()  # the acker must not wait for its next round
        return True

    def _receive_rows(self, rows: pa.RecordBatch, epochs: dict[int, int]) -> None:
        offsets, slices = rows.column("offset"), []
        for number, start, count in shard_runs(rows):
            shard = self._shards.get(number, epochs.get(number, 0))
            if shard is not None:
                shard.next = offsets[start + count - 1].as_py() + 1
                if shard.is_open:
                    slices.append((shard, start, count))
        if not slices:
            return
        by_executor, row_count, size_bytes = self._dispatcher.dispatch(rows, slices)
        self._buffer.add(row_count, size_bytes)
        for number, queued in by_executor.items():
            self._executors[number].push(queued)
        time.sleep(0)  # yield the GIL to the executors before the next fetch

    def release_shards(self, numbers: list[int]) -> None:
        """Start no more runs of shards that the bus wants back."""
        started = [number for number in numbers if self._shards.start_release(int(number))]
        if started:
            self._refresh_executors()
            self._on_release()

    def _refresh_executors(self) -> None:
        for executor in self._executors:
            executor.refresh()
