"""Pipelines in parallel in one driver, so that one kill meets all of them.

    python -m tests.rig.spark.pipeline_group

Like `pipeline_driver`, but each line on stdin runs in its own thread: one pipeline can wait at a
point while the next one starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import polybus.spark
from tests.rig.spark.pipeline_driver import RETRIES, SETTINGS, PipelineDriver, run
from tests.rig.spark.query_driver import MARK, STOP_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 8  # a waiting task occupies a core
UTC = {"spark.sql.session.timeZone": "UTC"}


def main() -> None:
    session = polybus.spark.session(
        f"local[{CORES},{RETRIES}]", name="pipelines", settings={**SETTINGS, **UTC}
    )
    lock = Lock()
    for line in sys.stdin:
        Thread(target=_run_line, args=(session, json.loads(line), lock), daemon=True).start()


def _run_line(session: SparkSession, order: dict[str, Any], lock: Lock) -> None:
    try:
        result = run(session, order)
    except Exception as error:  # a thread's error would be lost
        result = {"error": f"{type(error).__name__}: {error}"}
    with lock:
        print(MARK + json.dumps({"pipeline": order["pipeline"], **result}), flush=True)  # noqa: T201


# --- in the test


class PipelineGroup(PipelineDriver):
    """A driver that runs several pipelines at the same time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment, __name__)

    def finish(self, count: int = 1) -> None:
        """Wait until `count` pipelines have ended, without an error."""
        for _ in range(count):
            result = self.ended()
            assert result is not None, "the driver has died"
            assert result.get("error") is None, result

    def kill(self) -> None:
        """Send SIGKILL to the driver, its Java and all workers at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)


if __name__ == "__main__":
    main()
