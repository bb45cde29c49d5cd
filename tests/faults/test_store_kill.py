"""kill -9 of the process that writes a store, at random moments, repeatedly.

One child at a time owns the store. It checks everything that its predecessors left, reports
the result, and runs the workload until it is killed. Acknowledged commits must be stored
once and in order. A commit must be complete or absent. Commits without acknowledgement are
repeated with the same stamp and must be stored once (`workload`, `checker`).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.rig.fork_server import AnsweringChild, ChildResult, ChildServer
from tests.rig.store.checker import Reported
from tests.rig.store.child import COMPACTED, LOST, reports

CHILD = "tests.rig.store.child"
ROUNDS = 200
SOAK_ROUNDS = 4000
LIVES = 10  # of one store: each check takes longer than the last
COMMITS = 100_000  # more than any life has time for
LINES = (0, 1, 1, 2, 5, 10)  # of the report, to wait for before the kill
FASTER = {"fsync": 1, "interval": 10}
LONGEST_S = 0.02  # to wait after these lines
COMPACTED_LIVES = 0.2
LATEST = 8  # acknowledgements in flight: fewer than the kept results of a producer
PATIENCE_S = 60.0
# A part of a commit is stored without the rest: messages of a shard, one of two records, the end
# of the ring, or the entry of a staged block without the block.
TORN = (
    r"not dense|read as a whole|records disagree|producer \d: \d+ of \d+|ring: ends at \d+ after"
    r"|a staged block is missing|topic '\w+' is damaged"
)


class Tally:
    """Counts of a run, which show that it exercised the store."""

    def __init__(self) -> None:
        self.kills = self.commits = self.repeats = self.early = 0
        self.compactions = self.lost = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.early} before the check was done), "
            f"{self.commits} commits acknowledged, {self.repeats} there without it, "
            f"{self.compactions} compactions, {self.lost} lost before an interval's end"
        )


def lives(
    server: ChildServer, folder: Path, durability: str, choices: random.Random, tally: Tally
) -> None:
    """Run children on one store. Each but the last is killed."""
    report = folder.with_suffix(".report")
    for _ in range(LIVES):
        before = len(reports(str(report)))
        late = choices.choice((0, 0, LATEST))
        compact = choices.random() < COMPACTED_LIVES
        asked = (str(folder), str(report), durability, COMMITS, late, compact)
        child = server.start("live", *asked)
        await_lines(report, before + choices.choice(LINES) * FASTER[durability], child)
        time.sleep(choices.uniform(0, LONGEST_S))
        child.kill()
        tally.kills += 1
        tally.early += len(reports(str(report))) == before
        demand_no_faults(child.wait())
    demand_no_faults(server.run("live", str(folder), str(report), durability, 0))
    lines = reports(str(report))
    reported = Reported.of(lines)
    tally.compactions += lines.count(COMPACTED)
    tally.lost += sum(int(line.split()[1]) for line in lines if line.startswith(LOST))
    tally.commits += sum(reported.acked.values())
    tally.repeats += reported.duplicates


def await_lines(report: Path, count: int, child: AnsweringChild) -> None:
    """Wait until `count` lines were reported, or until the child ends with faults."""
    deadline = time.monotonic() + PATIENCE_S
    while len(reports(str(report))) < count and not child.has_ended:
        assert time.monotonic() < deadline, "the child neither works nor ends"
        time.sleep(0.001)


def demand_no_faults(ended: ChildResult) -> None:
    assert not ended.failure, ended.failure
    assert not ended.answer, "\n".join(ended.answer)


def kill_writers(tmp_path: Path, durability: str, rounds: int) -> Tally:
    seed = random.randrange(1 << 32)
    choices, tally = random.Random(seed), Tally()
    with ChildServer(CHILD) as server:
        for number in range(rounds // LIVES):
            try:
                lives(server, tmp_path / f"store{number}", durability, choices, tally)
            except AssertionError as error:
                error.add_note(f"seed {seed}, store {number}, after {tally}")
                raise
    return tally


@pytest.mark.sabotage("stamps-off", expects=r"producer \d: \d+ of \d+")
@pytest.mark.sabotage("torn-commits", expects=TORN, tries=3)
@pytest.mark.sabotage("keep-nothing", expects=r"producer \d: \d+ commits acknowledged, 0 there")
def test_acknowledged_commits_survive_kills_exactly_once(tmp_path):
    tally = kill_writers(tmp_path, "fsync", ROUNDS)
    assert tally.commits > tally.kills == ROUNDS, tally
    assert tally.repeats > 0, "no kill came between a commit and its acknowledgement"
    assert tally.compactions > 0


@pytest.mark.sabotage("torn-commits", expects=TORN, tries=3)
def test_interval_kill_loses_only_whole_commits_from_the_end(tmp_path):
    tally = kill_writers(tmp_path, "interval", ROUNDS // 5)
    assert tally.commits > tally.kills == ROUNDS // 5, tally
    assert tally.lost > 0, "no kill came before the end of an interval"


@pytest.mark.soak
def test_many_kills(tmp_path):
    assert kill_writers(tmp_path, "fsync", SOAK_ROUNDS).kills == SOAK_ROUNDS
    assert kill_writers(tmp_path, "interval", SOAK_ROUNDS // 4).kills == SOAK_ROUNDS // 4
