"""Rules of the checker: the messages of a key keep their order.

The topic has the order in which each producer sent them. A key is in one shard of each
generation, and the shards of later generations have its later messages. A run begins only
after the previous message of its key is done: a handler has returned from it, or it is a dead
letter. This also holds for members that have lost their shard and do not know it yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from tests.rig.fdq.evidence import REORDERED, Anomaly, Evidence
from tests.rig.fdq.history import LATE, OK
from tests.rig.fdq.snapshot import Row, source_of


def reordered(evidence: Evidence) -> Iterator[Anomaly]:
    yield from _stored(evidence)
    yield from _handled(evidence)
    yield from _backwards(evidence)
    yield from _produced_further(evidence)


def by_offset(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.position)


def keyed(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each key in log order. Messages without a key have no order."""
    found = defaultdict(list)
    for row in by_offset(rows):
        if row.key is not None:
            found[row.key].append(row)
    return found


def _stored(evidence: Evidence) -> Iterator[Anomaly]:
    sent = {
        one.body: (call.producer, number, at)
        for number, call in enumerate(evidence.history.produced)
        for at, one in enumerate(call.messages)
    }
    for key, rows in keyed(evidence.found.topic).items():
        shards = {row.shard for row in rows}
        if len({evidence.generation_of(shard) for shard in shards}) < len(shards):
            yield Anomaly(REORDERED, f"key {key}: in several shards of a generation")
        if any(before.id > row.id for before, row in pairwise(rows)):
            yield Anomaly(REORDERED, f"key {key}: stored in a sealed shard")
        last: dict[str, tuple[int, int]] = {}
        for row in rows:
            producer, *place = sent.get(row.body, ("", 0, 0))
            now = (int(place[0]), int(place[1]))
            if now < last.get(producer, now):
                yield Anomaly(REORDERED, f"{row.body}: stored after what was sent later")
            last[producer] = now


def _handled(evidence: Evidence) -> Iterator[Anomaly]:
    for rows in keyed(evidence.found.topic).values():
        for before, row in pairwise(rows):
            if before.position in evidence.dead or not _counts(evidence, before):
                continue
            done_ns = _first_done(evidence, before)
            for run in evidence.runs.get(row.position, ()):
                if done_ns is None or run.began_ns < done_ns:
                    text = f"begun by {run.consumer} before {before.body} was done"
                    yield Anomaly(REORDERED, f"{row.body}: {text}")


def _counts(evidence: Evidence, row: Row) -> bool:
    """Messages before the start of the group count as done."""
    shard = evidence.shards.get(row.shard)
    return shard is not None and row.offset >= shard.start


def _first_done(evidence: Evidence, row: Row) -> int | None:
    """The times of successful runs; a committed transaction counts even without a response.

    A late run counts if no other run of the message succeeded: then the consumer has acked it.
    """
    runs = evidence.runs.get(row.position, ())
    returned = [run.ended_ns for run in runs if run.outcome == OK]
    returned = returned or [run.ended_ns for run in runs if run.outcome == LATE]
    moved = [
        one.began_ns
        for one in evidence.commits.get(row.position, ())
        if evidence.output_bodies.issuperset(one.outputs)
    ]
    return min((*returned, *moved), default=None)


def _backwards(evidence: Evidence) -> Iterator[Anomaly]:
    """Under one epoch the offsets of a key do not decrease, but a message may repeat."""
    last: dict[tuple[str, int, int, str], int] = {}
    for run in sorted(evidence.history.runs, key=lambda one: one.began_ns):
        if run.key is None:
            continue
        place = run.consumer, run.shard, run.epoch, run.key
        if run.offset < last.get(place, run.offset):
            yield Anomaly(REORDERED, f"{run.body}: {run.consumer} went back to it")
        last[place] = max(run.offset, last.get(place, run.offset))


def _produced_further(evidence: Evidence) -> Iterator[Anomaly]:
    """Transactions of a key are in order, and so are their outputs."""
    for rows in keyed(evidence.found.outputs).values():
        last = -1, -1
        for row in rows:
            sources = evidence.rows.get(source_of(row.body))
            position = sources[0].position if sources else last
            if position < last:
                yield Anomaly(REORDERED, f"{row.body}: produced after what came later")
            last = max(last, position)
