"""The one write verb: what a commit means for ids, offsets, records and stages.

The stamp is judged first, then everything else is checked, then everything is
changed. Ids run by topic and shard; within a shard the appends come first, in their
order, then the stages, in theirs.
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
    """What a commit has for one shard."""

    __slots__ = ("blocks", "count", "parts", "state")

    def __init__(self, state: TopicState) -> None:
        self.state = state
        self.count = 0
        self.blocks: list[Block] = []
        self.parts: list[StagePart] = []


Shares = dict[tuple[int, int], ShardAppend]


def commit(books: WriterState, commit: Commit, now_ns: int) -> CommitResult:
    appends, stages, changes, stamp, note = commit
    producer = None
    if stamp is not None:
        producer = producer_stamps.find_producer(books, stamp)
        repeated = producer_stamps.check_stamp(producer, stamp)
        if repeated is not None:
            return repeated
    if len(appends) == 1 and not (stages or changes):
        committed = _commit_one_block(books, appends[0], note, now_ns)
    else:
        committed = _commit_all_parts(books, commit, now_ns)
    if producer is not None and stamp is not None:
        producer_stamps.record_result(books, producer, stamp, committed)
    return committed


def _commit_one_block(books: WriterState, append: Append, note: bytes, now_ns: int) -> CommitResult:
    """What nearly all commits are, by the shortest way."""
    topic, number, block = append
    known, batch = books.cache, books.batch
    state = known.topics.get(topic) or known.topic(topic)
    if number not in state.open:
        request_checks.open_shard(state.topic, number)
    shard = state.shards.get(number) or known.shard(state, number)
    data, count = block
    target = topic, number
    offset, first_id = shard.end, state.next_id
    time_ns = max(now_ns, state.time_ns)
    batch.append(target, offset, block, first_id, time_ns)
    shard.end = offset + count
    shard.added += len(data)
    state.next_id = first_id + count
    _mark_changed(books, target, state, shard, time_ns)
    return CommitResult((Span(topic, number, offset, first_id, count),), time_ns, (), note)


def _commit_all_parts(books: WriterState, commit: Commit, now_ns: int) -> CommitResult:
    if commit.changes:
        _ = books.cache.counters  # whatever must be looked up is, before anything is changed
        _check_versions(books, commit.changes)
    stages = _stages(books, commit.stages) if commit.stages else {}
    shares = _shares(books, commit, stages)

    for number, stage in stages.items():
        staged_blocks.publish(books, number, stage)
    time_ns = now_ns
    for share in shares.values():
        time_ns = max(time_ns, share.state.time_ns)
    targets = sorted(shares) if len(shares) > 1 else shares
    spans = tuple([_append(books, target, shares[target], time_ns) for target in targets])
    versions = tuple([_change(books, change) for change in commit.changes])
    return CommitResult(spans, time_ns, versions, commit.note)


def _stages(books: WriterState, names: tuple[str, ...]) -> dict[int, StageState]:
    numbers = {staged_blocks.stage_number(name): name for name in names}
    return {
        number: staged_blocks.find_stage(books, number, name) for number, name in numbers.items()
    }


def _check_versions(books: WriterState, changes: tuple[RecordChange, ...]) -> None:
    for change in changes:
        if change.expected is not None and change.expected != books.cache.version(change.key):
            raise Conflict(
                f"record {change.key!r} has version {books.cache.version(change.key)}, "
                f"not {change.expected}"
            )


def _shares(books: WriterState, commit: Commit, stages: dict[int, StageState]) -> Shares:
    shares: Shares = {}
    for topic, shard, block in commit.appends:
        share = _share(books, shares, topic, shard)
        share.blocks.append(block)
        share.count += block.count
    for number, stage in stages.items():
        for target, part in staged_blocks.parts(number, stage).items():
            share = _share(books, shares, *target)
            share.parts.append(part)
            share.count += part.count
    request_checks.spans(len(shares))
    return shares


def _share(books: WriterState, shares: Shares, topic: int, shard: int) -> ShardAppend:
    share = shares.get((topic, shard))
    if share is None:
        state = books.cache.topic(topic)
        if shard not in state.open:
            request_checks.open_shard(state.topic, shard)
        books.cache.shard(state, shard)
        share = shares[topic, shard] = ShardAppend(state)
    return share


def _append(books: WriterState, target: tuple[int, int], share: ShardAppend, time_ns: int) -> Span:
    topic, number = target
    state = share.state
    shard = books.cache.shard(state, number)
    span = Span(topic, number, shard.end, state.next_id, share.count)
    for block in share.blocks:
        _add(books, target, state, shard, block, time_ns)
    if share.parts:
        count = sum(part.count for part in share.parts)
        books.batch.publish(target, shard.end, share.parts, (state.next_id, time_ns))
        shard.end += count
        state.next_id += count
        shard.added += sum(part.charged for part in share.parts)
    _mark_changed(books, target, state, shard, time_ns)
    return span


def _add(
    books: WriterState,
    target: tuple[int, int],
    state: TopicState,
    shard: ShardState,
    block: Block,
    time_ns: int,
) -> None:
    books.batch.append(target, shard.end, block, state.next_id, time_ns)
    shard.end += block.count
    state.next_id += block.count
    shard.added += block.size_bytes


def _mark_changed(
    books: WriterState, target: tuple[int, int], state: TopicState, shard: ShardState, time_ns: int
) -> None:
    """The shard got messages: its state will be written, once a batch."""
    state.time_ns = time_ns
    ends = books.batch.ends
    if target not in ends:
        books.mark_topic(state)
        books.mark_shard(*target, shard)
    ends[target] = shard.end


def _change(books: WriterState, change: RecordChange) -> int:
    key, value, _ = change
    books.batch.has_record_changes = True
    if value is None:
        books.cache.versions[key] = 0
        books.batch.delete(store_keys.record(key))
        return 0
    version = books.next_number("version")
    books.cache.versions[key] = version
    books.batch.put(store_keys.record(key), stored_values.encode_record(value, version))
    books.batch.size += len(value)
    return version
