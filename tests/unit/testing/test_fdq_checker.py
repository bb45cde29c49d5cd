"""The checker of FDQ: for each anomaly a history with it, and a similar one without.

Handwritten rounds first, then random ones: correct rounds of a model have no anomaly, and each
round with one injected fault has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.rig.fdq.checker import check, in_words
from tests.rig.fdq.evidence import (
    ABORTED_READ,
    DUPLICATED,
    EARLY,
    LAG,
    LOST,
    NEEDLESS,
    REORDERED,
    STALE_ACK,
    STATS,
    TORN,
    UNACKED,
    UNDUE,
)
from tests.rig.fdq.history import (
    DUPLICATE,
    FAILED,
    LATE,
    NEVER_NS,
    OK,
    UNKNOWN,
    Ack,
    Assigned,
    Committed,
    History,
    Message,
    Produced,
    Reported,
    Run,
)
from tests.rig.fdq.snapshot import Dead, Found, Row, Shard, source_of
from tests.unit.testing.fdq_rounds import Round

# --- a small round: three messages of a key, the last one by a transaction

PLAIN, OTHER, MOVED = Message("k", "m0"), Message("k", "m1"), Message("k", "m2", True)
DELAYED = PLAIN._replace(not_before_ns=50)
OUTPUTS = ("m2|r1|0", "m2|r1|1")


def produced(*messages: Message, outcome: str = OK, at: int = 0) -> Produced:
    return Produced("w", messages, outcome, at, at + 1 if outcome != UNKNOWN else NEVER_NS)


def run(offset: int, at: int, **more) -> Run:
    outcome = more.get("outcome", OK)
    values: dict[str, Any] = {"consumer": "x", "epoch": 1, "key": "k", "body": f"m{offset}"} | more
    ended = at + 1 if outcome != UNKNOWN else NEVER_NS
    return Run(shard=0, offset=offset, **{"began_ns": at, "ended_ns": ended} | values)


def row(offset: int, body: str | None = None, key: str | None = "k") -> Row:
    return Row(0, offset, offset + 1, key, body or f"m{offset}")


def shard(count: int = 3, **more) -> Shard:
    values: dict[str, Any] = {
        "start": 0,
        "low": count,
        "ranges": (),
        "inserted": count,
        "routed": count,
    }
    values |= {"acked": count, "emitted": 3, "redelivered": 0, "dead_lettered": 0, "lag": 0}
    return Shard(0, **values | more)


HISTORY = History(
    produced=(produced(PLAIN, at=1), produced(OTHER, MOVED, at=3)),
    runs=(run(0, 10), run(1, 20), run(2, 30)),
    acks=(Ack("x", 1, 0, ((0, 2),), OK, 40, 44),),
    commits=(Committed("x", 1, 0, 2, OUTPUTS, OK, 30, 31),),
    assigned=(Assigned("x", 1, 0, 5),),
    max_deliver=2,
)
FOUND = Found(
    topic=(row(0), row(1), row(2)),
    outputs=(row(0, OUTPUTS[0]), row(1, OUTPUTS[1])),
    shards=(shard(),),
)


def kinds(history: History, found: Found) -> set[str]:
    return {anomaly.kind for anomaly in check(history, found)}


def changed(**fields) -> tuple[History, Found]:
    """Return the small round with changed fields."""
    seen = {name: fields.pop(name) for name in list(fields) if hasattr(FOUND, name)}
    return replace(HISTORY, **fields), replace(FOUND, **seen)


def test_correct_round_has_no_anomaly():
    assert check(HISTORY, FOUND) == []
    assert in_words([]) == "no anomalies"


# (anomaly, a round with it, a similar round without it)
COMMIT = HISTORY.commits[0]
ACK = HISTORY.acks[0]
RETRIED = (run(0, 10, outcome=FAILED), run(0, 12, delivery=2), run(1, 20), run(2, 30))
TWO_PRODUCERS = (produced(OTHER, at=1), replace(produced(PLAIN, MOVED, at=3), producer="v"))
DEAD = Dead(0, 1, "k", "m1", 2)
GIVEN_UP = (
    run(0, 10),
    run(1, 20, outcome=FAILED),
    run(1, 22, outcome=FAILED, delivery=2),
    run(2, 30),
)
GIVEN_UP_SHARD = (shard(dead_lettered=1, emitted=4, redelivered=1),)
ZOMBIE = (*HISTORY.runs, run(1, 50, consumer="y", epoch=2, delivery=2))
ZOMBIE_ACKS = (
    Ack("x", 1, 0, ((0, 1),), OK, 12, 13),
    Ack("y", 2, 0, ((1, 2),), OK, 52, 53),
)
TAKEN = (*HISTORY.assigned, Assigned("y", 2, 0, 45))


def resharded(began: int = 30, **fields) -> tuple[History, Found]:
    """Return the small round with its last message in the shard of a second generation."""
    values: dict[str, Any] = {
        "generations": (1, 1),
        "topic": (row(0), row(1), Row(1, 0, 3, "k", "m2")),
        "runs": (run(0, 10), run(1, 20), replace(run(0, began, body="m2"), shard=1)),
        "commits": (replace(COMMIT, shard=1, offset=0, began_ns=began, ended_ns=began + 1),),
        "assigned": (*HISTORY.assigned, Assigned("x", 1, 1, 5)),
        "shards": (shard(2, emitted=2), replace(shard(1, emitted=1), shard=1)),
    }
    return changed(**values | fields)


CASES = {
    "answered, not there": (
        LOST,
        changed(topic=FOUND.topic[:2], shards=(shard(2),)),
        changed(
            produced=(
                produced(PLAIN, at=1),
                produced(OTHER, at=3),
                produced(MOVED, outcome=UNKNOWN),
            ),
            topic=FOUND.topic[:2],
            outputs=(),
            runs=HISTORY.runs[:2],
            commits=(),
            shards=(shard(2, emitted=2),),
        ),
    ),
    "acked without a successful run": (
        LOST,
        changed(runs=(run(0, 10), run(1, 20, outcome=UNKNOWN), run(2, 30))),
        changed(
            runs=GIVEN_UP,
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)),),
            shards=GIVEN_UP_SHARD,
        ),
    ),
    "done without its outputs": (
        LOST,
        changed(outputs=(), commits=(replace(COMMIT, outcome=UNKNOWN),)),
        changed(commits=(replace(COMMIT, outcome=UNKNOWN),)),
    ),
    "done without one of its outputs": (LOST, changed(outputs=FOUND.outputs[:1]), changed()),
    "twice in the topic": (
        DUPLICATED,
        changed(topic=(*FOUND.topic, row(3, "m1")), shards=(shard(4),)),
        changed(),
    ),
    "produced by two runs": (
        DUPLICATED,
        changed(
            outputs=(*FOUND.outputs, row(2, "m2|r2|0")),
            commits=(COMMIT, replace(COMMIT, outputs=("m2|r2|0",), outcome=UNKNOWN, epoch=2)),
        ),
        changed(commits=(COMMIT, replace(COMMIT, outputs=("m2|r2|0",), outcome=DUPLICATE))),
    ),
    "two transactions of one message": (
        DUPLICATED,
        changed(commits=(COMMIT, replace(COMMIT, outputs=()))),
        changed(commits=(COMMIT, replace(COMMIT, outputs=(), outcome=UNKNOWN))),
    ),
    "handled after its ack": (
        DUPLICATED,
        changed(runs=ZOMBIE, assigned=TAKEN, shards=(shard(emitted=4, redelivered=1),)),
        changed(
            runs=ZOMBIE,
            acks=ZOMBIE_ACKS,
            assigned=TAKEN,
            shards=(shard(emitted=4, redelivered=1),),
            is_exact=False,
        ),
    ),
    "two dead letters": (
        DUPLICATED,
        changed(runs=GIVEN_UP, dead=(DEAD, DEAD), shards=GIVEN_UP_SHARD),
        changed(
            runs=GIVEN_UP,
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)),),
            shards=GIVEN_UP_SHARD,
        ),
    ),
    "acked and dead": (
        DUPLICATED,
        changed(runs=GIVEN_UP, dead=(DEAD,), shards=GIVEN_UP_SHARD),
        changed(
            runs=GIVEN_UP,
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)), replace(ACK, ranges=((1, 2),), outcome=FAILED)),
            shards=GIVEN_UP_SHARD,
        ),
    ),
    "ranges that overlap": (
        DUPLICATED,
        changed(shards=(shard(low=1, ranges=((2, 3), (1, 3))),)),
        changed(shards=(shard(low=3),)),
    ),
    "half a batch": (
        TORN,
        changed(
            produced=(produced(PLAIN, at=1), produced(OTHER, MOVED, outcome=UNKNOWN, at=3)),
            topic=FOUND.topic[:2],
            outputs=(),
            runs=HISTORY.runs[:2],
            commits=(),
            shards=(shard(2, emitted=2),),
        ),
        changed(produced=(produced(PLAIN, at=1), produced(OTHER, MOVED, outcome=UNKNOWN, at=3))),
    ),
    "half of a transaction": (
        TORN,
        changed(outputs=FOUND.outputs[:1], commits=(replace(COMMIT, outcome=UNKNOWN),)),
        changed(commits=(replace(COMMIT, outcome=UNKNOWN),)),
    ),
    "stored in another order": (
        REORDERED,
        changed(produced=(produced(OTHER, at=1), produced(PLAIN, MOVED, at=3))),
        changed(produced=TWO_PRODUCERS),
    ),
    "a key in two shards": (
        REORDERED,
        resharded(generations=(2,)),
        resharded(),
    ),
    "stored in a sealed shard": (
        REORDERED,
        resharded(topic=(row(0), Row(0, 1, 3, "k", "m1"), Row(1, 0, 2, "k", "m2"))),
        resharded(),
    ),
    "begun before the parent of its shard was acked": (
        REORDERED,
        resharded(began=15),
        resharded(began=25),
    ),
    "begun before the one before was done": (
        REORDERED,
        changed(runs=(run(0, 10), run(1, 9), run(2, 30))),
        changed(runs=(run(0, 10), run(1, 11), run(2, 30))),
    ),
    "begun before the previous message was done": (
        REORDERED,
        changed(runs=(run(0, 10, outcome=UNKNOWN), *HISTORY.runs[1:])),
        changed(runs=(run(0, 8, outcome=UNKNOWN), *HISTORY.runs), shards=(shard(emitted=4),)),
    ),
    "begun though the one before failed": (
        REORDERED,
        changed(
            runs=(run(0, 10, outcome=FAILED), run(1, 20), run(0, 22, delivery=2), run(2, 30)),
            shards=(shard(emitted=4, redelivered=1),),
        ),
        changed(runs=RETRIED, shards=(shard(emitted=4, redelivered=1),)),
    ),
    "begun before the repeat of a late one was done": (
        REORDERED,
        changed(
            runs=(run(0, 10, outcome=LATE), run(1, 20), run(0, 22, delivery=2), run(2, 30)),
            shards=(shard(emitted=4, redelivered=1),),
        ),
        changed(runs=(run(0, 10, outcome=LATE), *HISTORY.runs[1:])),
    ),
    "back to an earlier one": (
        REORDERED,
        changed(
            runs=(*HISTORY.runs, run(0, 35, delivery=2)),
            shards=(shard(emitted=4, redelivered=1),),
        ),
        changed(
            runs=(*HISTORY.runs, run(0, 35, delivery=2, epoch=0, consumer="y")),
            is_exact=False,
            shards=(shard(emitted=4, redelivered=1),),
        ),
    ),
    "produced further in another order": (
        REORDERED,
        changed(outputs=(row(0, OUTPUTS[0]), row(1, "m1|r0|0"), row(2, OUTPUTS[1]))),
        changed(),
    ),
    "appended before it was due": (
        UNDUE,
        changed(produced=(produced(DELAYED, at=1), HISTORY.produced[1])),
        changed(
            produced=(produced(DELAYED, at=1), HISTORY.produced[1]),
            topic=(row(0)._replace(timestamp_ns=50), row(1), row(2)),
        ),
    ),
    "refused, and there": (
        ABORTED_READ,
        changed(produced=(produced(PLAIN, at=1, outcome=FAILED), HISTORY.produced[1])),
        changed(produced=(produced(PLAIN, at=1, outcome=UNKNOWN), HISTORY.produced[1])),
    ),
    "never sent": (
        ABORTED_READ,
        changed(produced=HISTORY.produced[1:]),
        changed(),
    ),
    "the output of a refused transaction": (
        ABORTED_READ,
        changed(commits=(replace(COMMIT, outcome=FAILED),)),
        changed(
            commits=(COMMIT, replace(COMMIT, outcome=FAILED, outputs=("m2|r2|0",), epoch=0)),
        ),
    ),
    "the output of a transaction that was refused twice": (
        ABORTED_READ,
        changed(commits=(replace(COMMIT, outcome=FAILED), replace(COMMIT, outcome=FAILED))),
        changed(commits=(replace(COMMIT, outcome=UNKNOWN), replace(COMMIT, outcome=FAILED))),
    ),
    "the output of no transaction": (
        ABORTED_READ,
        changed(commits=()),
        changed(),
    ),
    "read otherwise than written": (
        ABORTED_READ,
        changed(runs=(run(0, 10, body="m00"), *HISTORY.runs[1:])),
        changed(),
    ),
    "a dead letter of nothing": (
        ABORTED_READ,
        changed(dead=(DEAD._replace(key="other"),)),
        changed(),
    ),
    "an ack from the past": (
        STALE_ACK,
        changed(assigned=(*HISTORY.assigned, Assigned("y", 2, 0, 39))),
        changed(assigned=(*HISTORY.assigned, Assigned("y", 2, 0, 42))),
    ),
    "an ack from the past that was refused": (
        STALE_ACK,
        changed(acks=(ACK, replace(ACK, began_ns=60, ended_ns=61)), assigned=TAKEN),
        changed(acks=(ACK, replace(ACK, began_ns=60, ended_ns=61, outcome=FAILED)), assigned=TAKEN),
    ),
    "a transaction from the past": (
        STALE_ACK,
        changed(assigned=(*HISTORY.assigned, Assigned("y", 2, 0, 29))),
        changed(assigned=(*HISTORY.assigned, Assigned("y", 2, 0, 42))),
    ),
    "given up early": (
        EARLY,
        changed(
            runs=GIVEN_UP[:2] + GIVEN_UP[3:],
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)),),
            shards=(shard(dead_lettered=1),),
        ),
        changed(
            runs=GIVEN_UP,
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)),),
            shards=GIVEN_UP_SHARD,
        ),
    ),
    "told of, begun, and given up early": (
        EARLY,
        changed(
            runs=GIVEN_UP[:2] + GIVEN_UP[3:],
            reported=(Reported("x", 0, 1, 19),),
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)),),
            shards=(shard(dead_lettered=1),),
        ),
        changed(
            runs=GIVEN_UP[:2] + GIVEN_UP[3:],
            reported=(Reported("y", 0, 1, 19),),
            dead=(DEAD,),
            acks=(replace(ACK, ranges=((0, 1),)),),
            shards=(shard(dead_lettered=1),),
        ),
    ),
    "done twice without a death": (
        NEEDLESS,
        changed(runs=(run(0, 8), *HISTORY.runs), acks=(), shards=(shard(emitted=4),)),
        changed(
            runs=(run(0, 8), *HISTORY.runs), acks=(), shards=(shard(emitted=4),), is_exact=False
        ),
    ),
    "not acked": (
        UNACKED,
        changed(shards=(shard(low=1, ranges=((2, 3),), acked=2),)),
        changed(
            runs=HISTORY.runs[1:],
            acks=(replace(ACK, ranges=((1, 2),)),),
            shards=(shard(start=1, acked=2, emitted=2),),
        ),
    ),
    "no record at all": (UNACKED, changed(shards=()), changed()),
    "lag": (LAG, changed(shards=(shard(lag=1),)), changed()),
    "inserted": (STATS, changed(shards=(shard(inserted=4),)), changed()),
    "routed": (STATS, changed(shards=(shard(routed=2),)), changed()),
    "acked": (STATS, changed(shards=(shard(acked=2),)), changed()),
    "dead_lettered": (STATS, changed(shards=(shard(dead_lettered=1),)), changed()),
    "more emitted than was": (
        STATS,
        changed(shards=(shard(emitted=4),), is_exact=False),
        changed(shards=(shard(emitted=2),), is_exact=False),
    ),
    "less emitted than was": (STATS, changed(shards=(shard(emitted=2),)), changed()),
    "redelivered": (
        STATS,
        changed(runs=RETRIED, shards=(shard(emitted=4),)),
        changed(runs=RETRIED, shards=(shard(emitted=4),), is_exact=False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_checker_detects(name):
    kind, guilty, _ = CASES[name]
    assert kind in kinds(*guilty)


@pytest.mark.parametrize("name", CASES)
def test_checker_reports_no_false_anomaly(name):
    _, _, innocent = CASES[name]
    assert check(*innocent) == [], in_words(check(*innocent))


# --- at random


Harm = Callable[[Random, History, Found], tuple[History, Found] | None]


def pick(random: Random, things: Iterable[Any]) -> Any:
    found = list(things)
    return random.choice(found) if found else None


def swapped(things: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple(new if one is old else one for one in things)


def without(things: tuple[Any, ...], *gone: Any) -> tuple[Any, ...]:
    return tuple(one for one in things if not any(one is other for other in gone))


def answered(history: History, found: Found) -> list[Row]:
    """Rows whose produce call succeeded."""
    sure = {one.body for call in history.produced if call.outcome == OK for one in call.messages}
    return [row for row in found.topic if row.body in sure]


def neighbours(rows: Iterable[Row], same: Callable[[Row], object]) -> list[tuple[Row, Row]]:
    """Consecutive pairs of one key that differ in `same`."""
    pairs = [
        pair
        for key in {row.key for row in rows} - {None}
        for pair in pairwise(sorted(row for row in rows if row.key == key))
    ]
    return [pair for pair in pairs if same(pair[0]) != same(pair[1])]


def lose_a_message(random, history, found):
    if gone := pick(random, answered(history, found)):
        return history, replace(found, topic=without(found.topic, gone))
    return None


def lose_outputs(random, history, found):
    if one := pick(random, (one for one in history.commits if one.outcome == OK)):
        left = tuple(row for row in found.outputs if row.body not in one.outputs)
        return history, replace(found, outputs=left)
    return None


def pass_over(random, history, found):
    """No handler has run it."""
    dead = {letter.position for letter in found.dead}
    plain = {one.body for call in history.produced for one in call.messages if not one[2]}
    rows = (row for row in found.topic if row.body in plain and row.position not in dead)
    if row := pick(random, rows):
        runs = (run for run in history.runs if (run.shard, run.offset) != row.position)
        return replace(history, runs=tuple(runs)), found
    return None


def store_twice(random, history, found):
    if row := pick(random, found.topic):
        again = row._replace(offset=max(one.offset for one in found.topic) + 1)
        return history, replace(found, topic=(*found.topic, again))
    return None


def produce_twice(random, history, found):
    if row := pick(random, found.outputs):
        again = Row(0, len(found.outputs), 0, row.key, f"{source_of(row.body)}|again|0")
        return history, replace(found, outputs=(*found.outputs, again))
    return None


def handle_after_its_ack(random, history, found):
    if ack := pick(random, (one for one in history.acks if one.outcome == OK)):
        offset = ack.ranges[0][0]
        old = next(one for one in history.runs if (one.shard, one.offset) == (ack.shard, offset))
        late = replace(old, epoch=ack.epoch + 1, began_ns=NEVER_NS - 1)
        return replace(history, runs=(*history.runs, late)), found
    return None


def bury_twice(random, history, found):
    if letter := pick(random, found.dead):
        return history, replace(found, dead=(*found.dead, letter))
    return None


def tear_a_batch(random, history, found):
    bodies = {row.body: row for row in found.topic}
    calls = (one for one in history.produced if len(one.messages) > 1)
    if call := pick(random, (one for one in calls if one.messages[0].body in bodies)):
        unsure = replace(call, outcome=UNKNOWN)
        gone = bodies[call.messages[0].body]
        torn = replace(found, topic=without(found.topic, gone))
        return replace(history, produced=swapped(history.produced, call, unsure)), torn
    return None


def tear_a_transaction(random, history, found):
    if one := pick(random, (one for one in history.commits if one.outcome == OK)):
        unsure = replace(one, outcome=UNKNOWN)
        left = tuple(row for row in found.outputs if row.body != one.outputs[0])
        history = replace(history, commits=swapped(history.commits, one, unsure))
        return history, replace(found, outputs=left)
    return None


def store_in_another_order(random, history, found):
    if pair := pick(random, neighbours(found.topic, lambda row: row.body)):
        first, second = pair
        topic = swapped(found.topic, first, first._replace(body=second.body))
        return history, replace(
            found, topic=swapped(topic, second, second._replace(body=first.body))
        )
    return None


def begin_too_soon(random, history, found):
    dead = {letter.position for letter in found.dead}
    later = {
        pair[1].position for pair in neighbours(found.topic, tuple) if pair[0].position not in dead
    }
    if run := pick(random, (one for one in history.runs if (one.shard, one.offset) in later)):
        return replace(history, runs=swapped(history.runs, run, replace(run, began_ns=0))), found
    return None


def produce_in_another_order(random, history, found):
    if pair := pick(random, neighbours(found.outputs, lambda row: source_of(row.body))):
        first, second = pair
        rows = swapped(found.outputs, first, first._replace(body=second.body))
        rows = swapped(rows, second, second._replace(body=first.body))
        return history, replace(found, outputs=rows)
    return None


def show_what_was_refused(random, history, found):
    there = {row.body for row in found.topic}
    calls = (one for one in history.produced if one.messages[0].body in there)
    if call := pick(random, calls):
        refused = swapped(history.produced, call, replace(call, outcome=FAILED))
        return replace(history, produced=refused), found
    return None


def show_what_was_aborted(random, history, found):
    if one := pick(random, (one for one in history.commits if one.outcome == OK)):
        refused = swapped(history.commits, one, replace(one, outcome=FAILED))
        return replace(history, commits=refused), found
    return None


def make_something_up(random, history, found):
    row = Row(0, 10**6, 10**6, "a", "unsent")
    return history, replace(found, topic=(*found.topic, row))


def accept_a_stale_ack(random, history, found):
    told = {(one.consumer, one.shard, one.epoch) for one in history.assigned}
    stale = (one for one in history.acks if one.outcome == FAILED)
    if one := pick(random, (*stale, *(one for one in history.commits if one.outcome == FAILED))):
        assert (one.consumer, one.shard, one.epoch) in told
        taken = replace(one, outcome=OK)
        acks, commits = (swapped(things, one, taken) for things in (history.acks, history.commits))
        return replace(history, acks=acks, commits=commits), found
    return None


def give_up_early(random, history, found):
    if letter := pick(random, found.dead):
        runs = [run for run in history.runs if (run.shard, run.offset) == letter.position]
        return replace(history, runs=without(history.runs, *runs[1:])), found
    return None


def of_a_shard(kind: str, **fields: Callable[[Shard], object]) -> tuple[str, Harm]:
    def harm(random, history, found):
        one = pick(random, (one for one in found.shards if one.inserted))
        if one is None:
            return None
        changes = {name: change(one) for name, change in fields.items()}
        return history, replace(found, shards=swapped(found.shards, one, replace(one, **changes)))

    return kind, harm


HARMS: dict[str, tuple[str, Harm]] = {
    "lose a message": (LOST, lose_a_message),
    "lose outputs": (LOST, lose_outputs),
    "pass over": (LOST, pass_over),
    "store twice": (DUPLICATED, store_twice),
    "produce twice": (DUPLICATED, produce_twice),
    "handle after its ack": (DUPLICATED, handle_after_its_ack),
    "bury twice": (DUPLICATED, bury_twice),
    "tear a batch": (TORN, tear_a_batch),
    "tear a transaction": (TORN, tear_a_transaction),
    "store in another order": (REORDERED, store_in_another_order),
    "begin too soon": (REORDERED, begin_too_soon),
    "produce in another order": (REORDERED, produce_in_another_order),
    "show what was refused": (ABORTED_READ, show_what_was_refused),
    "show what was aborted": (ABORTED_READ, show_what_was_aborted),
    "make something up": (ABORTED_READ, make_something_up),
    "accept a stale ack": (STALE_ACK, accept_a_stale_ack),
    "give up early": (EARLY, give_up_early),
    "leave the last": of_a_shard(UNACKED, low=lambda one: one.low - 1),
    "a lag": of_a_shard(LAG, lag=lambda one: 1),
    "inserted": of_a_shard(STATS, inserted=lambda one: one.inserted + 1),
    "acked": of_a_shard(STATS, acked=lambda one: one.acked - 1),
    "emitted": of_a_shard(STATS, emitted=lambda one: 10**6),
    "redelivered": of_a_shard(STATS, redelivered=lambda one: 10**6),
    "dead lettered": of_a_shard(STATS, dead_lettered=lambda one: one.dead_lettered + 1),
}

seeds = st.integers(0, 2**32)
lengths = st.integers(20, 80)


@given(seeds, lengths)
def test_generated_correct_rounds_have_no_anomaly(seed, steps):
    played = Round(Random(seed)).play(steps)
    assert check(played.history, played.found) == []


@pytest.mark.parametrize("name", HARMS)
@settings(max_examples=25)
@given(seeds, lengths)
def test_every_injected_fault_is_detected(name, seed, steps):
    kind, harm = HARMS[name]
    played = Round(Random(seed)).play(steps)
    harmed = harm(Random(seed), played.history, played.found)
    assume(harmed is not None)
    assert harmed is not None
    assert kind in kinds(*harmed)
