"""Delayed messages under kills of the bus: each is appended exactly once, and not before its time.

The bus is killed while delays come due. Producers send again what was not answered.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest

from polybus import fdq
from polybus.native import ClientOptions
from tests.rig.native_bus import QUICK, NativeBus
from tests.rig.observer import until
from tests.rig.soak_runs import SoakRun

TOPIC = "reminders"
KILLS, SOAK_KILLS = 5, 200
PER_KILL = 150
MAX_DELAY_S = 0.6
PATIENCE_S = 120


def kill_while_due(bus: NativeBus, kills: int, seed: int) -> int:
    """Returns how many messages were produced."""
    chosen = random.Random(seed)
    due_ns: dict[bytes, int] = {}
    answers: list[Future[Any]] = []
    with (
        fdq.Producer(bus.url, "clock", options=ClientOptions(**QUICK)) as producer,
        bus.client() as client,
    ):

        def appended() -> int:
            return client.topic_stats(TOPIC)["all"]["inserted"]

        def produce(count: int) -> None:
            for _ in range(count):
                delay_s = chosen.uniform(0, MAX_DELAY_S)
                body = b"%d" % len(due_ns)
                due_ns[body] = time.time_ns() + int(delay_s * 1e9)
                key = None if chosen.random() < 0.1 else f"k{chosen.randrange(20)}"
                answers.append(producer.produce_nowait(TOPIC, key, body, delay_s=delay_s))

        produce(PER_KILL)
        for future in answers:
            future.result(PATIENCE_S)
        for _ in range(kills):
            produce(PER_KILL)
            # Some messages become due between here and the kill.
            wanted = appended() + chosen.randrange(1, PER_KILL)

            def are_due(wanted: int = wanted) -> bool:
                return appended() >= wanted

            until(are_due, "messages come due", PATIENCE_S)
            bus.kill()
            bus.start()
        for future in answers:
            future.result(PATIENCE_S)
        until(lambda: not client.topic(TOPIC)["delayed"]["messages"], "all are due", PATIENCE_S)
        rows = [row for batch in client.read(TOPIC, start=1) for row in batch.to_pylist()]
    found = Counter(row["body"] for row in rows)
    duplicated = sum(count - 1 for count in found.values())
    lost = len(due_ns) - len(found)
    early = sum(row["timestamp_ns"] < due_ns[row["body"]] for row in rows)
    text = f"seed {seed}: {lost} lost, {duplicated} duplicated, {early} early of {len(due_ns)}"
    assert (lost, duplicated, early) == (0, 0, 0), text
    return len(due_ns)


@pytest.mark.sabotage("delay-removed-apart", expects=r"[1-9][0-9]* duplicated")
def test_kills_while_delays_come_due():
    with NativeBus() as bus:
        kill_while_due(bus, KILLS, random.randrange(1 << 32))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_many_kills_while_delays_come_due():
    seed = random.randrange(1 << 32)
    run = SoakRun("faults/test_delay_kills.py", seed)
    with NativeBus() as bus:
        messages = kill_while_due(bus, SOAK_KILLS, seed)
    run.record(kills=SOAK_KILLS, messages=messages, lost=0, duplicated=0, early=0)
