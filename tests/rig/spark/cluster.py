"""A Spark cluster on this machine: a standalone master and workers, from the pip package.

with Cluster(workers=2) as cluster:
    polybus.spark.session(cluster.url)

Each is a process with its own folder. Tasks run in the folder of their worker, so a test can tell
where a task ran.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyspark

from polybus.spark.spark_session import class_archive_flags
from tests.rig.observer import until

HOME = Path(pyspark.__file__).parent
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
HOST = "127.0.0.1"
START_S = 120.0
STARTED = re.compile(r"Starting Spark master at (spark://\S+)")
REGISTERED = "Successfully registered with master"
# Java runs for a short time: no optimized compilation.
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.master.rest.enabled=false"


class ClusterProcess:
    """A master or a worker. `output` is everything it has written."""

    def __init__(self, folder: Path, kind: str, *args: str) -> None:
        folder.mkdir(parents=True)
        self._log = folder / "log"
        environment = {
            **os.environ,
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{JAVA} {class_archive_flags()}",
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [str(HOME / "bin" / "spark-class"), kind, "--host", HOST, "--webui-port", "0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *args],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the executors that it has started
        except ProcessLookupError:
            pass
        self._process.wait()


class Cluster:
    """A running cluster, stopped at the end of the `with` block."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.folders = [folder / f"worker-{number}" for number in range(workers)]
        self._parts: list[ClusterProcess] = []
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        master = ClusterProcess(folder / "master", MASTER, "--port", "0")
        self._parts.append(master)
        until(lambda: STARTED.search(master.output), "the master's start", START_S)
        match: Any = STARTED.search(master.output)
        self.url = str(match[1])
        for worker_folder in self.folders:
            limits = ("--cores", "1", "--memory", "600m", "--work-dir", str(worker_folder / "work"))
            self._parts.append(ClusterProcess(worker_folder, WORKER, *limits, self.url))
        for part in self._parts[1:]:
            until(lambda part=part: REGISTERED in part.output, "a worker's start", START_S)  # type: ignore[misc]

    def close(self) -> None:
        for part in reversed(self._parts):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for part in self._parts:
                error.add_note(part.output[-2000:])
        self.close()
