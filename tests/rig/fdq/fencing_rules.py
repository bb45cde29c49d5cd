"""Rules of the checker: a member that has lost a shard cannot change it.

An epoch is known from the first response that names it. Requests under an older epoch that
begin after that must be refused; earlier ones may have either outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.rig.fdq.evidence import STALE_ACK, Anomaly, Evidence
from tests.rig.fdq.history import OK, Ack, Committed, History

Known = dict[int, dict[int, int]]  # by shard: when each epoch was first known


def stale_acks(evidence: Evidence) -> Iterator[Anomaly]:
    known = _known(evidence.history)
    for one in _changes(evidence.history):
        newest = max(
            (epoch for epoch, at in known[one.shard].items() if at < one.began_ns), default=0
        )
        if one.outcome == OK and one.epoch < newest:
            text = f"{one.consumer} sent under epoch {one.epoch} when {newest} was known"
            yield Anomaly(STALE_ACK, f"shard {one.shard}: {text}: {one}")


def _changes(history: History) -> list[Ack | Committed]:
    return [*history.acks, *history.commits]


def _known(history: History) -> Known:
    known: Known = defaultdict(dict)

    def note(shard: int, epoch: int, at_ns: int) -> None:
        first = known[shard].setdefault(epoch, at_ns)
        known[shard][epoch] = min(first, at_ns)

    for told in history.assigned:
        note(told.shard, told.epoch, told.at_ns)
    for run in history.runs:
        note(run.shard, run.epoch, run.began_ns)
    for done in _changes(history):
        if done.outcome == OK:
            note(done.shard, done.epoch, done.ended_ns)
    return known
