"""Breaks the way of durable topics on purpose, and demands that their tests notice.

    python tests/mutants/durable.py [part of a mutant's name ...]

Each mutant would let a reader miss a message, get it twice or get it before its commit, or
leave a peer waiting forever. Each is tried in a fork of its own, as in store.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.bus import mutants, say  # noqa: E402
from tests.mutants.store import plant  # noqa: E402
from tests.mutants.verdicts import GREEN, STALE, is_caught, verdict  # noqa: E402
from tests.rig.patching import DoesNotApply, Patch  # noqa: E402

TESTS = (
    "tests/unit/bus/test_durable_publisher.py",
    "tests/unit/bus/test_push_readers.py",
    "tests/unit/bus/test_followed_topics.py",
    "tests/unit/freud/test_durable_pull_reader.py",
)

FOLLOWING = mutants(
    "durable/push_readers.py",
    ("a reader begins anywhere", "elif tail.at_id < (start :=", "elif False and (start :="),
    ("a reader joins at a wrong position", "if start == self.at_id:", "if True:"),
    (
        "new readers get earlier rows",
        "if not self._readers.has_push_readers(self):\n            return  # readers",
        "if False:\n            return  # readers",
    ),
    ("trimmed: the tail stays", "if until is not None:  # the", "if False:  # the"),
    ("trimmed: stragglers stay", "self._reached(until or 0)", "pass"),
    ("news while reading is lost", "            self._again = True\n", ""),
    ("only once", "if (self.at_id != before or self._again)", "if self._again"),
    ("a full reader is forgotten", "        tail.behind[connection] = cursor\n", ""),
    (
        "room is not noticed by its cursors",
        "        self._catching_up.setdefault(connection, {})[tail] = cursor\n",
        "",
    ),
    (
        "a leave ends no reading",
        "for name in names if self._tails else ():",
        "for name in ():",
    ),
    (
        "a straggler begins one late",
        "CatchUpCursor(self, tail, connection, at_id)",
        "CatchUpCursor(self, tail, connection, at_id + 1)",
    ),
    ("a straggler never rejoins", "if self.at_id >= self._tail.at_id and", "if False and"),
    ("a straggler rejoins too soon", "if self.at_id >= self._tail.at_id and", "if"),
    (
        "room is not noticed",
        "cursor.read_next()\n\n    def on_commit",
        "pass\n\n    def on_commit",
    ),
    ("a failed straggler is left", "if cursor.wants_more():", "if False:"),
    (
        "the gone are fed",
        "        self.end_catch_up(tail, connection)\n        tail.joining",
        "        tail.joining",
    ),
    ("who joins and leaves is let in", "        tail.joining.pop(connection, None)\n", ""),
    (
        "a name is not followed from its binding",
        "if self._fanout.subscriber_count(name):\n",
        "if 0:\n",
    ),
    (
        "dropped: stragglers hear nothing more",
        "for connection in [*tail.joining, *tail.behind]:",
        "for connection in ():",
    ),
    ("dropped: it stays durable", "self._fanout.set_durable(name, False)", "pass"),
)

FOLLOWED = mutants(
    "durable/followed_topics.py",
    (
        "what was left out is forgotten",
        "                    self._left_out.add(number)",
        "                    pass",
    ),
    ("one end ends all", "if not self._followers[number]:", "if True:"),
    ("every commit wakes the loop", "if number in self._followers:", "if True:"),
)

KEEPING = mutants(
    "durable/publisher.py",
    ("failed commits are not counted", 'self._counters.count("dropped", reason, count)', "pass"),
    (
        "what failed is not told",
        "self._count_dropped(connection, name, count, error)\n        connection",
        "connection",
    ),
    ("nothing is bounded", "connection.uncommitted_bytes > self._max_bytes and", "False and"),
    ("it is read from at once", "self._max_bytes // 2", "self._max_bytes * 2"),
    ("it is never read from again", "            connection.is_committing = False\n", ""),
    ("a full reader is not waited for", "and connection.blocked_by is None:", "and True:"),
    ("bodies alone weigh", "size = block.size_bytes", "size = len(bodies)"),
    (
        "answered at once",
        "future.add_done_callback(lambda done: self._soon(lambda: report(done)))",
        "self._soon(lambda: then(OK, 1))",
    ),
    ("every error is one", "if isinstance(error, DoesNotExist):", "if False:"),
)

DELIVERY = mutants(
    "bus/delivery.py",
    ("the disk is not waited for", "if not connection.is_committing:", "if True:"),
)

PULLING = mutants(
    "dialects/freud/server/durable_pull_reader.py",
    ("polls do not fetch", "        if self.is_behind:\n            self.fetch()\n", ""),
    (
        "as far as is known",
        "return self.at_id + AHEAD_MESSAGES",
        "return min(self._durable.next_id(self.topic), self.at_id + AHEAD_MESSAGES)",
    ),
    ("trimmed: it stays", "self.at_id = max(self.at_id, end)", "pass"),
    ("trimmed: polls end too soon", "if not self.has_more():", "if True:"),
    (
        "polls never end",
        "            self._reader.wake_polls()\n\n    def on_rows",
        "            pass\n\n    def on_rows",
    ),
    ("asked in a loop", "                self.is_over_quota = True\n", ""),
    (
        "starved forever",
        "                    pull.is_over_quota = False\n",
        "                    continue\n",
    ),
    (
        "nothing is charged",
        "if self._quotas.charge(reader.identity, BYTES, run.size, trial=True):",
        "if True:",
    ),
    (
        "no peer is woken",
        "        self._reader.wake()\n        if self.is_over_quota",
        "        if self.is_over_quota",
    ),
    (
        "news wakes no peer",
        "                if reader.waiters:\n                    pull.read_next()\n\n    def tick",
        "                pass\n\n    def tick",
    ),
    ("times are those of the first", "and times[at] == times[at - 1]:", "and True:"),
    ("ids go on whatever they are", "ids[at] == ids[at - 1] + 1 and", "True and"),
    ("the abandoned stay", "        self.on_end()\n", ""),
)

SESSION = mutants(
    "dialects/freud/server/session.py",
    (
        "answered before it is kept",
        "        slot = ProduceSlot(run)\n",
        "        slot = ProduceSlot(run, NO)\n",
    ),
    ("a slot for anything", "if not self._slots.has_room_for(run):", "if False:"),
    (
        "a lost commit is not counted",
        '                self._broker.counters.count("dropped", reason, slot.run.count)\n',
        "                pass\n",
    ),
)

BROKER = mutants(
    "bus/broker.py",
    (
        "unsubscribing is not told",
        "self.durable.on_unsubscribed(connection, topic)\n        return removed",
        "pass\n        return removed",
    ),
    (
        "leaving is not told",
        "self.durable.on_left(connection, self._subscriptions.clear(connection))",
        "self._subscriptions.clear(connection)",
    ),
)

JUDGING = mutants(
    "bus/policy_enforcer.py",
    ("revoked ones are fed", "            for topic in lost:\n", "            for topic in ():\n"),
)

TOPICS = mutants(
    "dialects/freud/server/ephemeral_topics.py",
    (
        "dropped without a notice",
        "            put_and_wake([reader], Range(notice, 0, 1))\n\n    # ---",
        "\n    # ---",
    ),
    (
        "delete deletes",
        "            return NO\n        if self._lifecycle.find_action(TopicEvent.DELETE",
        "            return OK\n        if self._lifecycle.find_action(TopicEvent.DELETE",
    ),
)

ALL = [
    *(FOLLOWING + FOLLOWED + KEEPING + DELIVERY + PULLING),
    *(SESSION + BROKER + JUDGING + TOPICS),
]

HANG_S = 120


def trial(mutant: Patch | None) -> str:
    """Run the tests in a fork until one fails. Returns GREEN or the first failure."""
    try:
        if mutant is not None:
            mutant.texts()
    except DoesNotApply as error:
        return f"{STALE}: {error}"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            if mutant is not None:
                plant(mutant)
            code = pytest.ExitCode(pytest.main(["-x", "-q", "--tb=no", *TESTS]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(int(code))
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return verdict(os.waitstatus_to_exitcode(status), text)


def main() -> int:
    chosen = [one for one in ALL if len(sys.argv) < 2 or any(w in one.name for w in sys.argv[1:])]
    if (said := trial(None)) != GREEN:
        sys.exit(f"the tests fail without any mutant: {said}")
    missed = 0
    for mutant in chosen:
        start_s = time.monotonic()
        said = trial(mutant)
        caught = is_caught(said)
        missed += not caught
        mark = "" if caught else "MISSED"
        took_s = time.monotonic() - start_s
        say(f"{mutant.file:<26} {mutant.name:<42} {took_s:5.1f} s {mark:6} {said}")
    say(f"{len(chosen) - missed} of {len(chosen)} mutants caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
