"""What the disk takes for one small commit: an append and fdatasync, again and again."""

import os
import time
from pathlib import Path

from bench.fdq.cases import DISK
from bench.harness.results import P50, P99, Values

COMMIT_BYTES = 4096
SECONDS = 1.0
PAUSE_S = 0.001  # as often as messages come


class Disk:
    name = DISK
    pid = None

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fdatasync"

    def calibrate(self, wanted_s: float) -> None:
        """Its time is fixed: a 99th percentile needs many."""

    def measure(self) -> Values:
        file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            took_ns = sorted(_times(file))
        finally:
            os.close(file)
            self._path.unlink()
        half, most = took_ns[len(took_ns) // 2], took_ns[int(len(took_ns) * 0.99)]
        return {P50.key: half / 1000, P99.key: most / 1000}


def _times(file: int) -> list[int]:
    data, took = os.urandom(COMMIT_BYTES), []
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        started_ns = time.perf_counter_ns()
        os.write(file, data)
        os.fdatasync(file)
        took.append(time.perf_counter_ns() - started_ns)
        time.sleep(PAUSE_S)
    return took
