"""A consumer without a lease starts no run, because its shards may belong to others.

A consumer that is fenced while it reports a suspect run closes the shard. Otherwise later
messages of the key would overtake that run.
"""

from __future__ import annotations

import math
from threading import Event
from types import SimpleNamespace

import pyarrow as pa
import pytest

from polybus.dialects.fdq.client.assigned_shards import AssignedShard
from polybus.dialects.fdq.client.consumer import ConsumeOptions
from polybus.dialects.fdq.client.executor import Executor, PoisonGuard, WakeSignal
from polybus.dialects.fdq.client.handler_run import FetchedRows, QueuedMessages
from polybus.errors import Fenced
from polybus.model.arrow import READ_SCHEMA
from tests.rig.observer import until


@pytest.fixture
def member():
    return SimpleNamespace(lease_until_s=0.0, handled=[])


def refuse(run):
    raise Fenced("a newer consumer has joined")


@pytest.fixture
def executor(member):
    """An executor with three messages of one key, of which the first is suspect."""
    made = Executor(
        0,
        ConsumeOptions("orders", "c1", lambda envelope: member.handled.append(envelope.offset)),
        member,
        wake_signal=WakeSignal(),
        guard=PoisonGuard(refuse, Event()),
        on_free=lambda rows: None,
    )
    at, none = [0, 1, 2], [None] * 3
    columns = [at, [0] * 3, at, at, at, ["key"] * 3, [b"body"] * 3, none]
    arrays = [pa.array(one, field.type) for one, field in zip(columns, READ_SCHEMA, strict=True)]
    rows = FetchedRows(pa.record_batch(arrays, schema=READ_SCHEMA))
    shard = AssignedShard({"shard": 0, "epoch": 1, "low": 0, "suspect_to": 1})
    made.push([QueuedMessages(shard, rows, range(3))])
    return made


def test_no_run_begins_without_a_lease(executor, member):
    assert executor._begin() is None
    member.lease_until_s = math.inf
    run = executor._begin()
    assert run is not None
    assert run.offset == 0


def test_no_run_begins_while_stopping(executor, member):
    member.lease_until_s = math.inf
    executor.stop()
    assert executor._begin() is None


def test_later_run_of_a_key_does_not_overtake_a_refused_one(executor, member):
    member.lease_until_s = math.inf
    executor.start()
    until(
        lambda: executor.queue.freed_rows or executor._wake_signal._event.is_set(), "it has tried"
    )
    executor.stop()
    assert member.handled == []
