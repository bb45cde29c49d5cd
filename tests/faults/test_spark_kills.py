"""Drivers and tasks of Spark die at every step of the sink, and each row is there once.

A query copies a topic to two others. Its driver is killed at each point, six times, and is
started again on the same checkpoint, each time with other partitions, so that the epoch that
it replays is planned anew. Then tasks are killed and fail, one ends early beside one that
fails, and a stage is lost before it is published. In the end the outputs hold the rows of
the input: none twice, none missing.

Each kill leaves a file that says at which point, and what stands in Spark's logs and in the
topics then must fit it.
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
from tests.rig.spark.kill_points import Orders
from tests.rig.spark.query_driver import OUTPUTS, SOURCE, Copy, Driver

# Where the driver dies, and at which passing: in the second epoch of its life or later, since
# the first is the one that the driver before it has left.
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
PATIENCE_S = 1200.0  # a driver starts meanwhile, and the machine may stand still


class Story:
    """A bus, a query, and what becomes of them. While a driver runs the next one starts: that
    takes as long as what it is there for."""

    def __init__(self, bus: NativeBus, folder: Path, *, drivers: int) -> None:
        self.bus = bus
        self.client = bus.client()
        self.orders = Orders(folder / "orders")
        self.checkpoint = folder / "checkpoint"
        self.sent = 0
        # Not from small to large: the first parts of 7 and of 13 rows can be the same.
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
        found, self._next = self._next, next(self._starting, self._next)
        return found

    def close(self) -> None:
        """Ends what was started and not needed, since something went wrong."""
        self._next.close()

    def _start(self) -> Driver:
        copy = Copy(
            self.bus.url,
            str(self.checkpoint),
            rows_per_batch=ROWS_PER_EPOCH,
            rows_per_partition=next(self.partition_sizes),
        )
        return Driver(copy, self.orders.environment | SPARK.environment)

    def found(self) -> Counter[int]:
        """Rows of the outputs, each by its number."""
        found: Counter[int] = Counter()
        for remainder, topic in enumerate(OUTPUTS):
            for body in self._bodies(topic):
                assert int(body) % 2 == remainder, f"{body!r} is in {topic}"
                found[int(body)] += 1
        return found

    def _bodies(self, topic: str) -> list[bytes]:
        try:
            return [
                b for batch in self.client.read(topic) for b in batch.column("body").to_pylist()
            ]
        except DoesNotExist:
            return []

    def epochs(self, log: str) -> int:
        """How many are in Spark's log of this name."""
        return sum(path.name.isdigit() for path in (self.checkpoint / log).glob("*"))

    def rows_up_to(self, epoch: int) -> int:
        """How many rows the epochs before this one have read."""
        if epoch == 0:
            return 0
        *_, offsets = (self.checkpoint / "offsets" / str(epoch - 1)).read_text().splitlines()
        return sum(json.loads(offsets)[SOURCE].values())


# --- the driver


def kill_the_driver(story: Story, point: str, passings: int) -> None:
    story.orders.forget()
    story.orders.give(point, "kill driver", passings)
    with story.driver() as driver:
        told = driver.run()
        code = driver.close()
    assert (told, code) == (None, -9), f"{point}: the driver was not killed"
    assert story.orders.done(point, "kill"), f"it died elsewhere than {point}"


def check_that_it_died_there(story: Story, point: str) -> None:
    planned, committed = story.epochs("offsets"), story.epochs("commits")
    assert planned == committed + 1, f"{point}: {planned} epochs planned, {committed} committed"
    visible = planned if point == "published" else committed
    rows = story.found()
    assert max(rows.values(), default=1) == 1
    assert rows.total() == story.rows_up_to(visible), f"{point}: other rows are visible"


# --- tasks


def break_tasks(story: Story) -> None:
    """All in one driver: to start one takes longer than all else here."""
    with story.driver() as driver:
        end_a_task_early(story, driver)
        lose_a_stage(story, driver)
        kill_tasks(story, driver)


def end_a_task_early(story: Story, driver: Driver) -> None:
    """One task stands in the middle of its rows while another fails for good, and goes on
    when Spark has given the job up: what it then gets to see may end early."""
    story.orders.forget()
    story.orders.give("mid-stage", "wait")
    story.orders.give("begun", "fail always", 2)
    driver.begin()
    _carried_out(story, "mid-stage", "wait")
    _carried_out(story, "begun", "fail")
    story.orders.go("mid-stage")
    told = driver.ended()
    assert told is not None, "the driver has died"
    assert "as ordered" in str(told["error"])


def lose_a_stage(story: Story, driver: Driver) -> None:
    """A lease runs out between a task's end and the publish: nothing of the epoch is there."""
    story.orders.forget()
    before = story.found()
    story.orders.give("staged", "wait")
    driver.begin()
    stage = _carried_out(story, "staged", "wait")["detail"]
    story.client.act("stage.discard", stage=stage)
    story.orders.go("staged")
    told = driver.ended()
    assert told is not None, "the driver has died"
    assert "nothing of it was published" in str(told["error"])
    assert story.found() == before


def kill_tasks(story: Story, driver: Driver) -> None:
    """Spark tries them again, as often as it was told to."""
    story.orders.forget()
    story.orders.give("begun", "kill self", 2)
    story.orders.give("begun", "fail", 6)
    story.orders.give("mid-stage", "kill self", 30)
    story.orders.give("staged", "kill self", 3)
    told = driver.run()
    assert told is not None, "the driver has died"
    for point, what in (("begun", "kill"), ("begun", "fail"), ("mid-stage", "kill")):
        assert story.orders.done(point, what), f"nobody came by {point} to {what}"
    assert story.orders.done("staged", "kill")
    assert told["error"] is None


def _carried_out(story: Story, point: str, what: str) -> dict[str, Any]:
    until(lambda: story.orders.done(point, what), f"{what} at {point}", PATIENCE_S)
    found = story.orders.done(point, what)
    assert found is not None
    return found


# --- all of it


def tell(folder: Path, rounds: int) -> None:
    drivers = rounds * (len(KILLS) + 1)
    with NativeBus() as bus, closing(Story(bus, folder, drivers=drivers)) as story:
        for _ in range(rounds):
            for point, passings in KILLS.items():
                story.produce(3)
                kill_the_driver(story, point, passings)
                check_that_it_died_there(story, point)
            story.produce(3)
            break_tasks(story)
        check(story)


def tell_in_short(folder: Path) -> None:
    """The two kills that show whether a replay is known for what it is."""
    with NativeBus() as bus, closing(Story(bus, folder, drivers=3)) as story:
        for point in ("staged", "published"):
            story.produce(3)
            kill_the_driver(story, point, KILLS[point])
        story.orders.forget()
        with story.driver() as driver:
            driver.run()
        check(story)


def check(story: Story) -> None:
    found = story.found()
    twice = {n: count for n, count in found.items() if count > 1}
    lost = set(range(story.sent)) - set(found)
    assert (twice, lost) == ({}, set()), f"{len(twice)} twice, {len(lost)} lost"
    assert found.total() == story.sent


@pytest.mark.sabotage("stamps-off", "tasks-publish", expects=r"[1-9]\d* twice")
@pytest.mark.timeout(1800)
def test_each_row_is_there_once_wherever_drivers_and_tasks_die(tmp_path, sabotaged):
    if sabotaged:
        tell_in_short(tmp_path)
    else:
        tell(tmp_path, 1)


@pytest.mark.soak
@pytest.mark.timeout(6000)
def test_the_same_three_times_at_each_point(tmp_path):
    tell(tmp_path, SOAK_ROUNDS)
