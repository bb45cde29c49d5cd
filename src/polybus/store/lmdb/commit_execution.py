"""Execution of a commit: ids, offsets, records and stages.

The stamp is checked first, then everything else is checked, then everything is changed. Ids
run by topic and shard; within a shard the appends come first, then the stages, each in
their order.
"""

from __future__ import annotations

from polybus.errors import Conflict
from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult, RecordChange, Span
from polybus.store import request_checks
from polybus.store.lmdb import producer_stamps, staged_blocks, store_keys, stored_values
from polybus.store.lmdb.log_entry import StagePart
from polybus.store.lmdb.writer_state import ShardState, StageState, TopicState, WriterState


class ShardAppend:
    """Everything that a commit appends to one shard."""

    __slots__ = ("blocks", "count", "parts", "state")

    def __init__(self, state: TopicState) -> None:
        self.state = state
        self.count = 0
        self.blocks: list[Block] = []
        self.parts: list[StagePart] = []


ShardAppends = dict[tuple[int, int], ShardAppend]


def commit(writer: WriterState, commit: Commit, now_ns: int) -> CommitResult:
    appends, stages, changes, stamp, note = commit
    producer = None
    if stamp is not None:
        producer = producer_stamps.find_producer(writer, stamp)
        repeated = producer_stamps.check_stamp(producer, stamp)
        if repeated is not None:
            return repeated
    # Nearly all commits are one block: the fast path saves the dicts of the general one.
    if len(appends) == 1 and not (stages or changes):
        committed = _commit_one_block(writer, appends[0], note, now_ns)
    else:
        committed = _commit_all_parts(writer, commit, now_ns)
    if producer is not None and stamp is not None:
        producer_stamps.record_result(writer, producer, stamp, committed)
    return committed


def _commit_one_block(
    writer: WriterState, append: Append, note: bytes, now_ns: int
) -> CommitResult:
    """Execute a commit of one block and nothing else: the fast path of nearly all commits."""
    topic, number, block = append
    cache, batch = writer.cache, writer.batch
    state = cache.topics.get(topic) or cache.topic(topic)
    if number not in state.open:
        request_checks.open_shard(state.topic, number)
    shard = state.shards.get(number) or cache.shard(state, number)
    data, count = block
    target = topic, number
    offset, first_id = shard.end, state.next_id
    # Times of a topic never decrease, even if the wall clock is set back.
    time_ns = max(now_ns, state.time_ns)
    batch.append(target, offset, block, first_id, time_ns)
    shard.end = offset + count
    shard.added += len(data)
    state.next_id = first_id + count
    _mark_changed(writer, target, state, shard, time_ns)
    return CommitResult((Span(topic, number, offset, first_id, count),), time_ns, (), note)


def _commit_all_parts(writer: WriterState, commit: Commit, now_ns: int) -> CommitResult:
    if commit.changes:
        # A read may fail, so everything is loaded before anything is changed.
        _ = writer.cache.counters
        _check_versions(writer, commit.changes)
    # All checks come before the first change, so that an error leaves no trace.
    stages = _stages(writer, commit.stages) if commit.stages else {}
    shard_appends = _collect_appends(writer, commit, stages)

    for number, stage in stages.items():
        staged_blocks.publish(writer, number, stage)
    # All messages of a commit have one time, and times of a topic never decrease, even if the
    # wall clock is set back.
    time_ns = now_ns
    for shard_append in shard_appends.values():
        time_ns = max(time_ns, shard_append.state.time_ns)
    # Ids run by topic and shard, which makes the result independent of the order of the request.
    targets = sorted(shard_appends) if len(shard_appends) > 1 else shard_appends
    spans = tuple([_append(writer, target, shard_appends[target], time_ns) for target in targets])
    versions = tuple([_change(writer, change) for change in commit.changes])
    return CommitResult(spans, time_ns, versions, commit.note)


def _stages(writer: WriterState, names: tuple[str, ...]) -> dict[int, StageState]:
    numbers = {staged_blocks.stage_number(name): name for name in names}
    return {
        number: staged_blocks.find_stage(writer, number, name) for number, name in numbers.items()
    }


def _check_versions(writer: WriterState, changes: tuple[RecordChange, ...]) -> None:
    for change in changes:
        if change.expected is not None and change.expected != writer.cache.version(change.key):
            raise Conflict(
                f"record {change.key!r} has version {writer.cache.version(change.key)}, "
                f"expected {change.expected}"
            )


def _collect_appends(
    writer: WriterState, commit: Commit, stages: dict[int, StageState]
) -> ShardAppends:
    shard_appends: ShardAppends = {}
    for topic, shard, block in commit.appends:
        shard_append = _shard_append(writer, shard_appends, topic, shard)
        shard_append.blocks.append(block)
        shard_append.count += block.count
    for number, stage in stages.items():
        for target, part in staged_blocks.parts(number, stage).items():
            shard_append = _shard_append(writer, shard_appends, *target)
            shard_append.parts.append(part)
            shard_append.count += part.count
    # A stage may hold blocks for any number of shards, so the limit can be checked only here.
    request_checks.spans(len(shard_appends))
    return shard_appends


def _shard_append(
    writer: WriterState, shard_appends: ShardAppends, topic: int, shard: int
) -> ShardAppend:
    shard_append = shard_appends.get((topic, shard))
    if shard_append is None:
        state = writer.cache.topic(topic)
        if shard not in state.open:
            request_checks.open_shard(state.topic, shard)
        writer.cache.shard(state, shard)
        shard_append = shard_appends[topic, shard] = ShardAppend(state)
    return shard_append


def _append(
    writer: WriterState, target: tuple[int, int], shard_append: ShardAppend, time_ns: int
) -> Span:
    topic, number = target
    state = shard_append.state
    shard = writer.cache.shard(state, number)
    span = Span(topic, number, shard.end, state.next_id, shard_append.count)
    for block in shard_append.blocks:
        _add(writer, target, state, shard, block, time_ns)
    if shard_append.parts:
        count = sum(part.count for part in shard_append.parts)
        writer.batch.publish(target, shard.end, shard_append.parts, (state.next_id, time_ns))
        shard.end += count
        state.next_id += count
        shard.added += sum(part.charged for part in shard_append.parts)
    _mark_changed(writer, target, state, shard, time_ns)
    return span


def _add(
    writer: WriterState,
    target: tuple[int, int],
    state: TopicState,
    shard: ShardState,
    block: Block,
    time_ns: int,
) -> None:
    writer.batch.append(target, shard.end, block, state.next_id, time_ns)
    shard.end += block.count
    state.next_id += block.count
    shard.added += block.size_bytes


def _mark_changed(
    writer: WriterState, target: tuple[int, int], state: TopicState, shard: ShardState, time_ns: int
) -> None:
    """Mark the states of shard and topic, which are written once per batch."""
    state.time_ns = time_ns
    ends = writer.batch.ends
    # Marked once per batch and shard; later commits of the batch change the marked state in place.
    if target not in ends:
        writer.mark_topic(state)
        writer.mark_shard(*target, shard)
    ends[target] = shard.end


def _change(writer: WriterState, change: RecordChange) -> int:
    key, value, _ = change
    writer.batch.has_record_changes = True
    if value is None:
        # Version 0 means that there is no record.
        writer.cache.versions[key] = 0
        writer.batch.delete(store_keys.record(key))
        return 0
    version = writer.next_number("version")
    writer.cache.versions[key] = version
    writer.batch.put(store_keys.record(key), stored_values.encode_record(value, version))
    writer.batch.size += len(value)
    return version
