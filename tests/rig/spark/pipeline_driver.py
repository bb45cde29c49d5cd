"""Pipelines in a driver of their own that may be killed, told what to run line by line.

    python -m tests.rig.spark.pipeline_driver

Each line on its stdin is JSON, a pipeline and its arguments; it prints what came of it, as one
line of JSON: rows and facts, or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polybus.spark
from polybus.errors import PolybusError
from polybus.spark.pipelines import PIPELINES
from tests.rig.spark import kill_points, query_driver
from tests.rig.spark.query_driver import MARK, Driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETRIES = 4  # how often Spark tries a task
SETTINGS = {
    **query_driver.SETTINGS,
    # What runs once or twice is not worth compiling.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


def main() -> None:
    session = polybus.spark.session(f"local[2,{RETRIES}]", name="pipelines", settings=SETTINGS)
    java = session.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    for line in sys.stdin:
        kill_points.driver_is(java, os.getpid())  # one of several may be at work
        print(MARK + json.dumps(run(session, json.loads(line))), flush=True)  # noqa: T201


def run(session: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    try:
        summary = PIPELINES[order["pipeline"]](session, *order["given"], **order["named"])
    except PolybusError as error:
        return {"error": str(error), "code": error.code}
    return {"rows": summary.rows, "facts": {k: str(v) for k, v in summary.facts.items()}}


# --- in the test


class Pipes(Driver):
    """The program, running; it ends with all that it has started."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def do(self, pipeline: str, *given: Any, **named: Any) -> dict[str, Any] | None:
        """What came of it; None if the driver has died."""
        assert self._process.stdin is not None
        order = {"pipeline": pipeline, "given": given, "named": named}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self.ended()


if __name__ == "__main__":
    main()
