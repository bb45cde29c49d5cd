"""Stages: blocks that are stored, and that nobody sees until a commit publishes them.

A staged block is keyed by stage, topic, shard and its first place among the messages
that the stage holds for the shard. What a stage holds for each shard is counted, so
that publishing never looks at the blocks: it costs a little for each stage and shard.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from polybus.errors import StageGone
from polybus.model.commit import Append
from polybus.store import request_checks
from polybus.store.lmdb import log_entry, store_keys, stored_values
from polybus.store.lmdb.log_entry import LogEntry, StagePart
from polybus.store.lmdb.writer_state import StageState, WriterState


def open_stage(books: WriterState, lease_s: float) -> str:
    number = books.next_number("stage") << 32 | secrets.randbits(32)
    books.cache.stages[number] = StageState(lease_s)
    books.batch.put(store_keys.stage(number), stored_values.STAGE.pack(lease_s))
    books.leases.start(number, lease_s)
    return f"{number:016x}"


def add_blocks(books: WriterState, name: str, appends: Sequence[Append]) -> None:
    number = stage_number(name)
    stage = find_stage(books, number, name)
    for append in appends:
        request_checks.open_shard(books.cache.topic(append.topic).topic, append.shard)
    for append in appends:
        _add(books, number, stage, append)


def renew(books: WriterState, name: str, lease_s: float) -> None:
    number = stage_number(name)
    stage = find_stage(books, number, name)
    if stage.lease_s != lease_s:
        stage.lease_s = lease_s
        books.batch.put(store_keys.stage(number), stored_values.STAGE.pack(lease_s))
    books.leases.start(number, lease_s)


def discard(books: WriterState, name: str) -> None:
    try:
        number = stage_number(name)
    except StageGone:
        return
    collect(books, number)


def collect(books: WriterState, number: int) -> None:
    """Removes a stage, whether its lease holds or not; its blocks go later."""
    stage = books.cache.stage(number)
    books.leases.end(number)
    if stage is not None:
        _forget(books, number, stage)
        books.batch.put(store_keys.unstaged(number), b"")
        books.batch.has_removals = True


def find_stage(books: WriterState, number: int, name: str) -> StageState:
    stage = books.cache.stage(number) if books.leases.is_active(number) else None
    if stage is None:
        raise StageGone(f"stage {name} was published, discarded or collected")
    return stage


def publish(books: WriterState, number: int, stage: StageState) -> None:
    """The stage's blocks belong to extents now."""
    books.leases.end(number)
    _forget(books, number, stage)


def parts(number: int, stage: StageState) -> dict[tuple[int, int], StagePart]:
    """What a stage holds, by topic and shard."""
    return {target: StagePart(number, *held) for target, held in stage.holds.items()}


def stage_number(name: str) -> int:
    try:
        number = int(name, 16)
    except (ValueError, TypeError):
        number = -1
    if not (0 <= number < 1 << 64) or f"{number:016x}" != name:
        raise StageGone(f"there is no stage {name!r}")
    return number


def _add(books: WriterState, number: int, stage: StageState, append: Append) -> None:
    topic, shard, block = append
    count, charged = stage.holds.get((topic, shard), (0, 0))
    part = StagePart(number, block.count, block.size_bytes)
    entry = LogEntry(
        log_entry.STAGED, topic, shard, count, block.count, block.size_bytes, b"", (part,)
    )
    value = log_entry.encode(entry, block.data)
    books.batch.put(store_keys.staged(number, topic, shard, count), value)
    books.batch.size += block.size_bytes
    held = count + block.count, charged + block.size_bytes
    stage.holds[topic, shard] = held
    raw = stored_values.STAGE_SHARD.pack(*held)
    books.batch.put(store_keys.stage_shard(number, topic, shard), raw)


def _forget(books: WriterState, number: int, stage: StageState) -> None:
    books.cache.stages[number] = None
    books.batch.delete(store_keys.stage(number))
    for topic, shard in stage.holds:
        books.batch.delete(store_keys.stage_shard(number, topic, shard))
