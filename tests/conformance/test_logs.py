"""The memory log and the file log, with both durabilities, pass the suite of logs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from polybus.store.engine import Durability
from polybus.store.log.file_log import FileLog
from polybus.store.log.in_memory_log import InMemoryLog
from polybus.store.log.write_ahead_log import WriteAheadLog
from polybus.testing.conformance import name_of
from polybus.testing.conformance.log_kit import LogCheck, LogSubject, log_checks

SEGMENT_BYTES = 64 << 10

MEMORY = LogSubject(lambda: InMemoryLog(32 << 20))


def files(folder: Path, durability: Durability) -> LogSubject:
    """Return a subject whose logs have folders below this one."""
    folders: dict[int, Path] = {}
    numbers = itertools.count()

    def open_at(path: Path) -> WriteAheadLog:
        log = FileLog(
            path,
            durability=durability,
            commit_interval_ms=1,
            segment_bytes=SEGMENT_BYTES,
            segment_count=4,
        )
        folders[id(log)] = path
        return log

    def reopen(log: WriteAheadLog) -> WriteAheadLog:
        log.close()
        return open_at(folders[id(log)])

    return LogSubject(lambda: open_at(folder / str(next(numbers))), reopen)


CHECKS = log_checks(files(Path(), "fsync"))


@pytest.mark.parametrize("check", log_checks(MEMORY), ids=name_of)
def test_memory_log(check: LogCheck) -> None:
    check(MEMORY)


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_file_log(check: LogCheck, tmp_path: Path) -> None:
    check(files(tmp_path, "fsync"))


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_file_log_that_syncs_at_intervals(check: LogCheck, tmp_path: Path) -> None:
    check(files(tmp_path, "interval"))
