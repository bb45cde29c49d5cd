"""Kill drivers and tasks at every step of the sink: each row is published exactly once.

A query copies a topic to two others. Its driver is killed once at each point and started again with
the same checkpoint and other partition sizes, so that the replayed epoch is planned differently.
Then tasks are killed and fail, one task ends early because another fails, and a stage is lost
before the publish. At the end the outputs must have each row of the input exactly once.

Each kill leaves a file that names its point. Spark's logs and the topics must match that point.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from polybus.errors import DoesNotExist
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until
from tests.rig.points import SPARK
from tests.rig.spark.kill_points import FaultOrders
from tests.rig.spark.query_driver import OUTPUTS, SOURCE, Copy, Driver

# Point of the kill → at which passing: in the second epoch of the driver or later, because its
# first epoch is the one that the previous driver has left.
KILLS = {
    "begun": 3,
    "mid-stage": 25,
    "staged": 4,
    "publishing": 2,
    "published": 2,
    "planned": 3,
}
ROWS_PER_EPOCH = 40
SOAK_ROUNDS = 3
PATIENCE_S = 1200.0  # includes the start of a driver on a busy machine


class SinkScenario:
    """A bus, a query and its drivers. The next driver starts while one is running."""

    def __init__(self, bus: NativeBus, folder: Path, *, drivers: int) -> None:
        self.bus = bus
        self.client = bus.client()
        self.orders = FaultOrders(folder / "orders")
        self.checkpoint = folder / "checkpoint"
        self.sent = 0
        # Not sorted: the first partitions of 7 and of 13 rows can be the same.
        self.partition_sizes = cycle((20, 7, 13))
        self.client.create_topic(SOURCE, shards=4)
        self._starting = (self._start() for _ in range(drivers))
        self._next = next(self._starting)

    def produce(self, epochs: int) -> None:
        numbers = range(self.sent, self.sent + epochs * ROWS_PER_EPOCH)
        with self.client.producer() as producer:
            keys: list[str | None] = [f"k{n % 11}" for n in numbers]
            producer.produce(SOURCE, [b"%d" % n for n in numbers], keys).result(PATIENCE_S)
        self.sent = numbers.stop

    def driver(self) -> Driver:
        driver, self._next = self._next, next(self._starting, self._next)
        return driver

    def close(self) -> None:
        """Stop the driver that was started in advance."""
        self._next.close()

    def _start(self) -> Driver:
        copy = Copy(
            self.bus.url,
            str(self.checkpoint),
            rows_per_batch=ROWS_PER_EPOCH,
            rows_per_partition=next(self.partition_sizes),
        )
        return Driver(copy, self.orders.environment | SPARK.environment)

    def count_rows(self) -> Counter[int]:
        """Count the rows of the outputs by number."""
        counts: Counter[int] = Counter()
        for remainder, topic in enumerate(OUTPUTS):
            for body in self._bodies(topic):
                assert int(body) % 2 == remainder, f"{body!r} is in {topic}"
                counts[int(body)] += 1
        return counts

    def _bodies(self, topic: str) -> list[bytes]:
        try:
            return [
                b for batch in self.client.read(topic) for b in batch.column("body").to_pylist()
            ]
        except DoesNotExist:
            return []

    def epochs(self, log: str) -> int:
        """Return the number of epochs in Spark's log of this name."""
        return sum(path.name.isdigit() for path in (self.checkpoint / log).glob("*"))

    def rows_up_to(self, epoch: int) -> int:
        """Return the number of rows that the epochs before this one have read."""
        if epoch == 0:
            return 0
        *_, offsets = (self.checkpoint / "offsets" / str(epoch - 1)).read_text().splitlines()
        return sum(json.loads(offsets)[SOURCE].values())


# --- the driver


def kill_the_driver(scenario: SinkScenario, point: str, passings: int) -> None:
    scenario.orders.clear()
    scenario.orders.give(point, "kill driver", passings)
    with scenario.driver() as driver:
        result = driver.run()
        code = driver.close()
    assert (result, code) == (None, -9), f"{point}: the driver was not killed"
    assert scenario.orders.done(point, "kill"), f"it died elsewhere than {point}"


def check_that_it_died_there(scenario: SinkScenario, point: str) -> None:
    planned, committed = scenario.epochs("offsets"), scenario.epochs("commits")
    assert planned == committed + 1, f"{point}: {planned} epochs planned, {committed} committed"
    visible = planned if point == "published" else committed
    rows = scenario.count_rows()
    assert max(rows.values(), default=1) == 1
    assert rows.total() == scenario.rows_up_to(visible), f"{point}: other rows are visible"


