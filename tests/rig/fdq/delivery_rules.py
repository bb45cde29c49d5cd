"""Rules of the checker: acknowledged messages exist once and complete, and no others do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tests.rig.fdq.evidence import (
    ABORTED_READ,
    DUPLICATED,
    LOST,
    TORN,
    UNDUE,
    Anomaly,
    Evidence,
)
from tests.rig.fdq.history import DUPLICATE, FAILED, LATE, OK, UNKNOWN, Run
from tests.rig.fdq.snapshot import Dead, Row, run_of


def lost(evidence: Evidence) -> Iterator[Anomaly]:
    for call in evidence.history.produced:
        for one in call.messages:
            if call.outcome == OK and one.body not in evidence.rows:
                yield Anomaly(LOST, f"{one.body}: answered, and not in the topic")
    for commit in evidence.history.commits:
        for body in commit.outputs:
            if commit.outcome == OK and body not in evidence.output_bodies:
                yield Anomaly(LOST, f"{body}: its transaction was done, and it is not there")
    for row in evidence.found.topic:
        if evidence.has_acked(row) and row.position not in evidence.dead:
            yield from _passed_over(evidence, row)


def _passed_over(evidence: Evidence, row: Row) -> Iterator[Anomaly]:
    """Every acked message was handled."""
    message = evidence.messages.get(row.body)
    if message is not None and message.transactional:
        if row.body not in evidence.outputs:
            yield Anomaly(LOST, f"{row.body}: acked, and nothing was produced for it")
    elif not any(run.outcome in (OK, LATE) for run in evidence.runs.get(row.position, ())):
        yield Anomaly(LOST, f"{row.body}: acked, and no handler has returned from it")


def undue(evidence: Evidence) -> Iterator[Anomaly]:
    for row in evidence.found.topic:
        message = evidence.messages.get(row.body)
        if message is not None and row.timestamp_ns < message.not_before_ns:
            early_ms = (message.not_before_ns - row.timestamp_ns) // 1_000_000
            yield Anomaly(UNDUE, f"{row.body}: appended {early_ms} ms before it was due")


def duplicated(evidence: Evidence) -> Iterator[Anomaly]:
    for body, rows in evidence.rows.items():
        if len(rows) > 1:
            yield Anomaly(DUPLICATED, f"{body}: {len(rows)} times in the topic")
    for body, count in Counter(row.body for row in evidence.found.outputs).items():
        if count > 1:
            yield Anomaly(DUPLICATED, f"{body}: {count} times among the outputs")
    for source, rows in evidence.outputs.items():
        if len(runs := {run_of(row.body) for row in rows}) > 1:
            yield Anomaly(DUPLICATED, f"{source}: outputs of {len(runs)} runs: {sorted(runs)}")
    yield from _dead_twice(evidence)
    yield from _acked_twice(evidence)


def _dead_twice(evidence: Evidence) -> Iterator[Anomaly]:
    accepted = {position for position, _, _ in evidence.accepted()}
    for position, letters in evidence.dead.items():
        body = letters[0].body
        if len(letters) > 1:
            yield Anomaly(DUPLICATED, f"{body}: {len(letters)} dead letters")
        if position in accepted:
            yield Anomaly(DUPLICATED, f"{body}: its ack was accepted, and it is a dead letter")
        if body in evidence.outputs:
            yield Anomaly(DUPLICATED, f"{body}: its transaction was done, and it is a dead letter")


def _acked_twice(evidence: Evidence) -> Iterator[Anomaly]:
    """After an accepted ack no run may begin, except under an older epoch."""
    done = Counter((one.shard, one.offset) for one in evidence.history.commits if one.outcome == OK)
    for position, count in done.items():
        if count > 1:
            yield Anomaly(DUPLICATED, f"{position}: {count} transactions were done")
    for position, epoch, known_ns in evidence.accepted():
        for run in evidence.runs.get(position, ()):
            later = run.epoch == epoch and run.began_ns > known_ns
            if later or run.epoch > epoch:
                text = f"acked under epoch {epoch}, handled again by {run.consumer} ({run.epoch})"
                yield Anomaly(DUPLICATED, f"{run.body}: {text}")
    for shard in evidence.found.shards:
        if not _is_tidy(shard.low, shard.ranges):
            yield Anomaly(DUPLICATED, f"shard {shard.shard}: {shard.low} and {shard.ranges}")


def _is_tidy(low: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    """Return whether ranges are above the low-water mark, ascending, separate and not empty."""
    edges = [low, *(edge for span in ranges for edge in span)]
    return all(first < second for first, second in pairwise(edges))


def torn(evidence: Evidence) -> Iterator[Anomaly]:
    for call in evidence.history.produced:
        there = sum(one.body in evidence.rows for one in call.messages)
        if call.outcome == UNKNOWN and 0 < there < len(call.messages):
            text = f"{there} of a batch of {len(call.messages)} are there"
            yield Anomaly(TORN, f"{call.messages[0].body}: {text}")
    for commit in evidence.history.commits:
        there = sum(body in evidence.output_bodies for body in commit.outputs)
        if commit.outcome in (UNKNOWN, DUPLICATE) and 0 < there < len(commit.outputs):
            text = f"{there} of {len(commit.outputs)} outputs are there"
            yield Anomaly(TORN, f"{commit.outputs[0]}: {text}")


def aborted_reads(evidence: Evidence) -> Iterator[Anomaly]:
    for call in evidence.history.produced:
        for one in call.messages:
            if call.outcome == FAILED and one.body in evidence.rows:
                yield Anomaly(ABORTED_READ, f"{one.body}: refused, and in the topic")
    for body in evidence.rows.keys() - evidence.messages.keys():
        yield Anomaly(ABORTED_READ, f"{body}: in the topic, but never sent")
    for body in evidence.output_bodies - evidence.tries.keys():
        yield Anomaly(ABORTED_READ, f"{body}: among the outputs, and no transaction was to be done")
    refused = {
        body: all(one.outcome == FAILED for one in tries) for body, tries in evidence.tries.items()
    }
    for body in evidence.output_bodies:
        if refused.get(body):
            yield Anomaly(ABORTED_READ, f"{body}: its transaction was refused, and it is there")
    yield from _other_words(evidence)


def _other_words(evidence: Evidence) -> Iterator[Anomaly]:
    """Handlers and dead letters got exactly the key and body of the log."""
    read: list[Run | Dead] = [*evidence.history.runs, *evidence.found.dead]
    for one in read:
        row = evidence.row_at.get((one.shard, one.offset))
        if row is None or (row.key, row.body) != (one.key, one.body):
            where = f"shard {one.shard} offset {one.offset}"
            yield Anomaly(ABORTED_READ, f"{one.body} was read at {where}, where is {row}")
