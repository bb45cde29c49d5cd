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
    ),
    "live": ("tests/interop/consumers", "tests/interop/test_fdq_membership_changes.py"),
}

LANES = mutants(
    "dialects/fdq/client/key_queue.py",
    (
        "a held key is overtaken",
        "if blocked is not None:\n            run",
        "if False:\n            run",
    ),
    ("closed shards go on", "if not run.shard.is_open:", "if False:"),
    (
        "a late end counts",
        "            return False\n        self.current = None\n        shard",
        "            pass\n        self.current = None\n        shard",
    ),
    ("a commit is not the end", "if run.is_committed:  # its", "if False:  # its"),
    ("full shards run on", "if not shard.may_start(run.offset, is_new=True):", "if False:"),
    ("aside forever", "if shard.version != version:", "if False:"),
    ("overtaken from aside", "if shard in self._full_shards:", "if False:"),
    ("one full shard takes all the room", "if not rows.rows:", "if True:"),
    ("what was aside waits forever", "self.shard.add_waiting(-rows, -size_bytes)", "pass"),
    ("the next of a key is lost", "self._ready.append(follower)", "pass"),
    ("keys are held forever", "self._blocked.pop((run.shard, blocked.key), None)", "pass"),
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
    ("the first waits for all", "if offset == self.done.low:", "if False:"),
    (
        "those that failed wait for room",
        "len(self.done) < self._full_at or self.done",
        "self.done",
    ),
    ("acks are lost", "self._unsent = merge_ranges([*self._unsent, *ranges])", "pass"),
    (
        "transactions are acked again",
        "self.emitted += len(committed)",
        "self._unsent += [(at, at + 1) for at in committed]",
    ),
    ("nothing is put back", "self._unsent = merge_ranges([*self._unsent, *unsent])", "pass"),
    ("failures are not emitted", "self.emitted += failed", "pass"),
)

RUNS = mutants(
    "dialects/fdq/client/handler_run.py",
    (
        "a run comes again as itself",
        "return [MessageRun(self.shard, self._rows, self._index, self.offset, failed)]",
        "self.attempts = failed\n        return [self]",
    ),
    ("the dead come again", "if self.offset in dead:", "if False:"),
    (
        "pending work keeps all",
        "self._rows, self._index = self._rows.copy_row(self._index), 0",
        "pass",
    ),
    ("runs are never over", "        self.is_over = True\n        shard", "        shard"),
)

BATCHES = mutants(
    "dialects/fdq/client/handler_run.py",
    ("the last run has company", "is_alone = failures >= last_attempt", "is_alone = False"),
    (
        "suspects in large batches",
        "end = min(end, start + MAX_SUSPECT_BATCH_ROWS, self.shard.suspect_to)",
        "pass",
    ),
    ("the dead of a batch come again", "if at not in dead]", "]"),
)

REST = mutants(
    "dialects/fdq/client/acker.py",
    ("failures are forgotten", "self.shard.failures.extendleft(reversed(self._failures))", "pass"),
    (
        "released while it runs",
        "shard.is_releasing and self.is_idle([shard])",
        "shard.is_releasing",
    ),
    ("hangs are not seen", "if run is None or now_s - run.started_s <= timeout_s:", "if True:"),
    ("close does not wait", "while not self.is_idle(shards) and", "while False and"),
    ("a slow run takes all the room", "executor.refresh(is_slow=True)", "pass"),
    ("what is left behind never ran", "run = executor.abandon(ABANDONED)", "run = None"),
)

HOLDINGS = mutants(
    "dialects/fdq/client/assigned_shards.py",
    ("a former life's shards", "if generation != self.generation:", "if False:"),
    ("old epochs are held", "shard is not None and shard.epoch == epoch", "shard is not None"),
    ("released again and again", "if shard is None or shard.is_releasing:", "if shard is None:"),
    ("open after the end", "shard.is_open = not self._is_closed", "pass"),
)

FETCHING = mutants(
    "dialects/fdq/client/fetcher.py",
    (
        "what is done is run",
        "if shard.is_done(rows.offsets[start], rows.offsets[start + length - 1] + 1):",
        "if False:",
    ),
    ("lanes by the shard's bits", ">> 32) % count", ") % 16 % count"),
    (
        "batches with holes",
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
