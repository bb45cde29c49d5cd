"""Turns a commit into one atomic batch.

The order is: the log's messages, topic by topic and shard by shard, so that the stream's
order is the order of ids; the tails; records; stages; the producer. All writers of a topic
update its tail, which assigns ids, offsets and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polybus.errors import Conflict, StageGone
from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult, RecordChange, Span
from polybus.store import request_checks
from tests.spikes.jetstream import producers, subjects
from tests.spikes.jetstream.draft import Draft
from tests.spikes.jetstream.topics import tail_of, topic_of

Place = tuple[int, int]  # topic, shard
Tails = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """An append to a shard: a block, then (as an extent) the blocks of some stages for it."""

    count: int
    size_bytes: int
    block: bytes = b""
    stages: tuple[str, ...] = ()

    def and_stage(self, name: str, count: int, size_bytes: int) -> Piece:
        size_bytes += self.size_bytes
        return Piece(self.count + count, size_bytes, self.block, (*self.stages, name))


def commit(draft: Draft, wanted: Commit) -> CommitResult:
    if wanted.stamp is not None:
        earlier = producers.earlier_result(draft, wanted.stamp)
        if earlier is not None:
            return earlier
    result = _append(draft, _pieces(draft, wanted), wanted.note)
    for change in wanted.changes:
        _change(draft, change)
    for stage in wanted.stages:
        draft.set_json(subjects.lease(stage), {"state": "published"})
    if wanted.stamp is not None:
        producers.use_up(draft, wanted.stamp, result)
    return result


def stage(draft: Draft, name: str, appends: Sequence[Append]) -> None:
    """Write the blocks, and count them in the stage's head for its publication."""
    head = open_stage(draft, name)
    for (topic, shard), block in _by_shard(appends).items():
        request_checks.open_shard(topic_of(tail_of(draft, topic), topic), shard)
        draft.add(subjects.staged(name, topic, shard), bytes(block.data), {})
        held = head["holds"].setdefault(f"{topic} {shard}", [0, 0])
        held[:] = held[0] + block.count, held[1] + block.size_bytes
    draft.set_json(subjects.lease(name), head)


def open_stage(draft: Draft, name: str) -> dict[str, Any]:
    sequence, _ = found = draft.head(subjects.lease(name))
    head: dict[str, Any] | None = found.json()
    if head is None or head["state"] != "open":
        raise StageGone(f"stage {name!r} is gone")
    if draft.senses.expired(subjects.lease(name), sequence, head["lease_s"]):
        raise StageGone(f"the lease of stage {name!r} has run out")
    return head


def _by_shard(appends: Sequence[Append]) -> dict[Place, Block]:
    """One block a shard, however many appends."""
    blocks: dict[Place, list[Block]] = {}
    for topic, shard, block in appends:
        blocks.setdefault((topic, shard), []).append(block)
    return {
        place: several[0] if len(several) == 1 else Block.concat(several)
        for place, several in blocks.items()
    }


def _pieces(draft: Draft, wanted: Commit) -> dict[Place, Piece]:
    """One a shard, so that a batch's length is the number of shards and of stages, not both's."""
    pieces: dict[Place, Piece] = {}
    for place, block in _by_shard(wanted.appends).items():
        pieces[place] = Piece(block.count, block.size_bytes, bytes(block.data))
    for name in wanted.stages:
        for held_for, (count, size_bytes) in open_stage(draft, name)["holds"].items():
            topic, shard = map(int, held_for.split())
            before = pieces.get((topic, shard), Piece(0, 0))
            pieces[topic, shard] = before.and_stage(name, count, size_bytes)
    return pieces


def _append(draft: Draft, pieces: dict[Place, Piece], note: bytes) -> CommitResult:
    tails = {topic: tail_of(draft, topic) for topic, _ in sorted(pieces)}
    times = (tail["timestamp_ns"] for tail in tails.values())
    now_ns = max([draft.senses.wall_ns(), *times])
    spans = tuple(
        _extend(draft, tails[place[0]], place, pieces[place], now_ns) for place in sorted(pieces)
    )
    for topic, tail in tails.items():
        draft.set_json(subjects.tail(topic), tail | {"timestamp_ns": now_ns})
    return CommitResult(spans, now_ns, note=note)


def _extend(draft: Draft, tail: dict[str, Any], place: Place, piece: Piece, now_ns: int) -> Span:
    topic, shard = place
    bounds = tail["shards"][request_checks.open_shard(topic_of(tail, topic), shard)]
    span = Span(topic, shard, bounds["end"], tail["next_id"], piece.count)
    if bounds["start"] == bounds["end"]:
        bounds["first_id"] = tail["next_id"]
    headers = {"Polybus-At": f"{bounds['end']} {tail['next_id']} {piece.count} {now_ns}"}
    if piece.stages:
        headers["Polybus-Stages"] = " ".join(piece.stages)
    draft.add(subjects.log(topic, shard), piece.block, headers)
    bounds["end"] += piece.count
    bounds["size_bytes"] += piece.size_bytes
    tail["next_id"] += piece.count
    return span


def _change(draft: Draft, change: RecordChange) -> None:
    subject = subjects.record(change.key)
    if change.expected is not None:
        head = draft.head(subject)
        version = head.sequence if head.body is not None else 0
        if version != change.expected:
            raise Conflict(f"{change.key!r} has version {version}, not {change.expected}")
    draft.set(subject, change.value)


def versions(changes: Sequence[RecordChange], sequences: dict[str, int]) -> Iterator[int]:
    """A record's version is the stream's sequence: it never repeats."""
    for change in changes:
        yield 0 if change.value is None else sequences[subjects.record(change.key)]
