"""The log under the store: lone appends and groups, beside lone commits of the LMDB store."""

import os
import time
from pathlib import Path

from bench.harness.results import RATE, Metric, Values
from bench.harness.rounds import TRIAL_S
from bench.store.contract import SIZE, bodies
from bench.store.producers import Batch
from bench.store.rounds import Case
from bench.store.writing import OURS, turns_for
from polybus.model.commit import Append, Commit
from polybus.store.contract import Store
from polybus.store.engine import Durability
from polybus.store.log.file_log import FileLog
from polybus.store.log.write_ahead_log import LogRecord

DISK = Metric("disk_bytes_each", "disk bytes", higher_is_better=False)
WRITES = Metric("write_calls_each", "write calls", higher_is_better=False)

LOG = Case("log", "durable appends, 128 B", (RATE, DISK, WRITES))
GROUPS = f"{OURS}, 64 in flight"
INTERVAL = f"{OURS}, interval"
LMDB_STORE = "LMDB store, lone"
BESIDE = (GROUPS, INTERVAL, LMDB_STORE)
GROUP = 64
SECTOR = 512
TRIAL_APPENDS = 200


def io_counts(folder: Path) -> tuple[int, int]:
    """Return the bytes written to the folder's disk, and the calls of this process that write.

    The bytes are those of the device. `write_bytes` of /proc/self/io counts a whole folio, up to
    a megabyte, for a page of it that is written.
    """
    device = folder.stat().st_dev
    sectors = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text()
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    return int(sectors.split()[6]) * SECTOR, counts["syscw"]


class Appends:
    """One contender; a subclass appends a number of messages and waits for them."""

    pid = None

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._count = TRIAL_APPENDS

    def append(self, count: int) -> None:
        raise NotImplementedError

    def _run(self) -> float:
        started_s = time.perf_counter()
        self.append(self._count)
        return time.perf_counter() - started_s

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := self._run()) < TRIAL_S:
            self._count *= 4
        self._count = turns_for(took_s, self._count, wanted_s)

    def measure(self) -> Values:
        os.sync()  # bytes of others
        before = io_counts(self._folder)
        took_s = self._run()
        disk, calls = (
            now - then for now, then in zip(io_counts(self._folder), before, strict=True)
        )
        return {
            RATE.key: self._count / took_s,
            DISK.key: disk / self._count,
            WRITES.key: calls / self._count,
        }


class LogAppends(Appends):
    """A file log that trims what it has written, as a store does that applies in time."""

    def __init__(self, name: str, folder: Path, durability: Durability, in_flight: int) -> None:
        super().__init__(name, folder)
        self._in_flight = in_flight
        self._body = bodies(1)[0]
        assert len(self._body) == SIZE
        self.log = FileLog(folder / name.replace(" ", "-"), durability=durability)
        self._epoch = self.log.tail.epoch + 1

    def append(self, count: int) -> None:
        number = self.log.tail.number
        for _ in range(count // self._in_flight):
            futures = []
            for _ in range(self._in_flight):
                number += 1
                futures.append(self.log.append(LogRecord(self._epoch, 1, number, (self._body,))))
            for future in futures:
                future.result()
            if number % 4096 < self._in_flight:
                self.log.trim(number)


class Commits(Appends):
    """The LMDB store with one commit in flight."""

    def __init__(self, store: Store, folder: Path) -> None:
        super().__init__(LMDB_STORE, folder)
        self._store, self._topic = store, store.create(LOG.name, 1, {})
        self._batch = Batch(1)

    def append(self, count: int) -> None:
        for _ in range(count):
            commit = Commit((Append(self._topic.number, 0, self._batch.block(0)),))
            self._store.commit(commit).result()


def contenders(folder: Path, store: Store) -> list[Appends]:
    return [
        LogAppends(OURS, folder, "fsync", 1),
        LogAppends(GROUPS, folder, "fsync", GROUP),
        LogAppends(INTERVAL, folder, "interval", 1),
        Commits(store, folder),
    ]
