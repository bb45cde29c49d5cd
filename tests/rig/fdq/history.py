"""The history of a round: the operations of its clients and their outcomes.

Every value is a client's observation with its time: a begin is recorded before the call, an end
after the response. Outcomes are those of Jepsen's operations: `ok` (done), `failed` (refused,
must be invisible), `unknown` (no response). A transaction may also be `duplicate`: it was done
before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.rig.fdq.journal import NEVER_NS, UNKNOWN, Operation

OK: Final = "ok"
FAILED: Final = "failed"
DUPLICATE: Final = "duplicate"
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
    """A message. `body` is unique in a round; a transaction acks `transactional` ones."""

    key: str | None
    body: str
    transactional: bool = False


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
class Told:
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
    told: tuple[Told, ...] = ()
    max_deliver: int = 5
    is_exact: bool = True  # without kills, counts that travel with acks are exact


def history_of(journals: Iterable[Operation], *, max_deliver: int, is_exact: bool) -> History:
    """Return the journals of all processes as one history, in time order."""
    sent = (one for one in journals if one.outcome != UNSENT)
    entries = sorted(sent, key=lambda one: one.began_ns)

    def of(kind: str) -> list[Operation]:
        return [one for one in entries if one.kind == kind]

    return History(
        produced=tuple(_produced(one) for one in of(PRODUCE)),
        runs=tuple(_run(one) for one in of(RUN)),
        acks=tuple(ack for one in of(ACK) for ack in _acks(one)),
        commits=tuple(_committed(one) for one in of(COMMIT)),
        assigned=tuple(_assigned(one) for one in of(ASSIGNED)),
        told=tuple(told for one in of(RUNNING) for told in _told(one)),
        max_deliver=max_deliver,
        is_exact=is_exact,
    )


def _produced(one: Operation) -> Produced:
    messages = tuple(Message(*fields) for fields in one.fields["messages"])
    return Produced(one.fields["producer"], messages, one.outcome, one.began_ns, one.ended_ns)


def _run(one: Operation) -> Run:
    return Run(
        one.process, **one.fields, outcome=one.outcome, began_ns=one.began_ns, ended_ns=one.ended_ns
    )


def _acks(one: Operation) -> list[Ack]:
    """Yield one value per shard of an ack."""
    refused = one.answer.get("refused", [])
    return [
        Ack(
            one.process,
            part["epoch"],
            part["shard"],
            tuple((first, end) for first, end in part["acked"]),
            FAILED if one.outcome == OK and part["shard"] in refused else one.outcome,
            one.began_ns,
            one.ended_ns,
        )
        for part in one.fields["shards"]
    ]


def _committed(one: Operation) -> Committed:
    fields = {**one.fields, "outputs": tuple(one.fields["outputs"])}
    return Committed(
        one.process, **fields, outcome=one.outcome, began_ns=one.began_ns, ended_ns=one.ended_ns
    )


def _assigned(one: Operation) -> Assigned:
    return Assigned(one.process, one.fields["epoch"], one.fields["shard"], one.began_ns)


def _told(one: Operation) -> list[Told]:
    return [
        Told(one.process, int(shard), offset, one.began_ns)
        for shard, offsets in one.fields["shards"].items()
        for offset in offsets
    ]


__all__ = [
    "ACK",
    "ASSIGNED",
    "COMMIT",
    "DUPLICATE",
    "FAILED",
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
    "Run",
    "Told",
    "history_of",
]
