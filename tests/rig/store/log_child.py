"""A workload of a file log and its check, for children of a `ChildServer`.

The payload of a record follows from its number. Lines of a report (or marks of the power-cut
recorder) say what must hold later: `s N`: record N is stored; `t N`: records before N may go.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from polybus.errors import PolybusError, StoreFull
from polybus.store.engine import Durability
from polybus.store.log.file_log import FileLog
from polybus.store.log.write_ahead_log import LogRecord
from tests.rig.power import recorder
from tests.rig.store.child import reporter, reports

SEGMENT_BYTES = 64 << 10
SEGMENT_COUNT = 4
SIZES = (0, 10, 100, 500, 2000, 9000)
KEPT = 20  # records that are not yet trimmed
DEPTHS = (1, 1, 3, 8)  # appends in flight

Say = Callable[[str], None]


def payload_of(number: int) -> bytes:
    size = SIZES[number * 7919 % len(SIZES)]
    return (b"%d " % number * (size // 2))[:size]


def open_log(folder: str, durability: Durability) -> FileLog:
    return FileLog(
        Path(folder),
        durability=durability,
        commit_interval_ms=2,
        segment_bytes=SEGMENT_BYTES,
        segment_count=SEGMENT_COUNT,
    )


def work(log: FileLog, say: Say, count: int, *, is_synced: bool) -> None:
    """Append and trim. With `is_synced`, reports records when a power cut cannot lose them."""
    epoch, number = log.tail.epoch + 1, log.tail.number
    choices, flying = random.Random(number), deque[Future[int]]()
    reported = 0
    for _ in range(count):
        future = log.append(LogRecord(epoch, 7, number + 1, (payload_of(number + 1),)))
        if future.done() and isinstance(future.exception(), StoreFull):
            continue  # trimmed segments are not yet ready
        number += 1
        flying.append(future)
        while len(flying) > choices.choice(DEPTHS):
            flying.popleft().result()
        stored = (log.synced_end if is_synced else log.end) - 1
        if stored > reported:
            reported = stored
            say(f"s {stored}")
        before = log.end - KEPT
        if before > log.start and choices.random() < 0.3:
            say(f"t {before}")
            log.trim(before)


def find_faults(folder: str, durability: Durability, lines: list[str]) -> list[str]:
    """Open the log as its owner, compare it with the lines, and append a record."""
    stored = max([int(line[2:]) for line in lines if line[0] == "s"], default=0)
    trimmed = max([int(line[2:]) for line in lines if line[0] == "t"], default=1)
    try:
        with open_log(folder, durability) as log:
            found = [record for _, record in log.read(log.start)]
            faults = compare(found, stored, trimmed)
            if not faults and log.synced_end != log.end:
                faults.append(f"recovered up to {log.end}, on disk up to {log.synced_end}")
    except PolybusError as error:
        return [f"{type(error).__name__}: {error}"]
    return faults


def compare(found: list[LogRecord], stored: int, trimmed: int) -> list[str]:
    faults = []
    numbers = [record.number for record in found]
    last = numbers[-1] if numbers else 0
    if last < stored:
        faults.append(f"record {stored} was acknowledged, the last one is {last}")
    if numbers and numbers != list(range(numbers[0], last + 1)):
        faults.append(f"numbers are not dense: {numbers}")
    if numbers and numbers[0] > trimmed:
        faults.append(f"records before {trimmed} were trimmed, the first one is {numbers[0]}")
    faults += [
        f"record {record.number} is not as written"
        for record in found
        if record.payload != payload_of(record.number)
    ]
    epochs = [record.epoch for record in found]
    if epochs != sorted(epochs):
        faults.append(f"epochs decrease: {epochs}")
    return faults


def live(folder: str, report: str, durability: Durability, count: int) -> list[str]:
    """Check what former lives have left, and work until killed. Returns faults."""
    faults = find_faults(folder, durability, reports(report))
    if not faults:
        with open_log(folder, durability) as log:
            work(log, reporter(report, 0), count, is_synced=False)
    return faults


def record(folder: str, durability: Durability, count: int, lives: int) -> None:
    """Work under the recorder. Each life but the last ends without a close, as by kill -9."""
    marks = recorder.Marks()
    for life in range(lives):
        log = open_log(folder, durability)
        # A power cut may lose no record that recovery has shown.
        marks(b"s %d" % (log.end - 1))
        work(log, lambda line: marks(line.encode()), count, is_synced=True)
        if life + 1 < lives:
            abandon(log)
        else:
            log.close()


def abandon(log: FileLog) -> None:
    """Let another owner of this process have the folder, without a sync or a mark."""
    log._fault = log._fault or PolybusError("abandoned")  # type: ignore[assignment]
    log._sync_written = lambda: None  # type: ignore[method-assign]
    log.close()


def look(folder: str, lines: list[str], strict: bool = True) -> list[str]:
    return find_faults(folder, "fsync" if strict else "interval", lines)
