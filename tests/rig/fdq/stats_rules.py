"""Rules of the checker: in the end all messages are acked, and the stats equal a recount."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.rig.fdq.evidence import EARLY, LAG, NEEDLESS, STATS, UNACKED, Anomaly, Evidence
from tests.rig.fdq.history import OK
from tests.rig.fdq.snapshot import Shard


def early(evidence: Evidence) -> Iterator[Anomaly]:
    """A dead letter had `max_deliver` runs."""
    most = evidence.history.max_deliver
    for position, letters in evidence.dead.items():
        runs = len(evidence.runs.get(position, ()))
        if runs + evidence.unseen.get(position, 0) < most:
            yield Anomaly(EARLY, f"{letters[0].body}: {runs} runs of {most}")


def needless(evidence: Evidence) -> Iterator[Anomaly]:
    """Without deaths shards move after they are drained, so each message runs once."""
    for runs in evidence.runs.values() if evidence.history.is_exact else ():
        done = [run.consumer for run in runs if run.outcome == OK]
        if len(done) > 1:
            yield Anomaly(NEEDLESS, f"{runs[0].body}: done by {', '.join(done)}")


def unacked(evidence: Evidence) -> Iterator[Anomaly]:
    for row in evidence.found.topic:
        shard = evidence.shards.get(row.shard)
        if shard is None or not (row.offset < shard.start or shard.has_acked(row.offset)):
            yield Anomaly(UNACKED, f"{row.body}: shard {row.shard} offset {row.offset}")


def lag(evidence: Evidence) -> Iterator[Anomaly]:
    for shard in evidence.found.shards:
        if shard.lag:
            yield Anomaly(LAG, f"shard {shard.shard}: {shard.lag}")


def stats(evidence: Evidence) -> Iterator[Anomaly]:
    rows = Counter(row.shard for row in evidence.found.topic)
    acked = Counter(row.shard for row in evidence.found.topic if evidence.has_acked(row))
    dead = Counter(letter.shard for letter in evidence.found.dead)
    for shard in evidence.found.shards:
        number = shard.shard
        recount = {
            "inserted": rows[number],
            "routed": rows[number],
            "acked": acked[number],
            "dead_lettered": dead[number],
        }
        for name, count in recount.items():
            if (counted := getattr(shard, name)) != count:
                yield Anomaly(
                    STATS, f"shard {number}: {name} is {counted}, a recount gives {count}"
                )
        yield from _deliveries(evidence, shard)


def _deliveries(evidence: Evidence, shard: Shard) -> Iterator[Anomaly]:
    """These counts travel with acks, so a kill may lose some."""
    runs = [run for run in evidence.history.runs if run.shard == shard.shard]
    again = [run for run in runs if run.delivery > 1]
    recounts = (("emitted", len(runs)), ("redelivered", len(again)))
    for name, count in recounts:
        counted = getattr(shard, name)
        if counted > count or (evidence.history.is_exact and counted != count):
            bound = "" if evidence.history.is_exact else " at most"
            text = f"{name} is {counted}, a recount gives{bound} {count}"
            yield Anomaly(STATS, f"shard {shard.shard}: {text}")
