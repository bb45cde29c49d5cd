"""Execution of a commit: ids, offsets, records and stages.

The stamp is checked first, then everything else is checked, then everything is changed. Ids
run by topic and shard; within a shard the appends come first, then the stages, each in
their order.
"""

from __future__ import annotations

from polybus.errors import Conflict
from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult, RecordChange, Span
from polybus.model.shard_routes import open_appends
from polybus.store import request_checks
from polybus.store.lmdb import producer_stamps, staged_blocks, store_keys, stored_values
from polybus.store.lmdb.log_entry import StagePart
from polybus.store.lmdb.write_batch import Target
from polybus.store.lmdb.writer_state import CachedStage, CachedTopic, WriterState


class ShardAppend:
    """Everything that a commit appends to one shard."""

    __slots__ = ("blocks", "parts", "state")

    def __init__(self, state: CachedTopic) -> None:
        self.state = state
        self.blocks: list[Block] = []
        self.parts: list[StagePart] = []


def commit(writer: WriterState, commit: Commit, now_ns: int) -> CommitResult:
    appends, stages, changes, stamp, note = commit
    producer = None
    if stamp is not None:
        producer = producer_stamps.find_producer(writer, stamp)
        repeated = producer_stamps.check_stamp(producer, stamp)
        if repeated is not None:
            return repeated
    committed = None
    if len(appends) == 1 and not (stages or changes):
        committed = _commit_block(writer, appends[0], now_ns, note)
    if committed is None:
        committed = _commit_all_parts(writer, commit, now_ns)
    if producer is not None and stamp is not None:
        producer_stamps.record_result(writer, producer, stamp, committed)
    return committed


def _commit_block(
    writer: WriterState, append: Append, now_ns: int, note: bytes
) -> CommitResult | None:
    """Commit one block to one shard, as nearly all commits do. Returns None if it is sealed.

    This saves the dicts of the general path.
    """
    topic, number, block = append
    cache = writer.cache
    state = cache.topics.get(topic) or cache.topic(topic)
    if number not in state.open:
        return None
    shard = state.shards.get(number) or cache.shard(state, number)
    data, count = block
    target = topic, number
    offset, first_id = shard.end, state.next_id
    # Times of a topic never decrease, even if the wall clock is set back.
    time_ns = max(now_ns, state.time_ns)
    writer.batch.append(target, offset, block, first_id, time_ns)
    shard.end = offset + count
    shard.added += len(data)
    state.next_id = first_id + count
    writer.mark_append(target, state, shard, time_ns)
    spans = (Span(topic, number, offset, first_id, count),)
    return CommitResult(spans, time_ns, (), note)


def _commit_all_parts(writer: WriterState, commit: Commit, now_ns: int) -> CommitResult:
    # All checks come before the first change, so that an error leaves no trace. The checks also
    # load everything that the changes need, because a read may fail.
    if commit.changes:
        _ = writer.cache.counters
        for change in commit.changes:
            if change.expected is None:
                continue
            version = writer.cache.version(change.key)
            if version != change.expected:
                raise Conflict(
                    f"record {change.key!r} has version {version}, expected {change.expected}"
                )
    stages = {}
    for name in commit.stages:
        stage_number = staged_blocks.stage_number(name)
        stages[stage_number] = staged_blocks.find_stage(writer, stage_number, name)
    shard_appends = _collect_appends(writer, commit, stages)

    for stage_number, stage in stages.items():
        staged_blocks.forget(writer, stage_number, stage)
    # All messages of a commit have one time, and times of a topic never decrease, even if the
    # wall clock is set back.
    time_ns = max([now_ns, *[append.state.time_ns for append in shard_appends.values()]])
    spans = []
    # Ids run by topic and shard, which makes the result independent of the order of the request.
    for target in sorted(shard_appends):
        spans.append(_append(writer, target, shard_appends[target], time_ns))
    versions = tuple([_change(writer, change) for change in commit.changes])
    return CommitResult(tuple(spans), time_ns, versions, commit.note)


def _collect_appends(
    writer: WriterState, commit: Commit, stages: dict[int, CachedStage]
) -> dict[Target, ShardAppend]:
    """Return blocks and parts of stages by shard. Raises if a shard cannot be appended to."""
    shard_appends: dict[Target, ShardAppend] = {}

    def at(target: Target) -> ShardAppend:
        shard_append = shard_appends.get(target)
        if shard_append is None:
            topic, shard = target
            state = writer.cache.topic(topic)
            writer.cache.shard(state, shard)
            shard_append = shard_appends[target] = ShardAppend(state)
        return shard_append

    for append in commit.appends:
        state = writer.cache.topic(append.topic)
        if append.shard in state.open:
            at((append.topic, append.shard)).blocks.append(append.block)
            continue
        request_checks.single_shard(state.topic, append.shard)
        for topic, shard, block in open_appends(state.topic, append):
            at((topic, shard)).blocks.append(block)
    for stage_number, stage in stages.items():
        for target, held in stage.holds.items():
            request_checks.open_shard(writer.cache.topic(target[0]).topic, target[1])
            at(target).parts.append(StagePart(stage_number, *held))
    # A stage may hold blocks for any number of shards, so the limit can be checked only here.
    request_checks.spans(len(shard_appends))
    return shard_appends


def _append(writer: WriterState, target: Target, shard_append: ShardAppend, time_ns: int) -> Span:
    topic, number = target
    state = shard_append.state
    shard = writer.cache.shard(state, number)
    first, first_id = shard.end, state.next_id
    for block in shard_append.blocks:
        writer.batch.append(target, shard.end, block, state.next_id, time_ns)
        shard.end += block.count
        state.next_id += block.count
        shard.added += block.size_bytes
    if shard_append.parts:
        writer.batch.publish(target, shard.end, shard_append.parts, (state.next_id, time_ns))
        for part in shard_append.parts:
            shard.end += part.count
            state.next_id += part.count
            shard.added += part.charged
    writer.mark_append(target, state, shard, time_ns)
    return Span(topic, number, first, first_id, shard.end - first)


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
