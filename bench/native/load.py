"""Processes that produce and read (work.py), told what to do all at once."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.harness.load import LoadFailed
from bench.harness.places import output_folder
from bench.harness.quiet import OWN_PIDS

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 10.0


class Load:
    """Some of them, on one topic."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def tell(self, order: str) -> float:
        """Seconds from the first that began to the last that was done."""
        started_s = time.perf_counter()
        self.begin(order)
        self.wait()
        return time.perf_counter() - started_s

    def begin(self, order: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()

    def wait(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise LoadFailed(f"a producer has ended: see {_log()}")


def _log() -> Path:
    return output_folder() / "native-load.log"


@contextmanager
def load(url: str, topic: str, processes: int) -> Iterator[Load]:
    command = [sys.executable, "-m", "bench.native.work", url, topic]
    with _log().open("a") as log:
        running = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for _ in range(processes)
        ]
    pids = {process.pid for process in running}
    OWN_PIDS.update(pids)
    try:
        yield Load(running)
    finally:
        for process in running:
            process.kill()
            process.wait(END_TIMEOUT_S)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        OWN_PIDS.difference_update(pids)
