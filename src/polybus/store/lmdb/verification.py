"""Verification of a store: reads every page in use, every value and every block.

LMDB's pages have no checksums, and walking damaged ones may kill the process. So a child
process does the walk and reports each step as a line of JSON. If the child dies, that is a
fault at the last place it reported. It reads in short transactions, so that a store can be
verified while its owner works.

A store is intact if

- every value can be decoded and matches its checksum, if it has one
- the log of a shard has every offset from start to end once, its ids grow and are below
  the next id of the topic, and its times do not decrease
- the stages of an extent hold as many messages for it as it says
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import lmdb

from polybus.errors import PolybusError, StoreFault
from polybus.model import run_table
from polybus.store import folder_ownership
from polybus.store.contract import Progress, no_progress
from polybus.store.engine import VerifyReport
from polybus.store.lmdb import log_entry, store_files, store_keys, stored_values
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.store_copy import used_bytes
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.writer_state import scan_prefix


def verify(path: Path, progress: Progress = no_progress) -> VerifyReport:
    """Verify a store in a child process.

    Raises `DoesNotExist` if there is no store, `WrongFormat` if its format is unknown.
    """
    store_files.current_generation(path)  # raises if it is missing or of another format
    command = [sys.executable, "-m", __name__, str(path)]
    report, where = VerifyReport(), "the beginning"
    # The same interpreter and module, so that the child runs the same version.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            # A line is complete even if the child dies after it, because it flushes each.
            event = json.loads(line)
            if "fault" in event:
                report.add(event["fault"])
            else:
                where = event.pop("where")
                progress(event.pop("done"), event.pop("total"))
                for name, count in event.items():
                    setattr(report, name, count)
        stderr = child.stderr.read().decode(errors="replace").strip()
        code = child.wait()
    # A negative code is the signal that killed the child.
    if code:
        reason = signal.Signals(-code).name if code < 0 else stderr[-300:]
        report.add(f"pages of the store are damaged: reading ended with {reason}, after {where}")
    return report


class VerifyReporter:
    """Reports faults, and every few megabytes the totals, from the child to its parent."""

    STEP_BYTES: Final = 16 << 20

    def __init__(self, total: int) -> None:
        self.report = VerifyReport()
        self._total = total
        self._next = 0
        self._done = 0

    def fault(self, text: str) -> None:
        self._write_line({"fault": text})

    def advance(self, where: str, size: int = 0) -> None:
        """Note a place that was reached and the bytes read since the last one."""
        self._done += size
        if self._done >= self._next:
            self.report_progress(where)
            self._next = self._done + self.STEP_BYTES

    def report_progress(self, where: str) -> None:
        counted = asdict(self.report)
        del counted["faults"], counted["fault_count"]
        self._write_line({"where": where, "done": self._done, "total": self._total, **counted})

    def _write_line(self, event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


# Limits of one transaction: while it is open, LMDB cannot reuse pages that the owner frees.
STEP: Final = 256  # values
STEP_BYTES: Final = 32 << 20

AFTER_LOG: Final = b"h"  # the first byte after that of the log
NEVER: Final = 1 << 62  # after the last offset

DECODERS: Final[dict[bytes, Callable[[memoryview], Any]]] = {
    store_keys.COUNTERS: stored_values.StoreCounters.decode,
    store_keys.NAMES: stored_values.read_name,
    store_keys.PRODUCERS: stored_values.PRODUCER.unpack,
    store_keys.RESULTS: stored_values.read_result,
    store_keys.RECORDS: stored_values.read_record,
    store_keys.TOPICS: stored_values.read_topic,
    store_keys.UPKEEP: stored_values.SHARD_UPKEEP.unpack,
    store_keys.STAGED: log_entry.decode,
}


class StoreVerifier:
    """Walks the whole store, in the child process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = StoreFiles(path, read_only=True)
        self._reporter = VerifyReporter(used_bytes(self._files.current))
        self._report = self._reporter.report

    def run(self) -> None:
        with closing(self._files):
            self._verify_pages()
            with self._reporting_faults("values"):
                self._decode_values()
            topics: list[bytes] = []
            with self._reporting_faults("topics"), self._files.snapshot() as transaction:
                topics += [bytes(raw) for _, raw in scan_prefix(transaction, store_keys.TOPICS)]
            # Each topic on its own: a damaged one must not hide the faults of the others.
            for raw in topics:
                with self._reporting_faults("a topic"):
                    self._verify_topic(stored_values.read_topic(raw)[0].number)
            self._reporter.report_progress("the end")

    def _verify_pages(self) -> None:
        """Check LMDB's own structure, if this py-lmdb can and no process owns the store."""
        try:
            verify_pages = import_module("lmdb.verify").verify
        except ImportError:
            return
        # The check needs a file that does not change while it runs.
        if folder_ownership.owner(self._path) is None:
            for fault in verify_pages(str(self._files.current.path)):
                self._reporter.fault(f"pages of the store are damaged: {fault}")

    def _decode_values(self) -> None:
        """Decode all values but those of the log, some in each transaction."""
        key: bytes | None = b""
        while key is not None:
            with self._files.snapshot() as transaction, transaction.cursor() as cursor:
                found = cursor.set_range(key) if key else cursor.first()
                for _ in range(STEP):
                    key = bytes(cursor.key()) if found else None
                    if key is None:
                        break
                    kind, value = key[:1], cursor.value()
                    if kind == store_keys.LOG:
                        key = AFTER_LOG  # the log is checked by shard
                        break
                    with self._reporting_faults(f"the value of key {key!r}"):
                        DECODERS.get(kind, bytes)(value)
                    # Staged blocks count when their extent is verified.
                    size = 0 if kind == store_keys.STAGED else len(value)
                    self._reporter.advance(f"key {key!r}", size)
                    found = cursor.next()
                    key = bytes(cursor.key()) if found else None

    def _verify_topic(self, number: int) -> None:
        self._report.topics += 1
        with self._files.snapshot() as transaction:
            raw = transaction.get(store_keys.topic(number))
            if raw is None:
                return  # dropped meanwhile
            topic, _ = stored_values.read_topic(raw)
        for shard in topic.shards:
            self._report.shards += 1
            where = f"topic {topic.name!r}, shard {shard}"
            with self._reporting_faults(where):
                ShardVerifier(self._files, self._reporter, number, shard, where, topic.name).run()

    @contextmanager
    def _reporting_faults(self, where: str) -> Iterator[None]:
        try:
            yield
        except StoreFault as error:
            # Errors of a cursor name their place already.
            self._reporter.fault(str(error) if "shard" in str(error) else f"{where}: {error}")
        except (PolybusError, lmdb.Error, ValueError, OSError) as error:
            self._reporter.fault(f"{where}: {error}")
        except Exception as error:  # decoding a damaged value may raise anything
            self._reporter.fault(f"{where}: {error!r}")


