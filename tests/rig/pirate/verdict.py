"""The verdict on a round: every anomaly in a sentence; none if all is as promised.

    judge(histories, seen) -> ["a got 7 of orders after 5: a gap", ...]

Clients know their answers and not the content of a topic, which the reader knows. The
rules follow from the two:

    the topic    has ids 1, 2, 3 … and no message twice
    a PUT        that was answered with an id is there, under that id; one that was refused is
                 not there; those of one client are in its order
        a reader     gets each message after its SUB's LAST once, without a gap; in the end it has
                     read all of them
    any answer   is one that this client can get: no other client has its id

A client that was killed may have been between its user and its record of LAST. Then, as it
delivers: *before* recording, its first message afterwards may be one that it had;
*after* recording, it may lack the one that it was about to hand over. Nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.rig.fdq.journal import UNKNOWN, Operation
from tests.rig.pirate.random_client import DRAINED, GET, OK, PUT, SUB, UNSENT, UNSUB

# Answers to a client that makes no mistake and shares its id with no other.
FORESEEN: Final = {
    PUT: (OK, UNKNOWN, UNSENT, "NO_TOPIC"),
    SUB: (OK, UNKNOWN, UNSENT),
    UNSUB: (OK, UNKNOWN, UNSENT),
    GET: (OK, UNKNOWN, "NONE"),
    DRAINED: (UNKNOWN,),
}

Seen = Mapping[str, Sequence[tuple[int, str]]]


@dataclass(frozen=True)
class Life:
    operations: Sequence[Operation]
    was_killed: bool = False


@dataclass(frozen=True)
class History:
    """One client: the operations of each of its lives, in order."""

    name: str
    lives: Sequence[Life]
    records_first: bool = False  # LAST is recorded before a message is delivered


@dataclass
class Cursor:
    """Where a reader stands in one topic."""

    last: int
    fresh: bool = False  # killed since it last read


@dataclass
class Reader:
    history: History
    cursors: dict[str, Cursor] = field(default_factory=dict)


def judge(histories: Sequence[History], seen: Seen) -> list[str]:
    anomalies = [one for topic, messages in seen.items() for one in _topic(topic, messages)]
    for history in histories:
        anomalies += _answers(history)
        anomalies += _puts(history, seen)
        anomalies += _reads(history, seen)
    return anomalies


def _topic(topic: str, messages: Sequence[tuple[int, str]]) -> Iterator[str]:
    ids = [identity for identity, _ in messages]
    if ids != list(range(1, len(ids) + 1)):
        yield f"{topic} has ids {_first_odd(ids)}"
    where: dict[str, int] = {}
    for identity, body in messages:
        if body in where:
            yield f"{topic} has {body!r} as {where[body]} and as {identity}: doubled"
        where[body] = identity


def _first_odd(ids: Sequence[int]) -> str:
    at = next(at for at, identity in enumerate(ids) if identity != at + 1)
    return f"… {ids[max(0, at - 1) : at + 2]} … where {at + 1} should be"


def _answers(history: History) -> Iterator[str]:
    for one in _all(history):
        if one.outcome not in FORESEEN[one.kind]:
            yield f"{history.name} received {one.outcome} for {one.kind}"


def _puts(history: History, seen: Seen) -> Iterator[str]:
    for topic, messages in seen.items():
        there = {body: identity for identity, body in messages}
        newest = 0
        for one in _all(history):
            if one.kind != PUT or one.fields["topic"] != topic:
                continue
            yield from _put(history, topic, one, there)
            found = there.get(one.fields["body"])
            if found is not None:
                if found < newest:
                    yield f"{history.name}'s {one.fields['body']!r} is before an earlier one"
                newest = found


def _put(history: History, topic: str, one: Operation, there: Mapping[str, int]) -> Iterator[str]:
    body = one.fields["body"]
    found = there.get(body)
    if one.outcome == OK and found != one.answer["value"]:
        yield f"{history.name} put {body!r} in {topic} as {one.answer['value']}; it is {found}"
    if one.outcome not in (OK, UNKNOWN) and found is not None:
        yield f"{history.name}'s {body!r} was refused with {one.outcome}; in {topic} it is {found}"


def _reads(history: History, seen: Seen) -> Iterator[str]:
    reader = Reader(history)
    for life in history.lives:
        for one in life.operations:
            yield from _step(reader, one, seen)
        for cursor in reader.cursors.values():
            cursor.fresh = cursor.fresh or life.was_killed


def _step(reader: Reader, one: Operation, seen: Seen) -> Iterator[str]:
    topic, cursors = one.fields["topic"], reader.cursors
    if one.kind == UNSUB and one.outcome in (OK, UNKNOWN):
        cursors.pop(topic, None)
    elif one.kind == SUB and one.outcome == OK:
        yield from _sub(reader, topic, one.answer["value"])
    elif one.kind == GET and one.outcome == OK:
        yield from _read(reader, topic, one.answer["id"], one.answer["body"], seen)
    elif one.kind == DRAINED and topic in seen and topic in cursors:
        last, newest = cursors[topic].last, len(seen[topic])
        if last != newest:
            yield f"{reader.history.name}: {topic} ended at {last}; it is at {newest}"


def _sub(reader: Reader, topic: str, last: int) -> Iterator[str]:
    """A SUB must not move a subscription forward. The server's LAST may be an older one."""
    cursor = reader.cursors.setdefault(topic, Cursor(last))
    if last > cursor.last + (cursor.fresh and reader.history.records_first):
        yield f"{reader.history.name} stood at {cursor.last} in {topic}; SUB moved it to {last}"


def _read(reader: Reader, topic: str, identity: int, body: str, seen: Seen) -> Iterator[str]:
    who = f"{reader.history.name} in {topic}"
    if topic in seen and (identity, body) not in seen[topic][identity - 1 : identity]:
        yield f"{who} got {identity} {body!r}, which is not there"
    cursor = reader.cursors.get(topic)
    if cursor is None:
        # Subscribed by a SUB that was in doubt when it was killed: it begins where it begins.
        reader.cursors[topic] = Cursor(identity)
        return
    records_first = reader.history.records_first
    if identity <= cursor.last and not (
        cursor.fresh and not records_first and identity == cursor.last
    ):
        yield f"{who} got {identity} after {cursor.last}: doubled"
    if identity > cursor.last + 1 + (cursor.fresh and records_first):
        yield f"{who} got {identity} after {cursor.last}: a gap"
    cursor.last, cursor.fresh = max(cursor.last, identity), False


def _all(history: History) -> Iterator[Operation]:
    return (one for life in history.lives for one in life.operations)
