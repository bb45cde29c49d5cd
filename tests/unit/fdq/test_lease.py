"""A consumer without a lease starts no run, because its shards may belong to others.

A consumer that is fenced while it reports a suspect run closes the shard. Otherwise later
messages of the key would overtake that run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextvars import copy_context
from threading import Event
from typing import Any, cast

import pyarrow as pa
import pytest

from polybus.dialects.fdq.client.assigned_shards import AssignedShard
from polybus.dialects.fdq.client.consumer import ConsumeOptions
from polybus.dialects.fdq.client.executor import Executor, PoisonGuard, WakeSignal
from polybus.dialects.fdq.client.handler_run import FetchedRows, HandlerRun, QueuedMessages
from polybus.errors import Fenced
from polybus.model.arrow import READ_SCHEMA
from tests.rig.observer import until


class Member:
    """A member with a lease. Its executor has three messages of one key; the first is suspect."""

    def __init__(self) -> None:
        self.lease_until_s = 0.0
        self.handled: list[int] = []
        self.reported: list[int] = []  # suspect runs that were reported to the bus
        self.wake_signal = WakeSignal()
        self.is_fenced = False
        self.executor = Executor(
            0,
            ConsumeOptions("orders", "c1", lambda envelope: self.handled.append(envelope.offset)),
            cast(Any, self),
            wake_signal=self.wake_signal,
            guard=PoisonGuard(self.report_start, Event()),
            on_free=lambda rows: None,
        )
        at, none = [0, 1, 2], [None] * 3
        columns = [at, [0] * 3, at, at, at, ["key"] * 3, [b"body"] * 3, none]
        arrays = [
            pa.array(values, field.type) for values, field in zip(columns, READ_SCHEMA, strict=True)
        ]
        rows = FetchedRows(pa.record_batch(arrays, schema=READ_SCHEMA))
        shard = AssignedShard({"shard": 0, "epoch": 1, "low": 0, "suspect_to": 1})
        self.executor.push([QueuedMessages(shard, rows, range(3))])

    def report_start(self, run: HandlerRun) -> None:
        self.reported.append(run.offset)
        if self.is_fenced:
            raise Fenced("a newer consumer has joined")

    def wait_until_idle(self) -> None:
        """Wait until the executor found no run that may begin."""
        self.wake_signal.wait(10)


@pytest.fixture
def member() -> Iterator[Member]:
    member = Member()
    yield member
    member.executor.stop()


def test_no_run_begins_without_a_lease(member: Member) -> None:
    member.executor.start()
    member.wait_until_idle()
    assert (member.reported, member.handled) == ([], [])
    member.lease_until_s = math.inf
    until(lambda: member.handled == [0, 1, 2], "all runs begin under the new lease")
    assert member.reported == [0]


def test_no_run_begins_while_stopping(member: Member) -> None:
    member.lease_until_s = math.inf
    member.executor.stop()
    copy_context().run(member.executor._main)  # it marks its context as that of a handler
    assert (member.reported, member.handled) == ([], [])


def test_later_run_of_a_key_does_not_overtake_a_refused_one(member: Member) -> None:
    member.lease_until_s, member.is_fenced = math.inf, True
    member.executor.start()
    member.wait_until_idle()
    assert (member.reported, member.handled) == ([0], [])
