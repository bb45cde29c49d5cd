"""Looking at all of a store: every page in use, every value, every block.

LMDB's pages have no checksums, and walking damaged ones may kill the process. So the
walk happens in a child, which tells each step on a line of JSON; a child that dies is
a fault, found where it said last that it was. The child reads in short transactions,
so a store can be verified while its owner works.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from polybus.errors import PolybusError
from polybus.store.lmdb import store_folder
from polybus.store.lmdb.store_copy import Progress, no_progress

MAX_LISTED: Final = 1000


@dataclass
class VerifyReport:
    """What was looked at, and what is wrong: one line each, at most `MAX_LISTED` of them."""

    topics: int = 0
    shards: int = 0
    blocks: int = 0
    messages: int = 0
    bytes: int = 0
    fault_count: int = 0
    faults: tuple[str, ...] = field(default_factory=tuple)

    def add(self, fault: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MAX_LISTED:
            self.faults = (*self.faults, fault)


def verify(path: Path, progress: Progress = no_progress) -> VerifyReport:
    """Walks through a store: `DoesNotExist` or `WrongFormat`, or what is damaged in the report."""
    store_folder.current_generation(path)  # it must be there, and of our format
    command = [sys.executable, "-m", __name__, str(path)]
    report, where = VerifyReport(), "the beginning"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            told = json.loads(line)
            if "fault" in told:
                report.add(told["fault"])
            else:
                where = told.pop("where")
                progress(told.pop("done"), told.pop("total"))
                _count(report, told)
        last_words = child.stderr.read().decode(errors="replace").strip()
        code = child.wait()
    if code:
        report.add(_describe_exit(code, where, last_words))
    return report


def _count(report: VerifyReport, told: dict[str, int]) -> None:
    for name, value in told.items():
        setattr(report, name, value)


def _describe_exit(code: int, where: str, last_words: str) -> str:
    how = signal.Signals(-code).name if code < 0 else last_words[-300:]
    return f"pages of the store are damaged: reading them ended with {how}, behind {where}"


class VerifyReporter:
    """The child's side: counts, and tells every few megabytes."""

    STEP_BYTES: Final = 16 << 20

    def __init__(self, total: int) -> None:
        self.report = VerifyReport()
        self._total = total
        self._next = 0
        self._done = 0

    def fault(self, text: str) -> None:
        self._write_line({"fault": text})

    def advance(self, where: str, size: int = 0) -> None:
        """A place that was reached, so many bytes further."""
        self._done += size
        if self._done >= self._next:
            self.report_progress(where)
            self._next = self._done + self.STEP_BYTES

    def report_progress(self, where: str) -> None:
        counted = asdict(self.report)
        del counted["faults"], counted["fault_count"]
        self._write_line({"where": where, "done": self._done, "total": self._total, **counted})

    def _write_line(self, what: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def main(path: Path) -> int:
    from polybus.store.lmdb.verification_walk import StoreVerifier

    try:
        StoreVerifier(path).run()
    except PolybusError as error:
        sys.stderr.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
