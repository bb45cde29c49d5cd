"""Make the class archive that Spark sessions start from (`CLASS_ARCHIVE`).

    python -m tests.rig.spark.class_archive

Java archives the classes that were loaded, so the session runs one query of each kind: a table that
is read and grouped, Parquet, a stream from topic to topic.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import SparkContext

import polybus.spark
from polybus.spark.spark_session import CLASS_ARCHIVE, DRIVERS_JAVA, SILENTLY
from tests.rig.native_bus import NativeBus
from tests.rig.spark.query_driver import SETTINGS, SOURCE, Copy, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END_S = 120.0


def main() -> None:
    CLASS_ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    CLASS_ARCHIVE.unlink(missing_ok=True)  # Java cannot use and write an archive in one process
    with tempfile.TemporaryDirectory(dir=CLASS_ARCHIVE.parent) as folder:
        made = Path(folder) / CLASS_ARCHIVE.name
        # Java writes the archive when it exits.
        flags = f"{SETTINGS[DRIVERS_JAVA]} -XX:ArchiveClassesAtExit={made} {SILENTLY}"
        settings = {**SETTINGS, DRIVERS_JAVA: flags}
        session = polybus.spark.session("local[2]", name="classes", settings=settings)
        with NativeBus() as bus:
            run_queries(session, bus, Path(folder))
        session.stop()
        _end_java()
        made.replace(CLASS_ARCHIVE)


def run_queries(session: SparkSession, bus: NativeBus, folder: Path) -> None:
    """Run one query of each kind."""
    with bus.client() as client, client.producer() as producer:
        producer.produce(SOURCE, [b"%d" % n for n in range(100)]).result()
    rows = session.read.format("polybus").options(bus=bus.url, topic=SOURCE).load()
    files = str(folder / "rows")
    rows.write.parquet(files)
    session.read.parquet(files).where("id > 1").groupBy("shard").count().collect()
    result = run(session, Copy(bus.url, str(folder / "checkpoint")))
    assert result["error"] is None


def _end_java() -> None:
    """End Java by closing its stdin, so that it writes the archive."""
    java = SparkContext._gateway.proc  # type: ignore[union-attr]
    java.stdin.close()
    java.wait(END_S)


if __name__ == "__main__":
    main()
