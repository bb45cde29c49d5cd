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
    for change in _changes(evidence.history):
        newest = max(
            (epoch for epoch, at in known[change.shard].items() if at < change.began_ns), default=0
        )
        if change.outcome == OK and change.epoch < newest:
            text = f"{change.consumer} sent under epoch {change.epoch} when {newest} was known"
            yield Anomaly(STALE_ACK, f"shard {change.shard}: {text}: {change}")


def _changes(history: History) -> list[Ack | Committed]:
    return [*history.acks, *history.commits]


def _known(history: History) -> Known:
    known: Known = defaultdict(dict)

    def note(shard: int, epoch: int, at_ns: int) -> None:
        first = known[shard].setdefault(epoch, at_ns)
        known[shard][epoch] = min(first, at_ns)

    for entry in history.assigned:
        note(entry.shard, entry.epoch, entry.at_ns)
    for run in history.runs:
        note(run.shard, run.epoch, run.began_ns)
    for done in _changes(history):
        if done.outcome == OK:
            note(done.shard, done.epoch, done.ended_ns)
    return known
