"""The checker of a round: every anomaly with a sentence; none if all guarantees held.

    check(history, found) -> [Anomaly("lost", "w1 7 plain was answered and is not there"), ...]

In the style of Jepsen's queue and Kafka workloads: clients do not know the content of the bus,
they know the responses they got, and each rule follows from those.

    lost          answered and not there; acked by the group and never handled; acked by a
                  transaction whose outputs are not there
    duplicated    twice in the topic, in the outputs, among the dead; handled after its ack
    torn          part of a batch, or of a transaction's outputs
    undue         a delayed message that was appended before its time
    reordered     a key's messages stored, handled, or produced further in another order
    aborted-read  visible though it was refused, or never sent
    stale-ack     an ack or a transaction accepted after a newer epoch was known
    needless repeat   done twice without a death
    dead-lettered early, unacked, lag, stats: as the words mean
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.rig.fdq.delivery_rules import aborted_reads, duplicated, lost, torn, undue
from tests.rig.fdq.evidence import Anomaly, Evidence
from tests.rig.fdq.fencing_rules import stale_acks
from tests.rig.fdq.history import History
from tests.rig.fdq.order_rules import reordered
from tests.rig.fdq.snapshot import Found
from tests.rig.fdq.stats_rules import early, lag, needless, stats, unacked

Rule = Callable[[Evidence], Iterator[Anomaly]]

RULES: tuple[Rule, ...] = (
    lost,
    duplicated,
    torn,
    undue,
    reordered,
    aborted_reads,
    stale_acks,
    early,
    needless,
    unacked,
    lag,
    stats,
)


def check(history: History, found: Found) -> list[Anomaly]:
    evidence = Evidence(history, found)
    return [anomaly for rule in RULES for anomaly in rule(evidence)]


def in_words(anomalies: list[Anomaly], most: int = 20) -> str:
    """Format the first anomalies and the count of each kind, for a failing test."""
    kinds = [one.kind for one in anomalies]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines = [f"{one.kind}: {one.text}" for one in anomalies[:most]]
    return "\n".join([f"{counts or 'no'} anomalies", *lines])
