"""Kill drivers and tasks of archive and retain: each message is kept exactly once.

A topic is archived in several batches per run and trimmed, while messages are produced. The driver
is killed at a point of `archive`, then at one of `retain`; tasks are killed and fail in between.
After each kill, before a restart, archive and log together must have every message once. At the end
the archive must equal one that was made without faults.
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
from tests.rig.spark.kill_points import FaultOrders
from tests.rig.spark.pipeline_driver import PipelineDriver

TOPIC = "orders"
ROWS = 120
ROWS_PER_BATCH = 40
DRIVER_POINTS = ("mid-file", "written", "archiving", "archived", "compacted")
TASK_POINTS = ("mid-file", "written")
TRIM_POINTS = ("trimming", "trimmed")
SOAK_ROUNDS = 10
PATIENCE_S = 120.0


class ArchiveScenario:
    """A bus, an archive and their drivers."""

    def __init__(self, bus: NativeBus, folder: Path, sabotaged: bool) -> None:
        self.bus, self.client = bus, bus.client()
        self.archive = folder / "archive"
        self.orders = FaultOrders(folder / "orders")
        self.sabotaged = sabotaged
        self.sent = 0
        self.client.create_topic(TOPIC, shards=3)

    def produce(self) -> None:
        """Produce one by one, so that timestamps differ."""
        numbers = range(self.sent, self.sent + ROWS)
        with self.client.producer() as producer:
            for number in numbers:
                producer.produce(TOPIC, [b"%d" % number], [f"k{number % 11}"])
            producer.flush(PATIENCE_S)
        self.sent = numbers.stop

    def driver(self) -> PipelineDriver:
        return PipelineDriver(self.orders.environment | SPARK.environment)

    def archived(
        self, driver: PipelineDriver, folder: Path | None = None
    ) -> dict[str, object] | None:
        return driver.run_pipeline(
            "archive",
            TOPIC,
            str(folder or self.archive),
            bus=self.bus.url,
            once=True,
            rows_per_batch=ROWS_PER_BATCH,
        )

    def trimmed(self, driver: PipelineDriver) -> dict[str, object] | None:
        return driver.run_pipeline("retain", str(self.archive), bus=self.bus.url, once=True)

    def check(self) -> None:
        """Check that archive and log together have each message exactly once."""
        counts = Counter(int(body) for body in self.bodies())
        twice = [n for n, count in counts.items() if count > 1]
        lost = set(range(self.sent)) - set(counts)
        assert (twice, lost) == ([], set()), f"{len(twice)} twice, {len(lost)} lost"
        rows = len(self.rows_in_files(self.archive))
        assert rows == read_manifest(self.folder, TOPIC).rows, "a listed file lacks rows"

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
        """Return the rows of all listed files, sorted by shard and offset."""
        files = read_manifest(ArchiveFolder(folder), TOPIC).files
        tables = [pq.read_table(folder / file.path) for file in files]
        rows = [tuple(row.values()) for table in tables for row in table.to_pylist()]
        return sorted(rows, key=lambda row: row[:2])


def kill_the_driver(
    scenario: ArchiveScenario, driver: PipelineDriver, point: str, passings: int
) -> None:
    scenario.orders.clear()
    scenario.orders.give(point, "kill driver", passings)
    result, code = scenario.archived(driver), driver.close()
    assert (result, code) == (None, -9), f"{point}: the driver was not killed: {result}"
    assert scenario.orders.done(point, "kill"), f"it died elsewhere than {point}"
    scenario.check()


def break_tasks(scenario: ArchiveScenario, driver: PipelineDriver, rng: random.Random) -> None:
    """Kill and fail tasks, which Spark retries."""
    scenario.orders.clear()
    dies, fails = rng.sample(TASK_POINTS, 2)
    scenario.orders.give(dies, "kill self", rng.randint(1, 2))
    scenario.orders.give(fails, "fail", rng.randint(1, 2))
    result = scenario.archived(driver)
    assert result is not None, "the driver has died"
    assert result.get("error") is None
    assert scenario.orders.done(dies, "kill"), f"no task was killed at {dies}"
    assert scenario.orders.done(fails, "fail"), f"no task failed at {fails}"
    scenario.check()


def finish(scenario: ArchiveScenario, driver: PipelineDriver, calm: Path) -> None:
    """Finish the archive, and make another one without faults to compare with."""
    scenario.orders.clear()
    assert scenario.archived(driver) is not None
    assert scenario.archived(driver, calm) is not None
    scenario.check()


def run_scenario(folder: Path, seed: int, sabotaged: bool = False) -> None:
    with NativeBus() as bus:
        scenario = ArchiveScenario(bus, folder, sabotaged)
        scenario.produce()
        # All drivers start at once, because the start of a session takes seconds.
        with scenario.driver() as first, scenario.driver() as second, scenario.driver() as third:
            inject_faults(scenario, (first, second, third), random.Random(seed), folder / "calm")
        check_trimmed(scenario)


def inject_faults(
    scenario: ArchiveScenario,
    drivers: tuple[PipelineDriver, PipelineDriver, PipelineDriver],
    rng: random.Random,
    calm: Path,
) -> None:
    first, second, third = drivers
    point = "archived" if scenario.sabotaged else rng.choice(DRIVER_POINTS)
    kill_the_driver(scenario, first, point, _passings(point, rng))
    if scenario.sabotaged:
        finish(scenario, second, calm)
    scenario.produce()
    break_tasks(scenario, second, rng)
    finish(scenario, second, calm)
    same = scenario.rows_in_files(scenario.archive) == scenario.rows_in_files(calm)
    assert same, "it is not the archive of an undisturbed run"
    scenario.produce()
    scenario.orders.give(rng.choice(TRIM_POINTS), "kill driver")
    scenario.archived(second)
    assert scenario.trimmed(second) is None, "the driver was not killed"
    scenario.check()
    scenario.orders.clear()
    scenario.trimmed(third)


def _passings(point: str, rng: random.Random) -> int:
    """Compaction runs once per run, the other points per batch or file."""
    return 1 if point == "compacted" else rng.randint(1, 3)


def check_trimmed(scenario: ArchiveScenario) -> None:
    scenario.check()
    spans = read_manifest(scenario.folder, TOPIC).shards
    shards = open_log_access(scenario.bus.url).shards(TOPIC)
    starts = {n: shard.start for n, shard in shards.items()}
    assert starts == {n: span.end for n, span in spans.items()}


@pytest.mark.sabotage("archive-positions-off", expects="archive of an undisturbed run")
@pytest.mark.timeout(900)
def test_archive_and_log_have_each_message_once_despite_kills(tmp_path, sabotaged):
    run_scenario(tmp_path, random.randrange(1 << 30), sabotaged)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(SOAK_ROUNDS))
def test_archive_and_log_have_each_message_once_soak(tmp_path, number):
    run_scenario(tmp_path, number)
