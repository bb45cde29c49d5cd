"""What one process did, in a file that outlives it.

    diary = Diary(path)
    number = diary.begin("produce", body="w1 7 plain")     # on record before it is done
    diary.end(number, "ok", first_id=12)                   # and after
    operations("c1", path)                                 # of which some never ended

A line is written by one call and is the kernel's at once, so a kill -9 takes nothing that
was said before it. What began and has no end is *unknown*: it may have happened. Times are
of the one monotonic clock that all processes of a machine share, so they can be compared.
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
NEVER_NS: Final = 2**63 - 1  # later than all that happens


class Diary:
    """One writer a process, used by any of its threads."""

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
        """Something that has no end."""
        self.begin(kind, **fields)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, what: dict[str, Any]) -> None:
        line = json.dumps({"at_ns": time.monotonic_ns(), **what}) + "\n"
        os.write(self._fd, line.encode())


@dataclass
class Operation:
    """What was begun, and what is known of its end."""

    process: str
    kind: str
    began_ns: int
    fields: dict[str, Any]
    outcome: str = UNKNOWN
    ended_ns: int = NEVER_NS
    answer: dict[str, Any] = field(default_factory=dict)


def operations(process: str, path: str | Path) -> list[Operation]:
    """In the order in which they began."""
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
    """A line that a kill cut short was never said."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
