"""Breaks the bus and its transport on purpose, and demands that their tests notice.

    python tests/mutants/bus.py [--unit | --live] [part of a mutant's name ...]

Each mutant is a small change that a tired programmer could make, applied to a copy of
src in build/mutants-bus. Two suites are then run until the first failure: `unit` (in
memory and on socket pairs), and if that passes, `live` (a real server in a process of its
own). A mutant that survives both shows a missing test. That one, and one that was not
tested at all (verdicts.py), fail the run. The unchanged copy is tested first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.verdicts import GREEN, STALE, is_caught, verdict  # noqa: E402
from tests.rig.patching import DoesNotApply, Patch, locate, patches  # noqa: E402

TREE = ROOT / "build" / "mutants-bus"
PACKAGE = TREE / "src" / "polybus"
SUITES = {
    "unit": (
        "tests/unit/bus/test_outbox.py",
        "tests/unit/bus/test_delivery.py",
        "tests/unit/bus/test_subscriptions.py",
        "tests/unit/bus/test_broker.py",
        "tests/unit/transports/test_inbox.py",
        "tests/unit/transports/test_connection.py",
        "tests/unit/transports/test_stream.py",
    ),
    "live": (
        "tests/interop/test_rqueue_semantics.py",
        "tests/faults/test_rqueue_bad_input.py",
        "tests/faults/test_rqueue_floods.py",
        "tests/faults/test_rqueue_slow.py",
        "tests/interop/test_rqueue_transports.py",
    ),
}
PYTEST = ("-x", "-q", "--tb=line", "--timeout=60")
PROFILE = ("-p", "tests.mutants.profile", "--hypothesis-profile", "mutants")
HANG_S = 300.0

mutants = patches


SESSION = mutants(
    "dialects/rqueue/server/session.py",
    (
        "bad frame does not close",
        "self._broker.close(self._connection, REASONS[routed.code])",
        "pass",
    ),
    ("every reason is the same", "REASONS[routed.code]", "REASONS[0]"),
    ("REMOVE ignored", "self._broker.unsubscribe(self._connection, routed.topic)", "pass"),
    ("DEREGISTER ignored", "self._broker.unsubscribe_all(self._connection)", "pass"),
    ("limit does not close", "if result in LIMITS_REACHED:", "if False:"),
    ("goes on after its end", "if not self._connection.is_closed:", "if True:"),
    ("acts after its end", "CONTROL_FRAME and not self._connection.is_closed:", "CONTROL_FRAME:"),
    (
        "end of input unheard",
        "self._broker.finish(self._connection)\n        return False",
        "return True",
    ),
    ("end unheard", "self._broker.leave(self._connection)", "pass"),
)

BROKER = mutants(
    "bus/broker.py",
    ("closed is not counted", 'self.counters.count("closed", reason)', "pass"),
    (
        "closed is not logged",
        '"connection closed",\n                dialect=connection.dialect',
        '"x",\n                dialect=connection.dialect',
    ),
    ("cut is not counted", 'self.counters.count("dropped", reason, lost)', "pass"),
    ("cut is not logged", "messages_lost=lost,\n        )", "messages_lost=0,\n        )"),
    (
        "what is lost is counted by chunk",
        "connection.encoding.count(chunk, sent) for chunk, sent in dropped",
        "1 for _ in dropped",
    ),
    (
        "closing drops what is owed",
        "send_held=True)\n            connection.pipe.close()\n            self",
        "send_held=False)\n            connection.pipe.close()\n            self",
    ),
    (
        "closing is cutting",
        "send_held=True)\n            connection.pipe.close()\n            self",
        "send_held=True)\n            connection.pipe.abort()\n            self",
    ),
    (
        "closing does not close",
        "send_held=True)\n            connection.pipe.close()\n            self",
        "send_held=True)\n            self",
    ),
    (
        "cutting does not cut",
        "        connection.pipe.abort()\n",
        "",
    ),
    (
        "finishing drops what is owed",
        '"peer"):\n            connection.outbox.close(send_held=True)',
        '"peer"):\n            connection.outbox.close(send_held=False)',
    ),
    (
        "lost with the connection is not counted",
        'self._drop_output(connection, "disconnected")',
        "pass",
    ),
    (
        "a stop drops what is owed",
        "reason):\n                connection.outbox.close(send_held=True)",
        "reason):\n                connection.outbox.close(send_held=False)",
    ),
    (
        "closed connections stay subscribed",
        "self.unsubscribe_all(connection)\n        self.fanout",
        "self.fanout",
    ),
    (
        "closed connections stay in the fan-out",
        "self.fanout.remove_subscriber(connection.number)",
        "pass",
    ),
    ("closed connections stay listed", "del self._connections[connection.id]", "pass"),
    ("peers that wait for the dead are left", "self.delivery.forget(connection)", "pass"),
    (
        "ends twice",
        "if connection.is_closed:\n            return False\n        connection",
        "connection",
    ),
    ("time does not pass", "self.delivery.tick(", "str("),
    ("pauses of the bus count for readers", "self.delivery.restart_windows()", "pass"),
)

DELIVERY = mutants(
    "bus/delivery.py",
    ("publishers do not wait", "connection.pipe.pause_reading()", "pass"),
    ("publishers never go on", "            connection.on_resume()", "            pass"),
    ("slow readers are never cut", 'self._cut(outbox.connection, "slow_consumer")', "pass"),
    ("cut at the least rate", "outbox.window_taken < self", "outbox.window_taken <= self"),
    (
        "cut without a window",
        "return now_s - outbox.window_start_s >= self._limits.slow_consumer_timeout_s",
        "return True",
    ),
    ("cut above the least rate", "_min_bytes_per_s * window_s", "_min_bytes_per_s * 50 * window_s"),
    ("old windows count", "            outbox.window_taken = taken\n", "            pass\n"),
    (
        "windows do not begin",
        "            outbox.window_start_s = now_s\n            outbox.window_taken = outbox",
        "            outbox.window_taken = outbox",
    ),
    (
        "room frees no peer",
        "        self.on_room_again(outbox.connection)\n        self._release(outbox)\n",
        "        self.on_room_again(outbox.connection)\n",
    ),
    (
        "peers that wait for the dead go on at once",
        "self._turn.call_soon(partial(self._release, connection.outbox))",
        "self._release(connection.outbox)",
    ),
    ("last come, first served", "next(iter(outbox.waiters))", "next(reversed(outbox.waiters))"),
    (
        "the dead wait on",
        "            self._stop_waiting(connection, connection.blocked_by)",
        "            pass",
    ),
    ("overflow is let be", 'self._cut(outbox.connection, "outbox_overflow")', "pass"),
    ("peers that went on are counted as waiting", "self.waiting -= 1", "pass"),
    (
        "the ended wait",
        "if routed.stop == BLOCKED and not connection.is_closed:\n"
        "            self._wait(connection, routed.blocker)\n"
        "        for batch",
        "if routed.stop == BLOCKED:\n"
        "            self._wait(connection, routed.blocker)\n"
        "        for batch",
    ),
    (
        "first reader only",
        "routed: RouteResult) -> None:\n        for outbox, data in routed.outputs:",
        "routed: RouteResult) -> None:\n        for outbox, data in routed.outputs[:1]:",
    ),
)

SUBSCRIPTIONS = mutants(
    "bus/subscriptions.py",
    ("one subscription too many", "counted >= self", "counted > self"),
    ("one topic too many", "self.topics >= self", "self.topics > self"),
    ("known topics are refused", " and not self._fanout.has_topic(topic)", ""),
    ("probes are not free", "free = topic_name.is_probe(topic) and", "free = False and"),
    ("probes are endless", " and len(connection.free_probes) < FREE_PROBES", ""),
    ("shared probes count twice", "- len(self._probes)", "- self._probes.total()"),
    ("ended probes stay", "            del self._probes[topic]", "            pass"),
    ("removed ones are counted", "        self.count -= 1", "        pass"),
    (
        "ended ones are counted",
        "self.count -= self._fanout.unsubscribe_all(connection.number)",
        "self._fanout.unsubscribe_all(connection.number)",
    ),
    ("twice is two", "return SubscribeResult.ALREADY", "pass"),
    ("denied is allowed", "return SubscribeResult.DENIED", "pass"),
)

CONNECTION = mutants(
    "transports/stream_connection.py",
    ("pausing does not reach the socket", "self._transport.pause_reading()", "pass"),
    ("resuming does not reach the socket", "self._transport.resume_reading()", "pass"),
    ("held bytes are not redelivered", "        self.redeliver_held()\n        #", "        #"),
    (
        "a second queue below",
        "set_write_buffer_limits(high=0)",
        "set_write_buffer_limits(high=1 << 26)",
    ),
    ("lingers forever", "LINGER_S, self._transport.abort", "1e6, self._transport.abort"),
    ("closes at once", "self._transport.close()", "self._transport.abort()"),
    (
        "aborts politely",
        "        self._transport.abort()\n        # A stopping",
        "        self._transport.close()\n        # A stopping",
    ),
    (
        "places are not given back",
        "if self._slot is Slot.COUNTED:\n            self._free_slot()",
        "if False:\n            self._free_slot()",
    ),
    ("the session is not told", "            self._session.on_ended()", "            pass"),
    (
        "the host's queue is not looked at",
        'return unsent_bytes(self._transport.get_extra_info("socket"))',
        "return 0",
    ),
    ("writes one chunk of many", "writelines(chunks)", "writelines(chunks[:1])"),
    (
        "those refused are served",
        "        if not self._admit(self):\n            return False",
        "        self._admit(self)",
    ),
)

STREAM = mutants(
    "transports/stream_listener.py",
    ("one connection too many", "if self.open >= self._max:", "if self.open > self._max:"),
    ("places are used up", "self.open -= 1", "pass"),
    ("refused is not reported", "self._refused(peer)", "pass"),
    ("draining does not wait", "await asyncio.wait_for(self._empty.wait(), timeout_s)", "pass"),
    ("peers that stay are left", "            connection.abort()", "            pass"),
)

TLS = mutants(
    "transports/tls_connection.py",
    (
        "pausing does not stop decrypting",
        "while self._state in DELIVERING:",
        "while self._state in OPEN_STATES:",
    ),
    (
        "closing does not stop decrypting",
        "while self._state in DELIVERING:",
        "while self._state is not State.PAUSED:",
    ),
    (
        "the rest is lost after a pause",
        "        try:\n            self._decrypt()",
        "        try:\n            pass",
    ),
    ("no close_notify is sent", "self._tls.unwrap()", "pass"),
    (
        "close_notify is ignored",
        "            if not self.eof_received():\n                self.close()\n",
        "",
    ),
    (
        "handshakes may take forever",
        "HANDSHAKE_TIMEOUT_S, self._on_handshake_timeout",
        "1e6, self._on_handshake_timeout",
    ),
    (
        "handshakes that fail are not told of",
        'self._failed(self.peer, (error.reason or "unknown").lower())',
        "pass",
    ),
    ("handshakes that take too long are not told of", 'self._failed(self.peer, "timeout")', "pass"),
    ("handshakes that break off are not told of", 'self._failed(self.peer, "hung_up")', "pass"),
)

ALL = [*SESSION, *BROKER, *DELIVERY, *SUBSCRIPTIONS, *CONNECTION, *STREAM, *TLS]


def copy_tree() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, TREE / folder, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "docs", "examples", ".ci"):
        (TREE / name).symlink_to(ROOT / name)


def test(suite: str) -> str:
    """Run a suite. Returns GREEN or the first failure."""
    profile = PROFILE if suite == "unit" else ()
    command = [sys.executable, "-m", "pytest", *PYTEST, *profile, *SUITES[suite]]
    env = {**os.environ, "PYTHONPATH": f"{TREE / 'src'}{os.pathsep}{TREE}"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            command,
            cwd=TREE,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=HANG_S,
        )
    except subprocess.TimeoutExpired:
        return f"hung for {HANG_S:g} s"
    return verdict(done.returncode, done.stdout + done.stderr)


def trial(mutant: Patch, suites: list[str]) -> list[str]:
    path = locate(PACKAGE, mutant.file)
    original = path.read_text()
    try:
        mutant.apply(PACKAGE)
    except DoesNotApply as error:
        return [f"{STALE}: {error}"]
    try:
        return until_caught(suites)
    finally:
        path.write_text(original)


def until_caught(suites: list[str]) -> list[str]:
    answers = []
    for suite in suites:
        answers.append(test(suite))
        if answers[-1] != GREEN:
            break
    return answers


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    suites = [suite for suite in SUITES if f"--{suite}" in sys.argv] or list(SUITES)
    chosen = [one for one in ALL if not words or any(word in one.name for word in words)]
    copy_tree()
    for suite in suites:
        if (said := test(suite)) != GREEN:
            sys.exit(f"the {suite} tests fail without any mutant: {said}")
    missed = 0
    for mutant in chosen:
        start_s = time.monotonic()
        answers = trial(mutant, suites)
        caught = is_caught(answers[-1])
        missed += not caught
        took_s = time.monotonic() - start_s
        mark = "" if caught else "MISSED"
        say(f"{mutant.file:<28} {mutant.name:<42} {took_s:5.1f} s {mark:6} {' | '.join(answers)}")
    say(f"{len(chosen) - missed} of {len(chosen)} mutants caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
