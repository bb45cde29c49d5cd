"""The history of a round: the operations of its clients and their outcomes.

Every value is a client's observation with its time: a begin is recorded before the call, an end
after the response. Outcomes are those of Jepsen's operations: `ok` (done), `failed` (refused,
must be invisible), `unknown` (no response). A transaction may also be `duplicate`: it was done
before. A run may be `late`: it returned after its deadline, and the consumer may count it either
way, because it does not look at deadlines while its ack waits for a bus that is down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.rig.fdq.journal import NEVER_NS, UNKNOWN, Operation

OK: Final = "ok"
FAILED: Final = "failed"
DUPLICATE: Final = "duplicate"
LATE: Final = "late"
UNSENT: Final = "unsent"  # the bus was unreachable: as if it had not begun

# The kinds of a journal's entries.
PRODUCE: Final = "produce"
RUN: Final = "run"
ACK: Final = "ack"
COMMIT: Final = "commit"
ASSIGNED: Final = "assigned"
RUNNING: Final = "running"

Position = tuple[int, int]  # shard, offset


class Message(NamedTuple):
    """A message. `body` is unique in a round; a transaction acks `transactional` ones.

    A delayed one must not be appended before `not_before_ns` of the wall clock.
    """

    key: str | None
    body: str
    transactional: bool = False
    not_before_ns: int = 0


@dataclass(frozen=True)
class Produced:
    """One produce call: a message, or an atomic batch."""

    producer: str
    messages: tuple[Message, ...]
    outcome: str = OK
    began_ns: int = 0
    ended_ns: int = NEVER_NS


@dataclass(frozen=True)
class Run:
    """A run of a handler. `ok`: it returned; `failed`: it raised."""

    consumer: str
    epoch: int  # of the assignment of the shard by which it came
    shard: int
    offset: int
    key: str | None
    body: str
    delivery: int = 1
    outcome: str = OK
    began_ns: int = 0
    ended_ns: int = NEVER_NS


@dataclass(frozen=True)
class Ack:
    """The report of one ack about one shard. `failed`: it was refused."""

    consumer: str
    epoch: int
    shard: int
    ranges: tuple[tuple[int, int], ...]
    outcome: str = OK
    began_ns: int = 0
    ended_ns: int = NEVER_NS


@dataclass(frozen=True)
class Committed:
    """A transaction: the ack of one message and the bodies of its outputs."""

    consumer: str
    epoch: int
    shard: int
    offset: int
    outputs: tuple[str, ...]
    outcome: str = OK
    began_ns: int = 0
    ended_ns: int = NEVER_NS


@dataclass(frozen=True)
class Assigned:
    """An assignment of a shard to a consumer under this epoch."""

    consumer: str
    epoch: int
    shard: int
    at_ns: int = 0


@dataclass(frozen=True)
class Reported:
    """A consumer was about to report a run to the bus."""

    consumer: str
    shard: int
    offset: int
    at_ns: int = 0


@dataclass(frozen=True)
class History:
    produced: tuple[Produced, ...] = ()
    runs: tuple[Run, ...] = ()
    acks: tuple[Ack, ...] = ()
    commits: tuple[Committed, ...] = ()
    assigned: tuple[Assigned, ...] = ()
    reported: tuple[Reported, ...] = ()
    max_deliver: int = 5
    is_exact: bool = True  # without kills, counts that travel with acks are exact


def history_of(journals: Iterable[Operation], *, max_deliver: int, is_exact: bool) -> History:
    """Return the journals of all processes as one history, in time order."""
    by_kind: dict[str, list[Operation]] = defaultdict(list)
    for operation in sorted(journals, key=lambda operation: operation.began_ns):
        if operation.outcome != UNSENT:
            by_kind[operation.kind].append(operation)
    return History(
        produced=tuple(
            Produced(
                produce.fields["producer"],
                tuple(Message(*fields) for fields in produce.fields["messages"]),
                *_outcome(produce),
            )
            for produce in by_kind[PRODUCE]
        ),
        runs=tuple(
            Run(run.process, **run.fields, **_outcome(run)._asdict()) for run in by_kind[RUN]
        ),
        acks=tuple(
            Ack(
                ack.process,
                part["epoch"],
                part["shard"],
                tuple((first, end) for first, end in part["acked"]),
                *_outcome(ack, is_refused=part["shard"] in ack.answer.get("refused", ())),
            )
            for ack in by_kind[ACK]
            for part in ack.fields["shards"]
        ),
        commits=tuple(
            Committed(
                commit.process,
                **{**commit.fields, "outputs": tuple(commit.fields["outputs"])},
                **_outcome(commit)._asdict(),
            )
            for commit in by_kind[COMMIT]
        ),
        assigned=tuple(
            Assigned(entry.process, entry.fields["epoch"], entry.fields["shard"], entry.began_ns)
            for entry in by_kind[ASSIGNED]
        ),
        reported=tuple(
            Reported(report.process, int(shard), offset, report.began_ns)
            for report in by_kind[RUNNING]
            for shard, offsets in report.fields["shards"].items()
            for offset in offsets
        ),
        max_deliver=max_deliver,
        is_exact=is_exact,
    )


class _Outcome(NamedTuple):
    outcome: str
    began_ns: int
    ended_ns: int


def _outcome(operation: Operation, *, is_refused: bool = False) -> _Outcome:
    """Return the outcome and its times; a part of an accepted call may be refused."""
    outcome = FAILED if is_refused and operation.outcome == OK else operation.outcome
    return _Outcome(outcome, operation.began_ns, operation.ended_ns)


__all__ = [
    "ACK",
    "ASSIGNED",
    "COMMIT",
    "DUPLICATE",
    "FAILED",
    "LATE",
    "NEVER_NS",
    "OK",
    "PRODUCE",
    "RUN",
    "RUNNING",
    "UNKNOWN",
    "UNSENT",
    "Ack",
    "Assigned",
    "Committed",
    "History",
    "Message",
    "Position",
    "Produced",
    "Reported",
    "Run",
    "history_of",
]
