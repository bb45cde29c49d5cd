"""A history and a snapshot, indexed for the rules."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from tests.rig.fdq.history import OK, Committed, History, Message, Position, Run
from tests.rig.fdq.snapshot import Dead, Found, Row, Shard, source_of

LOST: Final = "lost"
DUPLICATED: Final = "duplicated"
TORN: Final = "torn"
REORDERED: Final = "reordered"
ABORTED_READ: Final = "aborted-read"
UNDUE: Final = "undue"
STALE_ACK: Final = "stale-ack"
NEEDLESS: Final = "needless repeat"
EARLY: Final = "dead-lettered early"
UNACKED: Final = "unacked"
LAG: Final = "lag"
STATS: Final = "stats"


class Anomaly(NamedTuple):
    kind: str
    text: str


class Evidence:
    def __init__(self, history: History, found: Found) -> None:
        self.history = history
        self.found = found

    @cached_property
    def messages(self) -> dict[str, Message]:
        """Every message that a producer tried to send, by body."""
        return {
            message.body: message for call in self.history.produced for message in call.messages
        }

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The rows of the topic by body; more than one is a fault."""
        rows = defaultdict(list)
        for row in self.found.topic:
            rows[row.body].append(row)
        return rows

    @cached_property
    def row_at(self) -> dict[Position, Row]:
        return {row.position: row for row in self.found.topic}

    @cached_property
    def outputs(self) -> dict[str, list[Row]]:
        """The outputs of transactions by the body of their source."""
        rows = defaultdict(list)
        for row in self.found.outputs:
            rows[source_of(row.body)].append(row)
        return rows

    @cached_property
    def output_bodies(self) -> frozenset[str]:
        return frozenset(row.body for row in self.found.outputs)

    @cached_property
    def dead(self) -> dict[Position, list[Dead]]:
        letters = defaultdict(list)
        for letter in self.found.dead:
            letters[letter.position].append(letter)
        return letters

    @cached_property
    def runs(self) -> dict[Position, list[Run]]:
        """Runs by message, in time order."""
        runs = defaultdict(list)
        for run in sorted(self.history.runs, key=lambda run: run.began_ns):
            runs[run.shard, run.offset].append(run)
        return runs

    @cached_property
    def unseen(self) -> dict[Position, int]:
        """By message, the number of runs that were reported and did not begin.

        If the consumer dies in between, the bus counts a failure nevertheless.
        """
        unseen = defaultdict(set)
        for report in self.history.reported:
            position, consumer = (report.shard, report.offset), report.consumer
            runs = self.runs.get(position, ())
            if not any(run.consumer == consumer and run.ended_ns > report.at_ns for run in runs):
                unseen[position].add(consumer)
        return {position: len(consumers) for position, consumers in unseen.items()}

    @cached_property
    def commits(self) -> dict[Position, list[Committed]]:
        commits = defaultdict(list)
        for commit in self.history.commits:
            commits[commit.shard, commit.offset].append(commit)
        return commits

    @cached_property
    def tries(self) -> dict[str, list[Committed]]:
        """Transactions by the body of each output; a try repeats until answered."""
        tries = defaultdict(list)
        for commit in self.history.commits:
            for body in commit.outputs:
                tries[body].append(commit)
        return tries

    @cached_property
    def shards(self) -> dict[int, Shard]:
        return {shard.shard: shard for shard in self.found.shards}

    def generation_of(self, shard: int) -> int:
        """The generation of a shard of the topic."""
        ends = list(accumulate(self.found.generations))
        return sum(end <= shard for end in ends)

    def has_acked(self, row: Row) -> bool:
        shard = self.shards.get(row.shard)
        return shard is not None and shard.start <= row.offset and shard.has_acked(row.offset)

    def accepted(self) -> list[tuple[Position, int, int]]:
        """(position, epoch, time of the response) of each accepted ack."""
        acked = [
            ((ack.shard, offset), ack.epoch, ack.ended_ns)
            for ack in self.history.acks
            if ack.outcome == OK
            for first, end in ack.ranges
            for offset in range(first, end)
        ]
        committed = [
            ((commit.shard, commit.offset), commit.epoch, commit.ended_ns)
            for commit in self.history.commits
            if commit.outcome == OK
        ]
        return acked + committed
