"""Breaks the thread that writes, and the one beside it, and demands that their tests notice.

    python tests/mutants/writer.py [part of a mutant's name ...]

The same procedure as in bus.py, with unit tests alone. Each would lose, repeat or answer too
soon what was committed, or leave a peer waiting forever.
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
    ("no peer comes for what is lost", "                self._on_failure()\n", ""),
    (
        "no peer waits for what is in progress",
        "        with self._idle:\n            failed,",
        "        if True:\n            failed,",
    ),
    ("two at a time", "        self._idle.acquire()\n        self._work", "        self._work"),
    (
        "answered before it is written",
        "                self._write(work.batch)\n",
        "                self._answer(work.executed)\n                self._write(work.batch)\n",
    ),
    (
        "no peer is answered",
        "                    self._answer(work.executed)\n",
        "                    pass\n",
    ),
    (
        "a thread that did not start is there",
        "            try:\n                thread.start()",
        "            self._thread = thread\n            try:\n                thread.start()",
    ),
    (
        "it never ends",
        "            self._work_ready.release()\n            self._thread.join()",
        "            pass",
    ),
)

WRITER = mutants(
    "store/lmdb/writer.py",
    (
        "what rests on a lost one is kept",
        "                executed = task_future.run_tasks(group, self.state, self._wall_ns(), "
        "PolybusError)\n            known",
        "                pass\n            known",
    ),
    ("one that failed takes others along", "or len(group) == 1:", "or True:"),
    ("a batch that failed is kept", "        self.state.rollback()\n", ""),
    (
        "the next is not waited for",
        "            while self._has_background_commit and not self._settled():\n",
        "            while False:\n",
    ),
    ("what is small goes beside", "batch.size >= LARGE_BYTES and not self", "not self"),
    (
        "none gives way",
        "and not self._is_yielding and not batch.has_removals",
        "and not batch.has_removals",
    ),
    (
        "what is to be removed waits",
        " and not batch.has_removals\n            )",
        "\n            )",
    ),
    (
        "leases of a lost batch are gone",
        "        while self._has_background_commit:\n            self._settled()",
        "        self._settled()",
    ),
    (
        "leases of a written batch stay",
        "        if failed is None:\n            self.state.confirm()\n",
        "        if failed is None:\n",
    ),
    (
        "what is done alone does not wait",
        "            if exclusive is not None:\n                self._settle_all()",
        "            if exclusive is not None:\n                pass",
    ),
    (
        "the end does not wait",
        "            if exclusive is self._end:\n                self._settle_all()",
        "            if exclusive is self._end:\n                pass",
    ),
    (
        "a large memory is never looked at",
        "            if self._has_background_commit and self.state.cache.is_large:\n",
        "            if False:\n",
    ),
    ("all at once", "size < max_bytes and len(group)", "len(group)"),
    ("the size is forgotten", "        self._queue.release_bytes(size - added)\n", ""),
    ("nothing more is taken", "            if not alone:\n", "            if False:\n"),
)

STATE = mutants(
    "store/lmdb/writer_state.py",
    (
        "what is known grows",
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
