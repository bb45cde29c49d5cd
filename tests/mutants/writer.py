"""Mutants of the writer thread and the background committer, which their unit tests must detect.

    python tests/mutants/writer.py [part of a mutant's name ...]

The procedure is that of bus.py, with unit tests alone. Each mutant would lose or repeat a
commit, resolve it too early, or never resolve it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": tuple(
        f"tests/unit/store/lmdb/test_{name}.py"
        for name in (
            "background_committer",
            "failed_batches",
            "yield_to",
            "writer_queue",
            "full_disk",
            "queue_limits",
        )
    ),
}

COMMITTER = mutants(
    "store/lmdb/background_committer.py",
    ("failures are not reported", "self._failed = FailedCommit(work.group, error)", "pass"),
    ("the writer is not woken after a failure", "                self._on_failure()\n", ""),
    (
        "wait returns during a commit",
        "        with self._idle:\n            failed,",
        "        if True:\n            failed,",
    ),
    (
        "two batches in flight",
        "        self._idle.acquire()\n        self._work",
        "        self._work",
    ),
    (
        "futures resolve before the write",
        "                self._write(work.batch)\n",
        "                self._answer(work.executed)\n                self._write(work.batch)\n",
    ),
    (
        "futures never resolve",
        "                    self._answer(work.executed)\n",
        "                    pass\n",
    ),
    (
        "a thread that did not start counts as started",
        "            try:\n                thread.start()",
        "            self._thread = thread\n            try:\n                thread.start()",
    ),
    (
        "close does not end the thread",
        "            self._work_ready.release()\n            self._thread.join()",
        "            pass",
    ),
)

WRITER = mutants(
    "store/lmdb/writer.py",
    (
        "a group on top of a failed batch is not executed again",
        "                executed = task_future.run_tasks(group, self.state, self._wall_ns(), "
        "PolybusError)\n            known",
        "                pass\n            known",
    ),
    ("one failing task fails its group", "or len(group) == 1:", "or True:"),
    ("a failed batch is not rolled back", "        self.state.rollback()\n", ""),
    (
        "the next group does not wait for the batch in flight",
        "            while self._has_background_commit and not self._settled():\n",
        "            while False:\n",
    ),
    ("small batches go to the second thread", "batch.size >= LARGE_BYTES and not self", "not self"),
    (
        "the second thread is used while yielding",
        "and not self._is_yielding and not batch.has_removals",
        "and not batch.has_removals",
    ),
    (
        "batches with removals go to the second thread",
        " and not batch.has_removals\n            )",
        "\n            )",
    ),
    (
        "leases of a failed batch are confirmed",
        "        while self._has_background_commit:\n            self._settled()",
        "        self._settled()",
    ),
    (
        "leases of a written batch are not confirmed",
        "        if failed is None:\n            self.state.confirm()\n",
        "        if failed is None:\n",
    ),
    (
        "exclusive tasks do not wait",
        "            if exclusive is not None:\n                self._settle_all()",
        "            if exclusive is not None:\n                pass",
    ),
    (
        "close does not wait for the batch in flight",
        "            if exclusive is self._end:\n                self._settle_all()",
        "            if exclusive is self._end:\n                pass",
    ),
    (
        "a large cache is never emptied under load",
        "            if self._has_background_commit and self.state.cache.is_large:\n",
        "            if False:\n",
    ),
    ("groups have no limit of bytes", "size < max_bytes and len(group)", "len(group)"),
    (
        "bytes of the queue are never released",
        "        self._queue.release_bytes(size - added)\n",
        "",
    ),
    ("late tasks do not join the group", "            if not alone:\n", "            if False:\n"),
)

STATE = mutants(
    "store/lmdb/writer_state.py",
    (
        "the cache is never emptied",
        "        if not self.batch:\n            for table",
        "        if False:\n            for table",
    ),
)

ALL = [*COMMITTER, *WRITER, *STATE]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-writer"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
