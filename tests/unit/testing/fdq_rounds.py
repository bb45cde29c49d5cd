"""Histories of a bus that keeps its word, made up step by step, for tests of the checker.

A `Round` is a small model of producers, a sharded log, a group's record and consumers. It
writes the history that clients of such a bus could have: answers get lost, consumers die,
others continue with shards that they have lost, transactions are refused, messages become dead
letters. The checker must find no anomaly in any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from tests.rig.fdq.history import (
    DUPLICATE,
    FAILED,
    OK,
    UNKNOWN,
    Ack,
    Assigned,
    Committed,
    History,
    Message,
    Produced,
    Run,
)
from tests.rig.fdq.journal import NEVER_NS
from tests.rig.fdq.snapshot import Dead, Found, Row, Shard, output_body

SHARDS = 2
KEYS = ("a", "b", "c", None)
MAX_DELIVER = 2


@dataclass
class Held:
    """A consumer's view of a shard, which may be out of date."""

    consumer: str
    shard: int
    epoch: int
    skip: set[int]
    next: int = 0
    done: list[int] = field(default_factory=list)  # handled, not acked yet


@dataclass
class Record:
    epoch: int = 0
    acked: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)


class Round:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._is_calm = random.random() < 0.3  # no consumer dies, shards keep their owners
        self._now_ns = 0
        self._sent = 0
        self._log: list[list[Row]] = [[] for _ in range(SHARDS)]
        self._records = [Record() for _ in range(SHARDS)]
        self._held: list[Held] = []
        self._messages: dict[str, Message] = {}
        self._outputs: list[Row] = []
        self._dead: list[Dead] = []
        self.history = History(max_deliver=MAX_DELIVER)
        self.found = Found()

    def play(self, steps: int) -> Round:
        acts = (self.produce, self.produce, self.move, self.run, self.run, self.run, self.ack)
        for _ in range(steps):
            self._random.choice(acts)()
        return self._settle()

    # --- events

    def produce(self, outcome: str = "") -> None:
        messages = tuple(self._message() for _ in range(self._random.randint(1, 3)))
        began_ns = self._tick()
        outcome = outcome or self._chance((OK, 6), (UNKNOWN, 1), (FAILED, 1))
        if outcome == OK or (outcome == UNKNOWN and self._random.random() < 0.5):
            for one in messages:
                self._append(one)
        call = Produced("w", messages, outcome, began_ns, self._end(outcome))
        self.history = replace(self.history, produced=(*self.history.produced, call))

    def move(self) -> None:
        shard = self._random.randrange(SHARDS)
        if not (self._is_calm and self._records[shard].epoch):
            self.assign(shard)

    def assign(self, shard: int) -> Held:
        """Assign the shard to a new or an existing consumer, without notice to its owner."""
        record = self._records[shard]
        if record.epoch:  # its owner has not drained it
            self.history = replace(self.history, is_exact=False)
        record.epoch += 1
        held = Held(self._random.choice("xyz"), shard, record.epoch, set(record.acked))
        self._held = [
            one for one in self._held if (one.consumer, one.shard) != (held.consumer, shard)
        ]
        self._held.append(held)
        told = Assigned(held.consumer, held.epoch, shard, self._tick())
        self.history = replace(self.history, assigned=(*self.history.assigned, told))
        return held

    def run(self, held: Held | None = None, outcome: str = "") -> None:
        held = held or (self._random.choice(self._held) if self._held else None)
        row = self._next(held) if held else None
        if held is None or row is None:
            return
        outcome, began_ns = (
            outcome or self._chance((OK, 8), (FAILED, 2), (UNKNOWN, self._deaths)),
            self._tick(),
        )
        delivery = 1 + self._records[row.shard].attempts.get(row.offset, 0)
        moves = self._messages[row.body].transactional
        if outcome == OK and moves:
            outcome = self._commit(held, row)
        self._note_run(held, row, delivery, outcome, began_ns)
        if outcome == OK and moves:
            held.next = row.offset + 1
        elif outcome == OK:
            held.done.append(row.offset)
            held.next = row.offset + 1
        elif outcome == FAILED:
            self._fail(held, row)
        else:  # it died there
            self._held.remove(held)
            self.history = replace(self.history, is_exact=False)
            self._fail(held, row)

    def ack(self, held: Held | None = None, outcome: str = "") -> None:
        held = held or (self._random.choice(self._held) if self._held else None)
        if held is None or not held.done:
            return
        began_ns = self._tick()
        is_current = held.epoch == self._records[held.shard].epoch
        outcome = outcome or self._chance((OK, 6), (UNKNOWN, 1))
        if is_current and (outcome == OK or self._random.random() < 0.5):
            self._records[held.shard].acked |= set(held.done)
        outcome = FAILED if outcome == OK and not is_current else outcome
        ranges = tuple((offset, offset + 1) for offset in held.done)
        if outcome != UNKNOWN:
            held.done = []
        said = Ack(
            held.consumer,
            held.epoch,
            held.shard,
            ranges,
            outcome,
            began_ns,
            self._end(outcome),
        )
        self.history = replace(self.history, acks=(*self.history.acks, said))

    # --- how it happens

    @property
    def _deaths(self) -> int:
        return 0 if self._is_calm else 1

    def _tick(self) -> int:
        self._now_ns += 1
        return self._now_ns

    def _end(self, outcome: str) -> int:
        return NEVER_NS if outcome == UNKNOWN else self._tick()

    def _chance(self, *choices: tuple[str, int]) -> str:
        names, weights = zip(*choices, strict=True)
        return str(self._random.choices(names, weights)[0])

    def _message(self) -> Message:
        self._sent += 1
        key = self._random.choice(KEYS)
        message = Message(key, f"m{self._sent}", self._random.random() < 0.4)
        self._messages[message.body] = message
        return message

    def _append(self, one: Message) -> None:
        shard = KEYS.index(one.key) % SHARDS
        number = sum(map(len, self._log)) + 1
        self._log[shard].append(Row(shard, len(self._log[shard]), number, one.key, one.body))

    def _next(self, held: Held) -> Row | None:
        while held.next in held.skip:
            held.next += 1
        log = self._log[held.shard]
        return log[held.next] if held.next < len(log) else None

    def _note_run(self, held: Held, row: Row, delivery: int, outcome: str, began_ns: int) -> None:
        run = Run(
            held.consumer,
            held.epoch,
            row.shard,
            row.offset,
            row.key,
            row.body,
            delivery,
            outcome,
            began_ns,
            self._end(outcome),
        )
        self.history = replace(self.history, runs=(*self.history.runs, run))

    def _commit(self, held: Held, row: Row) -> str:
        """Return how the run ended; without an answer a consumer retries or dies."""
        record = self._records[row.shard]
        began_ns = self._tick()
        bodies = tuple(output_body(row.body, f"r{began_ns}", at) for at in range(2))
        outcome = self._chance((OK, 6), (UNKNOWN, 1))
        if held.epoch != record.epoch:
            outcome = FAILED if outcome == OK else outcome
        elif row.offset in record.acked:
            outcome = DUPLICATE if outcome == OK else outcome
        elif outcome == OK or self._random.random() < 0.5:
            record.acked.add(row.offset)
            for body in bodies:
                self._outputs.append(Row(0, len(self._outputs), 0, row.key, body))
        done = Committed(
            held.consumer,
            held.epoch,
            row.shard,
            row.offset,
            bodies,
            outcome,
            began_ns,
            self._end(outcome),
        )
        self.history = replace(self.history, commits=(*self.history.commits, done))
        if outcome == UNKNOWN and (self._is_calm or self._random.random() < 0.5):
            return self._commit(held, row)
        return OK if outcome == DUPLICATE else outcome

    def _fail(self, held: Held, row: Row) -> None:
        if held.epoch == self._records[row.shard].epoch:
            self._count_failure(row)
            if row.offset in self._records[row.shard].acked:
                held.next = row.offset + 1

    def _count_failure(self, row: Row) -> None:
        record = self._records[row.shard]
        if row.offset in record.acked:
            return
        record.attempts[row.offset] = record.attempts.get(row.offset, 0) + 1
        if record.attempts[row.offset] >= MAX_DELIVER:
            record.acked.add(row.offset)
            self._dead.append(Dead(row.shard, row.offset, row.key, row.body, MAX_DELIVER))

    # --- the end

    def _settle(self) -> Round:
        for shard, record in enumerate(self._records):
            owners = [one for one in self._held if (one.shard, one.epoch) == (shard, record.epoch)]
            held = owners[0] if owners else self.assign(shard)
            while self._next(held):
                self.run(held, OK)
                held = held if held in self._held else self.assign(shard)
            self.ack(held, OK)
        self.found = Found(
            tuple(row for log in self._log for row in log),
            tuple(self._outputs),
            tuple(self._dead),
            tuple(self._shard(shard) for shard in range(SHARDS)),
        )
        return self

    def _shard(self, shard: int) -> Shard:
        end = len(self._log[shard])
        runs = [run for run in self.history.runs if run.shard == shard]
        again = [run for run in runs if run.delivery > 1]
        return Shard(
            shard=shard,
            start=0,
            low=end,
            ranges=(),
            inserted=end,
            routed=end,
            acked=len(self._records[shard].acked),
            emitted=self._told(len(runs)),
            redelivered=self._told(len(again)),
            dead_lettered=sum(letter.shard == shard for letter in self._dead),
            lag=0,
        )

    def _told(self, count: int) -> int:
        return count if self.history.is_exact else self._random.randint(0, count)
