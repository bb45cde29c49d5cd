"""Breaks FDQ's consumer on purpose, and demands that its tests notice.

    python tests/mutants/fdq_consumer.py [part of a mutant's name ...]

The same procedure as in bus.py: unit tests, and consumers on a bus in the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": (
        "tests/unit/fdq/test_offset_ranges.py",
        "tests/unit/fdq/test_retry_schedule.py",
        "tests/unit/fdq/test_consumer_parts.py",
        "tests/unit/fdq/test_key_queue.py",
        "tests/unit/fdq/test_last_runs.py",
    ),
    "live": ("tests/interop/consumers", "tests/interop/test_fdq_membership_changes.py"),
}

LANES = mutants(
    "dialects/fdq/client/key_queue.py",
    (
        "blocked key is overtaken",
        "if blocked is not None:\n            run",
        "if False:\n            run",
    ),
    ("closed shards start runs", "if not run.shard.is_open:", "if False:"),
    (
        "end of an abandoned run counts",
        "            return False\n        if isinstance(run, LastRuns):\n            self._end_message(run, None)",
        "            pass\n        if isinstance(run, LastRuns):\n            self._end_message(run, None)",
    ),
    ("failure after a commit counts", "if run.is_committed:  # its", "if False:  # its"),
    ("full shards start any run", "if not shard.may_start(run.offset, is_new=True):", "if False:"),
    ("parked rows never continue", "if shard.version != version:", "if False:"),
    ("parked rows are overtaken", "if shard in self._full_shards:", "if False:"),
    ("parked rows keep their room", "if not rows.rows:", "if True:"),
    ("parked rows count as waiting forever", "self.shard.add_waiting(-rows, -size_bytes)", "pass"),
    ("next message of a key is lost", "self._ready.append(follower)", "pass"),
    ("keys stay blocked", "self._blocked.pop((run.shard, blocked.key), None)", "pass"),
    (
        "rows are never freed",
        "popleft().rows\n            return None\n        blocked",
        "popleft().rows * 0\n            return None\n        blocked",
    ),
)

SHARDS = mutants(
    "dialects/fdq/client/assigned_shards.py",
    ("never full", "self.is_full = len(self.done) >= self._full_at or", "self.is_full ="),
    ("any number of failures", "or self._blocked_keys >= MAX_BLOCKED_KEYS", ""),
    ("message at the low mark waits", "if offset == self.done.low:", "if False:"),
    (
        "retries need room",
        "len(self.done) < self._full_at or self.done",
        "self.done",
    ),
    ("acks are lost", "self._unsent = merge_ranges([*self._unsent, *ranges])", "pass"),
    (
        "transactions are acked again",
        "self.emitted += len(committed)",
        "self._unsent += [(at, at + 1) for at in committed]",
    ),
    (
        "unsent acks are not restored",
        "self._unsent = merge_ranges([*self._unsent, *unsent])",
        "pass",
    ),
    ("failures are not emitted", "self.emitted += failed", "pass"),
)

RUNS = mutants(
    "dialects/fdq/client/handler_run.py",
    (
        "retry is the same object",
        "return [MessageRun(self.shard, self._rows, self._index, self.offset, failed)]",
        "self.attempts = failed\n        return [self]",
    ),
    ("dead letters are retried", "if self.offset in dead:", "if False:"),
    (
        "waiting run keeps its fetch",
        "self._rows, self._index = self._rows.copy_row(self._index), 0",
        "pass",
    ),
    ("runs are never over", "        self.is_over = True\n        shard", "        shard"),
)

BATCHES = mutants(
    "dialects/fdq/client/handler_run.py",
    (
        "last run shares a batch",
        "failures > 0, failures >= last_attempt",
        "failures > 0, False",
    ),
    ("success after a failed last run is acked", "elif self.failures:", "elif False:"),
    ("last runs of a closed shard go on", "            and self.shard.is_open\n", ""),
    ("held successes are lost", "shard.finished_ranges.extend(", "list("),
    ("all held successes are acked", "if offset < first]", "]"),
    (
        "rest of the last runs is lost",
        "return LastRuns(self.shard, rest, self.offset + 1, self._last_attempt)",
        "return None",
    ),
    (
        "large batches of suspect rows",
        "end = min(end, start + MAX_SUSPECT_BATCH_ROWS, self.shard.suspect_to)",
        "pass",
    ),
    ("dead letters of a batch are retried", "if at not in dead]", "]"),
)

REST = mutants(
    "dialects/fdq/client/acker.py",
    (
        "failures are not restored",
        "self.shard.failures.extendleft(reversed(self._failures))",
        "pass",
    ),
    (
        "shard is released during a run",
        "shard.is_releasing and self.is_idle([shard])",
        "shard.is_releasing",
    ),
    ("timeouts are ignored", "if run is None or now_s - run.started_s <= timeout_s:", "if True:"),
    (
        "shard is released before its held acks",
        "if is_drained and has_held_acks(shard):",
        "if False:",
    ),
    ("consumer leaves before its held acks", " or any(map(has_held_acks, shards))", ""),
    ("close does not wait", "while not self.is_idle(shards) and", "while False and"),
    ("slow run keeps its room", "executor.refresh(is_slow=True)", "pass"),
    ("abandoned run is not reported", "run = executor.abandon(ABANDONED)", "run = None"),
)

HOLDINGS = mutants(
    "dialects/fdq/client/assigned_shards.py",
    ("assignment of an earlier generation", "if generation != self.generation:", "if False:"),
    (
        "shard of an old epoch is found",
        "shard is not None and shard.epoch == epoch",
        "shard is not None",
    ),
    ("release starts twice", "if shard is None or shard.is_releasing:", "if shard is None:"),
    ("shard is open after close", "shard.is_open = not self._is_closed", "pass"),
)

FETCHING = mutants(
    "dialects/fdq/client/fetcher.py",
    (
        "done rows are queued",
        "if shard.is_done(rows.offsets[start], rows.offsets[start + length - 1] + 1):",
        "if False:",
    ),
    ("executor by the shard's bits", ">> 32) % count", ") % 16 % count"),
    (
        "batches with gaps",
        "if last - first + 1 == batch.num_rows and not shard.is_done(first, last + 1):",
        "if True:",
    ),
)

ALL = [*LANES, *SHARDS, *RUNS, *BATCHES, *REST, *HOLDINGS, *FETCHING]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-fdq-consumer"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
