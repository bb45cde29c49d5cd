"""Stages: stored blocks that stay invisible until a commit publishes them.

A staged block is keyed by stage, topic, shard and the position of its first message among
those of the stage and shard. The stage counts its messages and bytes per shard, so that
publishing does not read blocks: it costs a little per stage and shard.

A reshard may seal shards that a stage has blocks for. `read_sealed` and `move_blocks` move them
to the open shards, some megabytes at a time, before the stage is published. Until this begins,
the stage takes all blocks of a topic for the generation of the first one, which keeps the
messages of a key in one place and in order.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress

from polybus.errors import Damaged, StageGone
from polybus.model.block import Block
from polybus.model.commit import Append
from polybus.model.shard_routes import open_appends, split_block
from polybus.model.topic import Topic
from polybus.store import request_checks
from polybus.store.lmdb import log_entry, store_keys, stored_values
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.log_entry import LogEntry, StagePart
from polybus.store.lmdb.write_batch import Target
from polybus.store.lmdb.writer_state import CachedStage, WriterState, scan_prefix

_log = logging.getLogger("polybus.store")


def open_stage(writer: WriterState, lease_s: float) -> str:
    # The random half makes names of stages hard to guess, the counter makes them unique.
    number = writer.next_number("stage") << 32 | secrets.randbits(32)
    writer.cache.stages[number] = CachedStage(lease_s)
    writer.batch.put(store_keys.stage(number), stored_values.STAGE.pack(lease_s))
    writer.leases.start(number, lease_s)
    return f"{number:016x}"


def restore_leases(writer: WriterState, transaction: Transaction) -> None:
    """Give every stage of an opened store its full lease again, because leases are not stored.

    A damaged stage gets none: its caller gets `StageGone` and stages its messages again.
    """
    for key, raw in scan_prefix(transaction, store_keys.STAGES):
        if len(key) != len(store_keys.stage(0)):
            continue
        number = int.from_bytes(key[1:], "big")
        reason = _find_damage(transaction, number, raw)
        if reason is None:
            writer.leases.start(number, *stored_values.STAGE.unpack(raw))
        else:
            _log.warning("stage %016x is damaged and cannot be published: %s", number, reason)


def _find_damage(transaction: Transaction, number: int, raw: memoryview) -> str | None:
    """Return the damage of a stage, None if it is intact. The blocks are not read."""
    if len(raw) != stored_values.STAGE.size:
        return "its record is damaged"
    (lease_s,) = stored_values.STAGE.unpack(raw)
    if not 0 <= lease_s < math.inf:
        return f"its lease is {lease_s} seconds"
    for key, held in scan_prefix(transaction, store_keys.stage(number)):
        if len(key) == len(store_keys.stage(number)):
            continue
        if len(held) != stored_values.STAGE_SHARD.size:
            return "the record of a shard is damaged"
        target = store_keys.target_of_stage(key)
        count, _ = stored_values.STAGE_SHARD.unpack(held)
        if _count_staged(transaction, number, target) != count:
            return f"its blocks do not hold {count} messages for shard {target[1]}"
    return None


def _count_staged(transaction: Transaction, number: int, target: tuple[int, int]) -> int:
    """Return the messages of a stage for a shard, by its last block; -1 if that is damaged."""
    prefix = store_keys.staged_of_shard(number, *target)
    with transaction.cursor() as cursor:
        after = cursor.set_range(prefix + b"\xff" * 9)
        if not (cursor.prev() if after else cursor.last()):
            return 0
        if bytes(cursor.key()[: len(prefix)]) != prefix:
            return 0
        try:
            return log_entry.decode(cursor.value()).end
        except Damaged:
            return -1


def add_blocks(writer: WriterState, name: str, appends: Sequence[Append]) -> None:
    number = stage_number(name)
    stage = find_stage(writer, number, name)
    # All are checked before the first is added, so that an error leaves no trace.
    routed: list[Append] = []
    for append in appends:
        topic = writer.cache.topic(append.topic).topic
        request_checks.single_shard(topic, append.shard)
        shards = _staging_shards(topic, stage)
        if append.shard in shards:
            routed.append(append)
        else:
            routed += split_block(topic.number, shards, append.block, append.shard)
    for append in routed:
        _add_block(writer, number, stage, append)


def _staging_shards(topic: Topic, stage: CachedStage) -> range:
    """Return the shards of the oldest generation that the stage has blocks for.

    While blocks are moved, newer generations have the earlier messages of a key, and the oldest
    one has those that are still to be moved. So later messages must follow there.
    """
    if len(topic.generations) == 1:
        return topic.open_shards
    held = [shard for number, shard in stage.holds if number == topic.number]
    oldest = min(held, default=topic.open_shards[0])
    return next(shards for shards in topic.shards_by_generation if oldest in shards)


def _add_block(writer: WriterState, number: int, stage: CachedStage, append: Append) -> None:
    topic, shard, block = append
    count, charged = stage.holds.get((topic, shard), (0, 0))
    size = block.size_bytes
    part = StagePart(number, block.count, size)
    entry = LogEntry(log_entry.STAGED, topic, shard, count, block.count, size, b"", (part,))
    value = log_entry.encode(entry, block.data)
    writer.batch.put(store_keys.staged(number, topic, shard, count), value)
    writer.batch.size += size
    held = stage.holds[topic, shard] = count + block.count, charged + size
    raw = stored_values.STAGE_SHARD.pack(*held)
    writer.batch.put(store_keys.stage_shard(number, topic, shard), raw)


def find_sealed(writer: WriterState, name: str) -> Target | None:
    """Return a sealed shard that a stage has blocks for, None if there is none."""
    number = stage_number(name)
    stage = find_stage(writer, number, name)
    writer.leases.start(number, stage.lease_s)
    sealed = [
        (topic, shard)
        for topic, shard in stage.holds
        if shard not in writer.cache.topic(topic).open
    ]
    # The newest generation first: it has the earlier messages of a key (`_staging_shards`).
    return max(sealed, default=None)


def read_sealed(
    transaction: Transaction, name: str, target: Target, max_bytes: int
) -> list[tuple[LogEntry, Block]]:
    """Return the first blocks that a stage has for a shard. Raises `Damaged` if there are none."""
    found: list[tuple[LogEntry, Block]] = []
    size = 0
    prefix = store_keys.staged_of_shard(stage_number(name), *target)
    for _, value in scan_prefix(transaction, prefix):
        entry = log_entry.decode(value)
        found.append((entry, Block.open(entry.block(value))))
        size += entry.block_bytes
        if size >= max_bytes:
            break
    if not found:
        raise Damaged(f"stage {name} has no blocks for shard {target[1]}")
    return found


def move_blocks(
    writer: WriterState, name: str, target: Target, moved: Sequence[tuple[LogEntry, Block]]
) -> None:
    """Move the first blocks of a sealed shard to the open shards of its topic."""
    number = stage_number(name)
    stage = find_stage(writer, number, name)
    topic = writer.cache.topic(target[0])
    count, charged = stage.holds[target]
    for entry, block in moved:
        for append in open_appends(topic.topic, Append(*target, block)):
            _add_block(writer, number, stage, append)
        writer.batch.delete(store_keys.staged(number, *target, entry.first))
        charged -= entry.charged
    if moved[-1][0].end == count:
        del stage.holds[target]
        writer.batch.delete(store_keys.stage_shard(number, *target))
    else:
        # The count stays: it is the position of the next block, and the last one ends there.
        stage.holds[target] = count, charged
        raw = stored_values.STAGE_SHARD.pack(count, charged)
        writer.batch.put(store_keys.stage_shard(number, *target), raw)


def staged_topics(writer: WriterState, names: Sequence[str]) -> frozenset[int]:
    topics: set[int] = set()
    for name in names:
        with suppress(StageGone):
            holds = find_stage(writer, stage_number(name), name).holds
            topics.update(topic for topic, _ in holds)
    return frozenset(topics)


def renew(writer: WriterState, name: str, lease_s: float) -> None:
    number = stage_number(name)
    stage = find_stage(writer, number, name)
    # A renewal of the same length writes nothing: expiry times are not stored.
    if stage.lease_s != lease_s:
        stage.lease_s = lease_s
        writer.batch.put(store_keys.stage(number), stored_values.STAGE.pack(lease_s))
    writer.leases.start(number, lease_s)


def discard(writer: WriterState, name: str) -> None:
    try:
        number = stage_number(name)
    except StageGone:
        return
    collect(writer, number)


def collect(writer: WriterState, number: int) -> None:
    """Remove a stage, whether or not its lease expired. Its blocks are removed later."""
    stage = writer.cache.stage(number)
    if stage is None:
        writer.leases.end(number)
        return
    forget(writer, number, stage)
    # A removal key instead of deletions: a stage may hold many blocks.
    writer.batch.put(store_keys.unstaged(number), b"")
    writer.batch.has_removals = True


def collect_expired(writer: WriterState, stages: Sequence[int], _now_ns: int) -> None:
    """Remove stages whose leases expired: a task of the writer."""
    for number in stages:
        collect(writer, number)


def forget(writer: WriterState, number: int, stage: CachedStage) -> None:
    """End a stage and delete its record. A commit that publishes it keeps its blocks."""
    end_s = writer.leases.end(number)
    if end_s is not None:
        writer.batch.ended_leases[number] = end_s
    writer.cache.stages[number] = None
    writer.batch.delete(store_keys.stage(number))
    for topic, shard in stage.holds:
        writer.batch.delete(store_keys.stage_shard(number, topic, shard))


def find_stage(writer: WriterState, number: int, name: str) -> CachedStage:
    # A stage without an active lease is gone, even if it is not collected yet.
    stage = writer.cache.stage(number) if writer.leases.is_active(number) else None
    if stage is None:
        raise StageGone(f"stage {name} was published or discarded, or its lease expired")
    return stage


def stage_number(name: str) -> int:
    try:
        number = int(name, 16)
    except (ValueError, TypeError):
        number = -1
    # int() accepts signs, spaces and underscores, which no name of a stage has.
    if not (0 <= number < 1 << 64) or f"{number:016x}" != name:
        raise StageGone(f"no stage {name!r}")
    return number
