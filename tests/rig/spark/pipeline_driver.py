"""Pipelines in a driver process that tests kill, started by lines on stdin.

    python -m tests.rig.spark.pipeline_driver

Each line on stdin is JSON: a pipeline and its arguments. The driver prints the result as one line
of JSON: rows and facts, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polybus.spark
from polybus.errors import PolybusError
from polybus.spark.pipelines import PIPELINES
from tests.rig.spark import kill_points, query_driver
from tests.rig.spark.query_driver import MARK, DriverProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETRIES = 4  # how often Spark tries a task
SETTINGS = {
    **query_driver.SETTINGS,
    # Queries run once or twice, so code generation does not pay.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


def main() -> None:
    session = polybus.spark.session(f"local[2,{RETRIES}]", name="pipelines", settings=SETTINGS)
    java = session.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    for line in sys.stdin:
        # At each run, because several drivers may be running.
        kill_points.set_driver_processes(java, os.getpid())
        print(MARK + json.dumps(run(session, json.loads(line))), flush=True)  # noqa: T201


def run(session: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    try:
        summary = PIPELINES[order["pipeline"]](session, *order["given"], **order["named"])
    except PolybusError as error:
        return {"error": str(error), "code": error.code}
    return {"rows": summary.rows, "facts": {k: str(v) for k, v in summary.facts.items()}}


# --- in the test


class PipelineDriver(DriverProcess):
    """A driver that runs one pipeline at a time."""

    def __init__(self, environment: Mapping[str, str], module: str = __name__) -> None:
        super().__init__(environment, module)

    def start(self, pipeline: str, *given: Any, **named: Any) -> None:
        self.send(json.dumps({"pipeline": pipeline, "given": given, "named": named}))

    def run_pipeline(self, pipeline: str, *given: Any, **named: Any) -> dict[str, Any] | None:
        """Run a pipeline. Returns its result, None if the driver died."""
        self.start(pipeline, *given, **named)
        return self.ended()


if __name__ == "__main__":
    main()
