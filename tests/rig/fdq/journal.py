"""The operations of one process, in a file that survives it.

    journal = Journal(path)
    number = journal.begin("produce", body="w1 7 plain")     # on record before it is done
    journal.end(number, "ok", first_id=12)                   # and after
    operations("c1", path)                                 # of which some never ended

A line is one write to the page cache, so kill -9 loses no earlier line. An operation without an
end is *unknown*: it may have happened. Times are of the monotonic clock that all processes of a
machine share, so they are comparable.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

UNKNOWN: Final = "unknown"
NEVER_NS: Final = 2**63 - 1  # later than every event


class Journal:
    """The journal of one process, for any of its threads."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._numbers = count()

    def begin(self, kind: str, **fields: Any) -> int:
        number = next(self._numbers)
        self._write({"number": number, "kind": kind, "fields": fields})
        return number

    def end(self, number: int, outcome: str, **answer: Any) -> None:
        self._write({"number": number, "outcome": outcome, "answer": answer})

    def note(self, kind: str, **fields: Any) -> None:
        """Record an event without an end."""
        self.begin(kind, **fields)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, what: dict[str, Any]) -> None:
        line = json.dumps({"at_ns": time.monotonic_ns(), **what}) + "\n"
        os.write(self._fd, line.encode())


@dataclass
class Operation:
    """An operation, and its outcome if it has ended."""

    process: str
    kind: str
    began_ns: int
    fields: dict[str, Any]
    outcome: str = UNKNOWN
    ended_ns: int = NEVER_NS
    answer: dict[str, Any] = field(default_factory=dict)


def operations(process: str, path: str | Path) -> list[Operation]:
    """Return the operations in the order of their begins."""
    found: dict[int, Operation] = {}
    for line in _lines(Path(path)):
        if "kind" in line:
            found[line["number"]] = Operation(process, line["kind"], line["at_ns"], line["fields"])
        else:
            one = found[line["number"]]
            one.outcome, one.ended_ns = line["outcome"], line["at_ns"]
            one.answer = line["answer"]
    return list(found.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the complete lines; a kill may have truncated the last one."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
