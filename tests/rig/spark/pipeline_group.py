"""Pipelines side by side in one driver that may be killed, and all of them with it.

    python -m tests.rig.spark.pipeline_group

As `sparkpipes`, but each line on its stdin is run by a thread of its own: one pipeline can
stand still at a point while the next is begun, and a single kill meets all of them there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import polybus.spark
from tests.rig.spark.pipeline_driver import RETRIES, SETTINGS, run
from tests.rig.spark.query_driver import MARK, STOP_S, Driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 8  # a task that stands still keeps its place
UTC = {"spark.sql.session.timeZone": "UTC"}


def main() -> None:
    session = polybus.spark.session(
        f"local[{CORES},{RETRIES}]", name="pipelines", settings={**SETTINGS, **UTC}
    )
    lock = Lock()
    for line in sys.stdin:
        Thread(target=_answer, args=(session, json.loads(line), lock), daemon=True).start()


def _answer(session: SparkSession, order: dict[str, Any], lock: Lock) -> None:
    try:
        told = run(session, order)
    except Exception as error:  # nobody else would hear of it
        told = {"error": f"{type(error).__name__}: {error}"}
    with lock:
        print(MARK + json.dumps({"pipeline": order["pipeline"], **told}), flush=True)  # noqa: T201


# --- in the test


class Crowd(Driver):
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, pipeline: str, *given: Any, **named: Any) -> None:
        assert self._process.stdin is not None
        order = {"pipeline": pipeline, "given": given, "named": named}
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def finish(self, count: int = 1) -> None:
        """Until so many of those that were started have ended, without an error."""
        for _ in range(count):
            told = self.ended()
            assert told is not None, "the driver has died"
            assert told.get("error") is None, told

    def kill(self) -> None:
        """-9, for the driver, its Java and all workers, at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)


if __name__ == "__main__":
    main()
