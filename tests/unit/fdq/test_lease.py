"""Whoever may have been taken for dead begins nothing: its shards may be others' by now."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pyarrow as pa
import pytest

from polybus.dialects.fdq.executors import Alarm, Executor
from polybus.dialects.fdq.runs import MessagePiece, Rows
from polybus.dialects.fdq.shards import Shard
from polybus.dialects.fdq.terms import Terms
from polybus.model.arrow import READ_SCHEMA


@pytest.fixture
def member():
    return SimpleNamespace(lease_until_s=0.0)


@pytest.fixture
def executor(member):
    made = Executor(
        0,
        Terms("orders", "c1", print),
        member,
        alarm=Alarm(),
        announce=lambda run: None,
        on_free=lambda rows: None,
    )
    row = [[1], [0], [0], [1], [1], ["key"], [b"body"], [None]]
    columns = [pa.array(one, field.type) for one, field in zip(row, READ_SCHEMA, strict=True)]
    rows = Rows(pa.record_batch(columns, schema=READ_SCHEMA))
    shard = Shard({"shard": 0, "epoch": 1, "low": 0})
    made.push([MessagePiece(shard, rows, range(1))])
    return made


def test_nothing_is_begun_without_a_lease(executor, member):
    assert executor._begin() is None
    member.lease_until_s = math.inf
    run = executor._begin()
    assert run is not None
    assert run.offset == 0


def test_nothing_is_begun_while_it_stops(executor, member):
    member.lease_until_s = math.inf
    executor.stop()
    assert executor._begin() is None
