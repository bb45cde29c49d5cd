"""Runs: the epochs that one Spark query publishes, from any process.

A stamp has the producer and the epoch of a process that holds the producer open. A Spark
query has no such process: a different process publishes each of its epochs, and only the
id identifies the query. Therefore the bus holds the producer itself, with a record:

    run/PRODUCER → {"id": the query, "base": n, "epoch": n, "past": [earlier queries]}

    no record                           the run begins; its counters continue after `base`
    the same id                         counter + base is the stamp; a repeat publishes nothing
    another id, `on_new` "refuse"       Conflict: a fresh checkpoint is not a replay
    another id, `on_new` "continue"     the run begins, as above, and ends the previous one
    an id that was ended this way       Fenced, for every request

A run begins by opening the producer, so the store fences commits in flight of an older run.
The record is written with the first published epoch. If another run was faster, or a process
died between the two steps, the record's version or `Fenced` reveals it and the step is
repeated. The names of these producers are reserved in `producer.open`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from polybus.errors import (
    Conflict,
    Damaged,
    Fenced,
    MalformedRequest,
    Unavailable,
    UnknownProducer,
)
from polybus.model.commit import Commit, CommitResult, RecordChange
from polybus.model.stamp import MAX_PRODUCER_BYTES, ProducerOptions, Stamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.identity import Identity
    from polybus.native.port.producer_registry import ProducerRegistry

PREFIX = "run/"  # of the producer's name in the store, and of the record's key
RUN_PRODUCER_OPTIONS = ProducerOptions(dense=False)
REFUSE, CONTINUE = "refuse", "continue"
MAX_ID_BYTES = 255
MAX_ENDED_RUNS = 256  # ended runs in the record, about 10 kB
MAX_TRIES = 16  # an attempt fails if another run begins at the same time


@dataclass(frozen=True, slots=True)
class QueryRun:
    """The record of a run."""

    id: str
    base: int
    epoch: int
    past: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCommit:
    """A request to publish one epoch of a run, by its counter."""

    producer: str
    counter: int
    run: str
    on_new: str
    stages: tuple[str, ...]

    @classmethod
    def parse(
        cls, stages: list[str], stamp: Mapping[str, Any] | None, run: Mapping[str, Any]
    ) -> RunCommit:
        """Return the request; raise `MalformedRequest` if the stamp or the run is invalid."""
        if not run.keys() <= {"id", "on_new"} or not _is_name(run.get("id"), MAX_ID_BYTES):
            raise MalformedRequest(f"run must have an id of 1 to {MAX_ID_BYTES} bytes, and on_new")
        on_new = run.get("on_new", REFUSE)
        if on_new not in (REFUSE, CONTINUE):
            raise MalformedRequest(f"run.on_new must be {REFUSE} or {CONTINUE}")
        if stamp is None or set(stamp) != {"producer", "counter"}:
            raise MalformedRequest(
                "the stamp of a run must have producer and counter, and no epoch"
            )
        if not _is_name(stamp["producer"], MAX_PRODUCER_BYTES - len(PREFIX)):
            raise MalformedRequest(
                f"stamp.producer must have 1 to {MAX_PRODUCER_BYTES - len(PREFIX)} bytes"
            )
        counter = Stamp.parse({"epoch": 1, **stamp}).counter
        return cls(stamp["producer"], counter, run["id"], on_new, tuple(stages))

    @property
    def name(self) -> str:
        return PREFIX + self.producer


def publish(
    durable: DurableTopics, owners: ProducerRegistry, caller: Identity, asked: RunCommit
) -> CommitResult:
    """Publish the stages at once, unless this epoch of the run was published before."""
    try:
        owners.check(caller, asked.name)  # cached: does not read the store
    except UnknownProducer:
        owners.claim(caller, asked.name)
    was_fenced = False
    for _ in range(MAX_TRIES):
        version, run, is_new = _resolve_run(durable, asked, was_fenced)
        changes: tuple[RecordChange, ...] = ()
        if is_new:
            record = json.dumps(asdict(run)).encode()
            changes = (RecordChange(asked.name.encode(), record, version),)
        stamp = Stamp(asked.name, run.epoch, run.base + asked.counter)
        try:
            return durable.publish(Commit((), asked.stages, changes, stamp))
        except (Fenced, UnknownProducer):
            was_fenced = True
        except Conflict:  # another run has changed the record
            was_fenced = False
    raise Unavailable(f"producer {asked.producer!r} is in use by another run; retry")


def _resolve_run(
    durable: DurableTopics, asked: RunCommit, was_fenced: bool
) -> tuple[int, QueryRun, bool]:
    """Return the version of the record, the new run, and whether to write it.

    Raises:
        Fenced: another run has ended this one.
        Conflict: the producer belongs to another run, which may not be replaced.
    """
    record = durable.store.get(asked.name.encode())
    version, run = 0, None
    if record is not None:
        version, run = record.version, _decode_run(asked.producer, record.value)
    if run is not None and run.id == asked.run:
        if not was_fenced:
            return version, run, False
        epoch = durable.store.open_producer(asked.name, RUN_PRODUCER_OPTIONS).epoch
        return version, QueryRun(run.id, run.base, epoch, run.past), True
    past: tuple[str, ...] = ()
    if run is not None:
        if asked.run in run.past:
            raise Fenced(
                f"query {asked.run} was replaced by {run.id} as producer {asked.producer!r}: "
                "stop it, or give it another producerId"
            )
        if asked.on_new == REFUSE:
            raise Conflict(
                f"query {asked.run} cannot replace query {run.id} as producer {asked.producer!r}: "
                "its new checkpoint may publish messages twice; set onNewCheckpoint=continue to "
                "allow this"
            )
        past = (run.id, *run.past)[:MAX_ENDED_RUNS]
    opened = durable.store.open_producer(asked.name, RUN_PRODUCER_OPTIONS)
    return version, QueryRun(asked.run, opened.last_counter, opened.epoch, past), True


def _decode_run(producer: str, raw: bytes) -> QueryRun:
    try:
        fields = json.loads(raw)
        run = QueryRun(fields["id"], fields["base"], fields["epoch"], tuple(fields["past"]))
        if not (type(run.base) is type(run.epoch) is int):
            raise ValueError("not a number")
        return run
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"the record of producer {producer!r} is damaged: {error}") from None


def _is_name(value: object, max_bytes: int) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return 1 <= len(value.encode()) <= max_bytes
    except UnicodeEncodeError:
        return False
