"""Messages whose time to live has passed: a group acks them instead of handing them out.

The time is a header of the message (`model.message_ttl`), counted from its commit. Rows
without headers cost nothing here, and those without this header one search of their names;
the rest is done per column.

An expired message counts as acked. If the topic says so, it becomes a dead letter in the same
commit. A message that cannot be acked (its dead letter cannot be written, or the shard has too
many ranges of acks) is not handed out either; its shard waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from polybus.durable.topic_registry import EXPIRED, EXPIRED_DEAD_LETTER
from polybus.errors import LimitReached
from polybus.groups import shard_progress
from polybus.groups.dead_letter_queue import append_dead_letters, has_dead_letter_topic
from polybus.groups.shard_progress import MAX_RANGES, ExhaustedMessage
from polybus.model import offset_ranges
from polybus.model.message_ttl import MAX_TTL_DIGITS, TTL_HEADER

if TYPE_CHECKING:
    from polybus.groups.group_state import GroupContext, GroupShard, GroupUpdate
    from polybus.model.rows import Rows

REASON: Final = "expired"
NS_PER_MS: Final = 1_000_000
_NAME: Final = re.compile(re.escape(TTL_HEADER.encode()))
_VALUE: Final = f"^[0-9]{{1,{MAX_TTL_DIGITS}}}$"


def find_expired(rows: Rows, now_ns: int) -> Sequence[int]:
    """Return the indexes of expired rows, in order. A header that is no number is ignored."""
    if rows.header_names is None or not _NAME.search(rows.header_names):
        return ()
    import pyarrow as pa  # here, because few messages expire
    import pyarrow.compute as pc

    from polybus.model import arrow

    batch = arrow.batch_of(rows)
    headers = batch.column("headers")
    entries = pa.array(range(len(headers.keys)), pa.int64())
    is_ttl = pc.and_(
        pc.equal(headers.keys, TTL_HEADER), pc.match_substring_regex(headers.items, _VALUE)
    )
    chosen = pc.filter(entries, is_ttl)
    # The row of each entry, by the offsets of the rows into the entries.
    places = pa.ListArray.from_arrays(headers.offsets, entries)
    owners = pc.take(pc.list_parent_indices(places), chosen)
    ttl_ms = pc.cast(pc.cast(pc.take(headers.items, chosen), pa.utf8()), pa.int64())
    written_ns = pc.take(batch.column("timestamp_ns"), owners)
    expires_ns = pc.add(written_ns, pc.multiply(ttl_ms, NS_PER_MS))
    expired: list[int] = pc.filter(owners, pc.less_equal(expires_ns, now_ns)).to_pylist()
    return sorted(set(expired))  # a message may have the header twice


def ack_expired(
    context: GroupContext, update: GroupUpdate, expired: Mapping[GroupShard, Sequence[int]]
) -> None:
    """Add the acks of expired offsets to the update, as many as fit, and their dead letters."""
    group = update.group
    topic = context.durable.find_by_number(group.topic.number) or group.topic
    is_kept = topic.settings.get(EXPIRED) == EXPIRED_DEAD_LETTER and has_dead_letter_topic(topic)
    if is_kept:
        letters = [
            ExhaustedMessage(shard.number, offset, shard.progress.attempts.get(offset, 0), REASON)
            for shard, offsets in expired.items()
            for offset in offsets
            if not _is_acked(update, shard, offset)
        ]
        for number, _ in append_dead_letters(context, update, letters):
            shard = group.shards[number]
            progress = update.progress(shard)
            update.changed[shard] = progress._replace(expired=progress.expired + 1)
        return
    for shard, offsets in expired.items():
        progress = update.progress(shard)
        wanted = offset_ranges.ranges_from_offsets(offsets)
        fresh = offset_ranges.unacked_parts(progress.low, progress.ranges, wanted)
        try:
            acked = shard_progress.ack_ranges(progress, fresh)
        except LimitReached:  # each adds one range at most
            fresh = fresh[: max(0, MAX_RANGES - len(progress.ranges))]
            acked = shard_progress.ack_ranges(progress, fresh)
        if fresh:
            count = offset_ranges.count_offsets(tuple(fresh))
            update.changed[shard] = acked._replace(expired=progress.expired + count)


def keep_rows(
    rows: Rows, expired: Mapping[GroupShard, Sequence[int]], indexes: Sequence[int]
) -> Rows:
    """Return the rows without expired ones, and without all after one that is not acked."""
    from polybus.model import arrow

    stops = {}
    for shard, offsets in expired.items():
        low, ranges = shard.progress.low, shard.progress.ranges
        blocked = (at for at in offsets if not offset_ranges.contains(low, ranges, at))
        stops[shard.number] = next(blocked, None)
    dropped = set(indexes)
    numbers = memoryview(rows.shards).cast("B").cast("i")
    places = memoryview(rows.offsets).cast("B").cast("q")
    kept = [
        at
        for at in range(rows.count)
        if at not in dropped and ((stop := stops.get(numbers[at])) is None or places[at] < stop)
    ]
    return arrow.take_rows(rows, kept)


def _is_acked(update: GroupUpdate, shard: GroupShard, offset: int) -> bool:
    progress = update.progress(shard)
    return offset_ranges.contains(progress.low, progress.ranges, offset)