class ShardVerifier:
    """Walks the log of one shard in steps, between which its owner may change it."""

    def __init__(
        self,
        files: StoreFiles,
        reporter: VerifyReporter,
        topic: int,
        shard: int,
        where: str,
        name: str,
    ) -> None:
        self._files = files
        self._reporter = reporter
        self._target = topic, shard
        self._where = where
        self._name = name
        self._last = 0, 0  # id and time

    def run(self) -> None:
        topic, shard = self._target
        at = 0
        while True:
            with self._files.snapshot() as transaction:
                raw = transaction.get(store_keys.shard_state(topic, shard))
                state = transaction.get(store_keys.state(topic))
                if raw is None or state is None:
                    return  # dropped meanwhile
                start, end, _ = stored_values.SHARD_STATE.unpack(raw)
                next_id, _ = stored_values.TOPIC_STATE.unpack(state)
                # The owner may have trimmed the shard since the last step.
                at = max(at, start)
                size = 0
                with closing(EntryCursor(transaction, topic, shard, self._name)) as cursor:
                    for _ in range(STEP):
                        if at >= end or size > STEP_BYTES:
                            break
                        at, entry_bytes = self._verify_entry(cursor, at, next_id)
                        size += entry_bytes
            if at >= end:
                return

    def _verify_entry(self, cursor: EntryCursor, at: int, next_id: int) -> tuple[int, int]:
        """Verify the entry that holds an offset. Returns the offset after it, and its bytes."""
        try:
            entry = cursor.seek(at)
        except StoreFault as error:
            self._reporter.fault(str(error))
            # The next entry may be readable.
            following = cursor.first_after(at)
            return NEVER if following is None else following, 0
        if entry is None or entry.first > at:
            upto = entry.first if entry else "the end"
            self._reporter.fault(f"{self._where}, offset {at}: no entries up to {upto}")
            return entry.first if entry else NEVER, 0
        self._verify_runs(entry, next_id)
        return entry.end, self._verify_blocks(cursor, entry, at)

    def _verify_runs(self, entry: LogEntry, next_id: int) -> None:
        where = f"{self._where}, offset {entry.first}"
        if run_table.count_messages(entry.runs) != entry.count:
            self._reporter.fault(f"{where}: the run table does not match the number of messages")
        for first_id, time_ns, count in run_table.read_runs(entry.runs):
            if first_id <= self._last[0] or time_ns < self._last[1]:
                self._reporter.fault(f"{where}: ids or times decrease")
            if first_id + count > next_id:
                self._reporter.fault(f"{where}: ids exceed the next id of the topic")
            # Compared with the next run, also across steps and entries.
            self._last = first_id + count - 1, time_ns

    def _verify_blocks(self, cursor: EntryCursor, entry: LogEntry, at: int) -> int:
        size, place = 0, at - entry.first
        report = self._reporter.report
        try:
            for layout, _, first in cursor.blocks(place):
                with layout:
                    if first > entry.first + place:
                        raise StoreFault(
                            f"{self._where}, offset {place}: staged blocks are missing"
                        )
                    place = first - entry.first + layout.count
                    report.blocks += 1
                    report.messages += layout.count
                    report.bytes += layout.size_bytes
                    size += layout.size_bytes
        except StoreFault as error:
            self._reporter.fault(str(error))
        else:
            if place != entry.count:
                self._reporter.fault(f"{self._where}, offset {entry.first}: blocks are missing")
        self._reporter.advance(f"{self._where}, offset {entry.first}", size)
        return size


def main(path: Path) -> int:
    try:
        StoreVerifier(path).run()
    except PolybusError as error:
        sys.stderr.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
