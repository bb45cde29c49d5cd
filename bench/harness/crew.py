"""Processes of a load, driven line by line, all at once.

Each reads orders from its standard input, a line each, and answers each with a line when it is
done. The lines of a failure are in build/bench/NAME.log.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.harness.load import LoadFailed
from bench.harness.places import REPOSITORY, output_folder
from bench.harness.quiet import OWN_PIDS

END_TIMEOUT_S = 10.0


class Crew:
    def __init__(self, processes: Sequence["subprocess.Popen[str]"], log: Path) -> None:
        self._processes, self._log = processes, log

    def tell(self, order: str) -> float:
        """Seconds from the first that began to the last that was done."""
        started_s = time.perf_counter()
        self.begin(order)
        self.wait()
        return time.perf_counter() - started_s

    def ask(self, order: str) -> list[str]:
        """What each answered."""
        self.begin(order)
        return self.wait()

    def begin(self, order: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()

    def wait(self) -> list[str]:
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise LoadFailed(f"a process of the load has ended: see {self._log}")
        return line.strip()


@contextmanager
def crew(
    name: str, module: str, *arguments: str, processes: int, numbered: bool = False
) -> Iterator[Crew]:
    """So many of `python -m MODULE ARGUMENTS [NUMBER]`; they end with the block."""
    path = output_folder() / f"{name}.log"
    with path.open("a") as log:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments, *([str(number)] if numbered else [])],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for number in range(processes)
        ]
    pids = {process.pid for process in running}
    OWN_PIDS.update(pids)
    try:
        yield Crew(running, path)
    finally:
        for process in running:
            _end(process)
        OWN_PIDS.difference_update(pids)


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(END_TIMEOUT_S)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
