"""Runs: what one query publishes, epoch by epoch, whoever its driver is by then.

A stamp's producer and epoch speak of a process that holds the producer open. A query of
Spark has no such process: each of its epochs is published by another one, and which are
the query's own is known by its id alone. So the bus holds the producer itself, and keeps
a record beside it:

    run/PRODUCER → {"id": the query, "base": n, "epoch": n, "past": [queries before it]}

    no record                           the run begins; its counters go on behind `base`
    the same id                         counter + base is the stamp: a repeat publishes nothing
    another id, `on_new` "refuse"       Conflict: a fresh checkpoint is no replay
    another id, `on_new` "continue"     the run begins, as above, and ends the one before
    an id that was ended so             Fenced, whatever it asks for

A run begins by opening the producer: what an older one has under way is fenced by the
store. The record is written with the first epoch that is published; whoever was faster,
or died between the two steps, is noticed by its version or by `Fenced`, and it is tried
again. These producers are named apart from those of `producer.open`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from polybus.errors import Conflict, Fenced, MalformedRequest, Unavailable, UnknownProducer
from polybus.model.commit import Commit, CommitResult, RecordChange
from polybus.model.stamp import MAX_PRODUCER_BYTES, ProducerOptions, Stamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.identity import Identity
    from polybus.native.port.producer_registry import ProducerRegistry

PREFIX = "run/"  # of the producer's name in the store, and of the record's key
HABITS = ProducerOptions(dense=False)
REFUSE, CONTINUE = "refuse", "continue"
MAX_ID_BYTES = 255
MAX_ENDED_RUNS = 256  # ended runs that are remembered: some 10 kB
MAX_TRIES = 16  # each is lost to another run that began meanwhile


@dataclass(frozen=True, slots=True)
class QueryRun:
    """As it is stored."""

    id: str
    base: int
    epoch: int
    past: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCommit:
    """What is asked for: an epoch of a run, by the counter that the caller gives it."""

    producer: str
    counter: int
    run: str
    on_new: str
    stages: tuple[str, ...]

    @classmethod
    def parse(
        cls, stages: list[str], stamp: Mapping[str, Any] | None, run: Mapping[str, Any]
    ) -> RunCommit:
        """`MalformedRequest` says what is wrong with the stamp or the run."""
        if not run.keys() <= {"id", "on_new"} or not _is_name(run.get("id"), MAX_ID_BYTES):
            raise MalformedRequest(f"a run has an id of 1 to {MAX_ID_BYTES} bytes, and on_new")
        on_new = run.get("on_new", REFUSE)
        if on_new not in (REFUSE, CONTINUE):
            raise MalformedRequest(f"a run's on_new is {REFUSE} or {CONTINUE}")
        if stamp is None or set(stamp) != {"producer", "counter"}:
            raise MalformedRequest("the stamp of a run has producer and counter, and no epoch")
        if not _is_name(stamp["producer"], MAX_PRODUCER_BYTES - len(PREFIX)):
            raise MalformedRequest(
                f"a run's producer has 1 to {MAX_PRODUCER_BYTES - len(PREFIX)} bytes"
            )
        counter = Stamp.parse({"epoch": 1, **stamp}).counter
        return cls(stamp["producer"], counter, run["id"], on_new, tuple(stages))

    @property
    def name(self) -> str:
        return PREFIX + self.producer


def publish(
    durable: DurableTopics, owners: ProducerRegistry, caller: Identity, asked: RunCommit
) -> CommitResult:
    """The stages become visible at once, unless this epoch of the run was published before."""
    try:
        owners.check(caller, asked.name)  # remembered: no step of the store
    except UnknownProducer:
        owners.claim(caller, asked.name)
    was_fenced = False
    for _ in range(MAX_TRIES):
        version, run, change = _resolve_run(durable, asked, was_fenced)
        changes = (RecordChange(asked.name.encode(), _encode(run), version),) if change else ()
        stamp = Stamp(asked.name, run.epoch, run.base + asked.counter)
        try:
            return durable.commit(Commit((), asked.stages, changes, stamp)).result()
        except (Fenced, UnknownProducer):
            was_fenced = True
        except Conflict:  # the record is another's by now
            was_fenced = False
    raise Unavailable(f"producer {asked.producer!r} is fought over by several runs: try again")


def _resolve_run(
    durable: DurableTopics, asked: RunCommit, was_fenced: bool
) -> tuple[int, QueryRun, bool]:
    """The record's version, the run that shall be, and whether that must be written."""
    found = durable.store.get(asked.name.encode())
    version = found.version if found else 0
    run = _decode(found.value) if found else None
    if run is not None and run.id == asked.run:
        if not was_fenced:
            return version, run, False
        epoch = durable.store.open_producer(asked.name, HABITS).epoch
        return version, QueryRun(run.id, run.base, epoch, run.past), True
    past = _check_takeover(asked, run) if run else ()
    opened = durable.store.open_producer(asked.name, HABITS)
    return version, QueryRun(asked.run, opened.last_counter, opened.epoch, past), True


def _check_takeover(asked: RunCommit, run: QueryRun) -> tuple[str, ...]:
    """The runs before this one, if it may take over."""
    if asked.run in run.past:
        raise Fenced(
            f"query {asked.run} was replaced by {run.id} as producer {asked.producer!r}: "
            "stop it, or give it a producerId of its own"
        )
    if asked.on_new == REFUSE:
        raise Conflict(
            f"set onNewCheckpoint=continue if query {asked.run} shall go on as producer "
            f"{asked.producer!r}, which was query {run.id}'s: with a fresh checkpoint it may "
            "publish again what is there, and its epochs are no replays"
        )
    return (run.id, *run.past)[:MAX_ENDED_RUNS]


def _encode(run: QueryRun) -> bytes:
    return json.dumps(asdict(run)).encode()


def _decode(raw: bytes) -> QueryRun:
    found = json.loads(raw)
    return QueryRun(found["id"], found["base"], found["epoch"], tuple(found["past"]))


def _is_name(value: object, max_bytes: int) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return 1 <= len(value.encode()) <= max_bytes
    except UnicodeEncodeError:
        return False