# --- tasks


def break_tasks(scenario: SinkScenario) -> None:
    """Run all task faults in one driver, because its start takes longer than they do."""
    with scenario.driver() as driver:
        end_a_task_early(scenario, driver)
        lose_a_stage(scenario, driver)
        kill_tasks(scenario, driver)


def end_a_task_early(scenario: SinkScenario, driver: Driver) -> None:
    """Hold one task in the middle of its rows until another one has failed.

    Spark has cancelled the job by then, and the held task may see fewer rows.
    """
    scenario.orders.clear()
    scenario.orders.give("mid-stage", "wait")
    scenario.orders.give("begun", "fail always", 2)
    driver.send()
    _wait_for(scenario, "mid-stage", "wait")
    _wait_for(scenario, "begun", "fail")
    scenario.orders.go("mid-stage")
    result = driver.ended()
    assert result is not None, "the driver has died"
    assert "as ordered" in str(result["error"])


def lose_a_stage(scenario: SinkScenario, driver: Driver) -> None:
    """Discard a stage after its task has ended: nothing of the epoch must be published."""
    scenario.orders.clear()
    before = scenario.count_rows()
    scenario.orders.give("staged", "wait")
    driver.send()
    stage = _wait_for(scenario, "staged", "wait")["detail"]
    scenario.client.act("stage.discard", stage=stage)
    scenario.orders.go("staged")
    result = driver.ended()
    assert result is not None, "the driver has died"
    assert "nothing was published" in str(result["error"])
    assert scenario.count_rows() == before


def kill_tasks(scenario: SinkScenario, driver: Driver) -> None:
    """Kill and fail tasks, which Spark retries."""
    scenario.orders.clear()
    scenario.orders.give("begun", "kill self", 2)
    scenario.orders.give("begun", "fail", 6)
    scenario.orders.give("mid-stage", "kill self", 30)
    scenario.orders.give("staged", "kill self", 3)
    result = driver.run()
    assert result is not None, "the driver has died"
    for point, what in (("begun", "kill"), ("begun", "fail"), ("mid-stage", "kill")):
        assert scenario.orders.done(point, what), f"no task reached {point} to {what}"
    assert scenario.orders.done("staged", "kill")
    assert result["error"] is None


def _wait_for(scenario: SinkScenario, point: str, what: str) -> dict[str, Any]:
    until(lambda: scenario.orders.done(point, what), f"{what} at {point}", PATIENCE_S)
    record = scenario.orders.done(point, what)
    assert record is not None
    return record


# --- the whole scenario


def run_scenario(folder: Path, rounds: int) -> None:
    drivers = rounds * (len(KILLS) + 1)
    with NativeBus() as bus, closing(SinkScenario(bus, folder, drivers=drivers)) as scenario:
        for _ in range(rounds):
            for point, passings in KILLS.items():
                scenario.produce(3)
                kill_the_driver(scenario, point, passings)
                check_that_it_died_there(scenario, point)
            scenario.produce(3)
            break_tasks(scenario)
        check(scenario)


def run_two_kills(folder: Path) -> None:
    """Run the two kills that decide whether a replayed epoch is recognized."""
    with NativeBus() as bus, closing(SinkScenario(bus, folder, drivers=3)) as scenario:
        for point in ("staged", "published"):
            scenario.produce(3)
            kill_the_driver(scenario, point, KILLS[point])
        scenario.orders.clear()
        with scenario.driver() as driver:
            driver.run()
        check(scenario)


def check(scenario: SinkScenario) -> None:
    counts = scenario.count_rows()
    twice = {n: count for n, count in counts.items() if count > 1}
    lost = set(range(scenario.sent)) - set(counts)
    assert (twice, lost) == ({}, set()), f"{len(twice)} twice, {len(lost)} lost"
    assert counts.total() == scenario.sent


@pytest.mark.sabotage("stamps-off", "tasks-publish", expects=r"[1-9]\d* twice")
@pytest.mark.timeout(1800)
def test_each_row_is_published_once_despite_kills(tmp_path, sabotaged):
    if sabotaged:
        run_two_kills(tmp_path)
    else:
        run_scenario(tmp_path, 1)


@pytest.mark.soak
@pytest.mark.timeout(6000)
def test_each_row_is_published_once_soak(tmp_path):
    run_scenario(tmp_path, SOAK_ROUNDS)
