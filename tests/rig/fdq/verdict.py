"""The result of a round: its anomalies and its events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.rig.fdq.checker import check, in_words
from tests.rig.fdq.evidence import Anomaly
from tests.rig.fdq.history import DUPLICATE, FAILED, Ack, Committed, History, history_of
from tests.rig.fdq.journal import UNKNOWN, Operation, operations
from tests.rig.fdq.snapshot import Found


@dataclass(frozen=True)
class Verdict:
    anomalies: list[Anomaly]
    history: History
    found: Found
    faults: Counter[str]

    @property
    def refused(self) -> int:
        """Acks and transactions that were refused as too late."""
        changes: list[Ack | Committed] = [*self.history.acks, *self.history.commits]
        return sum(one.outcome == FAILED for one in changes)

    def __str__(self) -> str:
        runs, commits = self.history.runs, self.history.commits
        counts = {
            "messages": len(self.found.topic),
            "calls of producers unanswered": sum(
                one.outcome == UNKNOWN for one in self.history.produced
            ),
            "runs": len(runs),
            "of them not the first": sum(run.delivery > 1 for run in runs),
            "acks": len(self.history.acks),
            "transactions": len(commits),
            "found done": sum(one.outcome == DUPLICATE for one in commits),
            "refused": self.refused,
            "dead letters": len(self.found.dead),
        }
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return f"{said}; {faults or 'undisturbed'}: {in_words(self.anomalies)}"


def judge(
    folder: Path, found: Found, faults: Counter[str], *, max_deliver: int, is_exact: bool
) -> Verdict:
    """Build the verdict from the journals of a folder and the final snapshot."""
    entries: list[Operation] = []
    for path in sorted(folder.glob("*.journal")):
        entries += operations(path.stem, path)
    history = history_of(entries, max_deliver=max_deliver, is_exact=is_exact)
    return Verdict(check(history, found), history, found, faults)
