"""Breaks FDQ's consumer and its checker on purpose, and demands that their tests notice.

    python tests/mutants/fdq.py [--unit | --live] [part of a mutant's name ...]

The same procedure as in bus.py. The live suite is rounds of real processes. (Mutants of
the coordinator are in groups.py, of the producer in fdq_producer.py.)
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
        "tests/unit/testing/test_fdq_checker.py",
        "tests/unit/testing/test_fdq_journal.py",
        "tests/unit/fdq/test_key_queue.py",
        "tests/unit/fdq/test_consumer_parts.py",
        "tests/unit/fdq/test_lease.py",
    ),
    "live": ("tests/faults/test_fdq_rounds.py",),
}

CHECKER = [
    *mutants(
        "tests/rig/fdq/delivery_rules.py",
        ("lost is fine", "if call.outcome == OK and one.body not in evidence.rows:", "if False:"),
        (
            "lost outputs are fine",
            "if commit.outcome == OK and body not in evidence.output_bodies:",
            "if False:",
        ),
        (
            "unhandled is fine",
            "elif not any(run.outcome in (OK, LATE) for run",
            "elif not any(True for run",
        ),
        ("nothing need be produced", "if row.body not in evidence.outputs:", "if False:"),
        ("duplicates in the topic are fine", "if len(rows) > 1:", "if len(rows) > 2:"),
        (
            "two runs may produce",
            "if len(runs := {run_of(row.body) for row in rows}) > 1:",
            "if len(runs := {run_of(row.body) for row in rows}) > 9:",
        ),
        ("two letters are fine", "if len(letters) > 1:", "if False:"),
        ("acked and dead", "if position in accepted:", "if False:"),
        (
            "two transactions of one",
            '        if count > 1:\n            yield Anomaly(DUPLICATED, f"{position}',
            '        if count > 2:\n            yield Anomaly(DUPLICATED, f"{position}',
        ),
        ("newer epochs may do it again", "if later or run.epoch > epoch:", "if later:"),
        ("zombies may not", "if later or run.epoch > epoch:", "if later or run.epoch != epoch:"),
        ("any ranges", "if not _is_tidy(shard.low, shard.ranges):", "if False:"),
        (
            "half a batch is fine",
            "if call.outcome == UNKNOWN and 0 < there < len(call.messages):",
            "if False:",
        ),
        (
            "half a transaction is fine",
            "if commit.outcome in (UNKNOWN, DUPLICATE) and 0 < there < len(commit.outputs):",
            "if False:",
        ),
        (
            "refused may be seen",
            "if call.outcome == FAILED and one.body in evidence.rows:",
            "if False:",
        ),
        (
            "unsure may not be seen",
            "if call.outcome == FAILED and one.body in evidence.rows:",
            "if call.outcome != OK and one.body in evidence.rows:",
        ),
        (
            "any words",
            "if row is None or (row.key, row.body) != (one.key, one.body):",
            "if row is None:",
        ),
    ),
    *mutants(
        "tests/rig/fdq/order_rules.py",
        ("stored in any order", "if now < last.get(producer, now):", "if False:"),
        (
            "any shard will do",
            "if len({evidence.generation_of(shard) for shard in shards}) < len(shards):",
            "if False:",
        ),
        ("sealed shards may grow", "if any(before.id > row.id", "if False and any(0 > row.id"),
        (
            "begun at any time",
            "if done_ns is None or run.began_ns < done_ns:",
            "if done_ns is None:",
        ),
        (
            "begun though nothing was done",
            "if done_ns is None or run",
            "if done_ns is not None and run",
        ),
        ("backwards is fine", "if run.offset < last.get(place, run.offset):", "if False:"),
        ("outputs in any order", "if position < last:", "if False:"),
    ),
    *mutants(
        "tests/rig/fdq/fencing_rules.py",
        ("the past is accepted", "if change.outcome == OK and change.epoch < newest:", "if False:"),
        (
            "refusals are accused",
            "if change.outcome == OK and change.epoch < newest:",
            "if change.epoch < newest:",
        ),
        ("calls in progress are late", "if at < change.began_ns)", "if at < change.ended_ns)"),
    ),
    *mutants(
        "tests/rig/fdq/stats_rules.py",
        ("early is fine", "if runs + evidence.unseen.get(position, 0) < most:", "if False:"),
        ("unacked is fine", "or shard.has_acked(row.offset)):", "or True):"),
        ("lag is fine", "if shard.lag:", "if False:"),
        (
            "any counts",
            "if (counted := getattr(shard, name)) != count:",
            "if (counted := getattr(shard, name)) < 0:",
        ),
        ("too many are fine", "if counted > count or (evidence", "if (evidence"),
        ("too few are fine", "or (evidence.history.is_exact and counted != count):", "or False:"),
    ),
]

CONSUMER = [
    *mutants(
        "dialects/fdq/client/key_queue.py",
        (
            "blocked key continues",
            "if blocked is not None:\n            run",
            "if False:\n            run",
        ),
        (
            "end of an abandoned run counts",
            "            return False\n        if isinstance(run, LastRuns):\n            self._end_message(run, None)",
            "            pass\n        if isinstance(run, LastRuns):\n            self._end_message(run, None)",
        ),
        ("key stays blocked", "self._blocked.pop((run.shard, blocked.key), None)", "pass"),
    ),
    *mutants(
        "dialects/fdq/client/executor.py",
        (
            "run without a lease",
            "has_lease = now_s <= self._member.lease_until_s",
            "has_lease = True",
        ),
        (
            "refused run is overtaken",
            "                    run.shard.is_open = False\n"
            "                if not run.shard.is_open:\n"
            "                    reason = NOT_RUN\n"
            "                    continue\n",
            "                    reason = NOT_RUN\n                    continue\n",
        ),
    ),
    *mutants(
        "dialects/fdq/client/acker.py",
        (
            "unsent acks are dropped",
            "        self.shard.restore_unsent_acks(self._acked)\n        self.shard.failures",
            "        self.shard.failures",
        ),
        (
            "shard is released during a run",
            "shard.is_releasing and self.is_idle([shard])",
            "shard.is_releasing",
        ),
    ),
    *mutants(
        "dialects/fdq/client/assigned_shards.py",
        ("assignment of an earlier generation", "if generation != self.generation:", "if False:"),
    ),
]

ALL = [*CHECKER, *CONSUMER]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-fdq"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
