"""Drivers and tasks die while they archive and trim, and each message is there once.

A topic is archived, in several batches a run, and trimmed; messages keep coming. The driver is
killed at some point of `archive`, then at one of `retain`, tasks die and fail beside it; after
each death, before anything is started again, archive and log together have every message once.
In the end the archive has the rows of one that nobody has disturbed.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import read_manifest
from polybus.spark.source.log_access import open_log_access
from tests.rig.native_bus import NativeBus
from tests.rig.points import SPARK
from tests.rig.spark.kill_points import Orders
from tests.rig.spark.pipeline_driver import Pipes

TOPIC = "orders"
ROWS = 120
ROWS_PER_BATCH = 40
DRIVER_POINTS = ("mid-file", "written", "archiving", "archived", "compacted")
TASK_POINTS = ("mid-file", "written")
TRIM_POINTS = ("trimming", "trimmed")
SOAK_ROUNDS = 10
PATIENCE_S = 120.0


class Story:
    """A bus, an archive, and what becomes of them."""

    def __init__(self, bus: NativeBus, folder: Path, sabotaged: bool) -> None:
        self.bus, self.client = bus, bus.client()
        self.archive = folder / "archive"
        self.orders = Orders(folder / "orders")
        self.sabotaged = sabotaged
        self.sent = 0
        self.client.create_topic(TOPIC, shards=3)

    def produce(self) -> None:
        """In several goes, so that times differ."""
        numbers = range(self.sent, self.sent + ROWS)
        with self.client.producer() as producer:
            for number in numbers:
                producer.produce(TOPIC, [b"%d" % number], [f"k{number % 11}"])
            producer.flush(PATIENCE_S)
        self.sent = numbers.stop

    def driver(self) -> Pipes:
        return Pipes(self.orders.environment | SPARK.environment)

    def archived(self, driver: Pipes, folder: Path | None = None) -> dict[str, object] | None:
        return driver.do(
            "archive",
            TOPIC,
            str(folder or self.archive),
            bus=self.bus.url,
            once=True,
            rows_per_batch=ROWS_PER_BATCH,
        )

    def trimmed(self, driver: Pipes) -> dict[str, object] | None:
        return driver.do("retain", str(self.archive), bus=self.bus.url, once=True)

    def check(self) -> None:
        """What archive and log have now, together."""
        found = Counter(int(body) for body in self.bodies())
        twice = [n for n, count in found.items() if count > 1]
        lost = set(range(self.sent)) - set(found)
        assert (twice, lost) == ([], set()), f"{len(twice)} twice, {len(lost)} lost"
        rows = len(self.rows_in_files(self.archive))
        assert rows == read_manifest(self.folder, TOPIC).rows, "files that do not count"

    @property
    def folder(self) -> ArchiveFolder:
        return ArchiveFolder(self.archive)

    def bodies(self) -> list[bytes]:
        access = open_log_access(self.bus.url, str(self.archive))
        return [
            body
            for shard, there in access.shards(TOPIC).items()
            for batch in access.read(TOPIC, shard, *there)
            for body in batch.column("body").to_pylist()
        ]

    def rows_in_files(self, folder: Path) -> list[tuple[object, ...]]:
        """Of all files that count, by place."""
        files = [folder / one.path for one in read_manifest(ArchiveFolder(folder), TOPIC).files]
        rows = [tuple(row.values()) for one in files for row in pq.read_table(one).to_pylist()]
        return sorted(rows, key=lambda row: row[:2])


def kill_the_driver(story: Story, driver: Pipes, point: str, passings: int) -> None:
    story.orders.forget()
    story.orders.give(point, "kill driver", passings)
    told, code = story.archived(driver), driver.close()
    assert (told, code) == (None, -9), f"{point}: the driver was not killed: {told}"
    assert story.orders.done(point, "kill"), f"it died elsewhere than {point}"
    story.check()


def break_tasks(story: Story, driver: Pipes, chance: random.Random) -> None:
    """Spark tries them again."""
    story.orders.forget()
    dies, fails = chance.sample(TASK_POINTS, 2)
    story.orders.give(dies, "kill self", chance.randint(1, 2))
    story.orders.give(fails, "fail", chance.randint(1, 2))
    told = story.archived(driver)
    assert told is not None, "the driver has died"
    assert told.get("error") is None
    assert story.orders.done(dies, "kill"), f"nobody was killed at {dies}"
    assert story.orders.done(fails, "fail"), f"nobody failed at {fails}"
    story.check()


def finish(story: Story, driver: Pipes, calm: Path) -> None:
    """Another archive, which nobody disturbs, must have the same."""
    story.orders.forget()
    assert story.archived(driver) is not None
    assert story.archived(driver, calm) is not None
    story.check()


def tell(folder: Path, seed: int, sabotaged: bool = False) -> None:
    with NativeBus() as bus:
        story = Story(bus, folder, sabotaged)
        story.produce()
        # All start at once: a session takes seconds to begin, and most of them waiting.
        with story.driver() as first, story.driver() as second, story.driver() as third:
            go_through(story, (first, second, third), random.Random(seed), folder / "calm")
        check_trimmed(story)


def go_through(
    story: Story, drivers: tuple[Pipes, Pipes, Pipes], chance: random.Random, calm: Path
) -> None:
    first, second, third = drivers
    point = "archived" if story.sabotaged else chance.choice(DRIVER_POINTS)
    kill_the_driver(story, first, point, _passings(point, chance))
    if story.sabotaged:
        finish(story, second, calm)
    story.produce()
    break_tasks(story, second, chance)
    finish(story, second, calm)
    same = story.rows_in_files(story.archive) == story.rows_in_files(calm)
    assert same, "it is not the archive of an undisturbed run"
    story.produce()
    story.orders.give(chance.choice(TRIM_POINTS), "kill driver")
    story.archived(second)
    assert story.trimmed(second) is None, "the driver was not killed"
    story.check()
    story.orders.forget()
    story.trimmed(third)


def _passings(point: str, chance: random.Random) -> int:
    """Compaction comes once a run; all else with each batch, and each file."""
    return 1 if point == "compacted" else chance.randint(1, 3)


def check_trimmed(story: Story) -> None:
    story.check()
    spans = read_manifest(story.folder, TOPIC).shards
    shards = open_log_access(story.bus.url).shards(TOPIC)
    assert {n: one.start for n, one in shards.items()} == {n: one.end for n, one in spans.items()}


@pytest.mark.sabotage("archive-positions-off", expects="archive of an undisturbed run")
@pytest.mark.timeout(900)
def test_archive_and_log_have_each_message_once_whatever_dies(tmp_path, sabotaged):
    tell(tmp_path, random.randrange(1 << 30), sabotaged)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(SOAK_ROUNDS))
def test_the_same_with_each_point_in_turn(tmp_path, number):
    tell(tmp_path, number)
