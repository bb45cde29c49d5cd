"""Breaks ephemeral topics and Freud's session on purpose, and demands that their tests notice.

    python tests/mutants/freud.py [--unit | --live] [part of a mutant's name ...]

The same procedure as in bus.py: `unit` is in memory, with the model; `live` is a real
server and plain sockets, and runs only for mutants that survive `unit`.
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
        "tests/unit/freud/test_ephemeral_topics.py",
        "tests/unit/freud/test_session.py",
        "tests/unit/freud/test_fair_scheduler.py",
        "tests/unit/freud/test_session_stats.py",
        "tests/unit/freud/test_detached_readers.py",
        "tests/unit/bus/test_delivery.py",
        "tests/property/bus/test_freud_model.py",
    ),
    "live": (
        "tests/faults/test_freud_requests.py",
        "tests/faults/test_freud_endings.py",
        "tests/faults/test_freud_slow.py",
        "tests/faults/test_freud_with_rqueue.py",
        "tests/faults/test_freud_users.py",
        "tests/faults/test_freud_socket.py",
        "tests/faults/test_freud_hog.py",
        "tests/faults/test_freud_gone_producer.py",
    ),
}

LIFECYCLE = mutants(
    "dialects/freud/server/topic_lifecycle.py",
    (
        "a marked topic cannot be created again",
        "_E.CREATE: (_A.OPEN, _A.NOTHING, _A.NOTHING, _A.OPEN, _A.NOTHING)",
        "_E.CREATE: (_A.OPEN, _A.NOTHING, _A.NOTHING, _A.NOTHING, _A.NOTHING)",
    ),
    (
        "a recreation cannot be cancelled",
        "_E.DELETE: (_A.NOTHING, _A.MARK, _A.MARK, _A.NOTHING, _A.MARK)",
        "_E.DELETE: (_A.NOTHING, _A.MARK, _A.MARK, _A.NOTHING, _A.NOTHING)",
    ),
    (
        "a recreation delivers at once",
        "_E.PRODUCE: (_A.MISSING, _A.DELIVER, _A.BUFFER, _A.MISSING, _A.BUFFER)",
        "_E.PRODUCE: (_A.MISSING, _A.DELIVER, _A.BUFFER, _A.MISSING, _A.DELIVER)",
    ),
    (
        "a waiting buffer is overtaken",
        "_E.PRODUCE: (_A.MISSING, _A.DELIVER, _A.BUFFER, _A.MISSING, _A.BUFFER)",
        "_E.PRODUCE: (_A.MISSING, _A.DELIVER, _A.DELIVER, _A.MISSING, _A.BUFFER)",
    ),
    (
        "rqueue overtakes a waiting buffer",
        "_E.COLLECT: (_A.NOTHING, _A.DELIVER, _A.BUFFER, _A.NOTHING, _A.BUFFER)",
        "_E.COLLECT: (_A.NOTHING, _A.DELIVER, _A.DELIVER, _A.NOTHING, _A.BUFFER)",
    ),
    (
        "rqueue overtakes a recreation",
        "_E.COLLECT: (_A.NOTHING, _A.DELIVER, _A.BUFFER, _A.NOTHING, _A.BUFFER)",
        "_E.COLLECT: (_A.NOTHING, _A.DELIVER, _A.BUFFER, _A.NOTHING, _A.DELIVER)",
    ),
)

TOPICS = mutants(
    "dialects/freud/server/ephemeral_topics.py",
    (
        "policy before existence",
        "        if self._lifecycle.find_action(TopicEvent.CREATE, topic) is TopicAction.NOTHING:\n"
        "            return NOTHING_HAPPENED\n"
        "        source =",
        '        if not self._policy.allows(caller, "create", name):\n'
        "            return NO\n"
        "        if self._lifecycle.find_action(TopicEvent.CREATE, topic) is TopicAction.NOTHING:\n"
        "            return NOTHING_HAPPENED\n"
        "        source =",
    ),
    (
        "quota before policy",
        '        if not self._policy.allows(caller, "create", name):\n'
        "            return NO\n"
        "        if not self._quotas.charge(caller, TOPICS, 1):\n"
        "            return over_quota(TOPICS)\n",
        "        if not self._quotas.charge(caller, TOPICS, 1):\n"
        "            return over_quota(TOPICS)\n"
        '        if not self._policy.allows(caller, "create", name):\n'
        "            return NO\n",
    ),
    (
        "any peer may delete",
        'if not self._policy.allows(caller, "delete", name, topic.current.creator):',
        "if False:",
    ),
    (
        "any peer may subscribe",
        'if not self._policy.allows(caller, "subscribe", name, topic.current.creator):',
        "if False:",
    ),
    (
        "any peer may produce",
        'if not self._policy.allows(connection.pipe.identity, "produce", name, current.creator):',
        "if False:",
    ),
    ("topics are free", "if not self._quotas.charge(caller, TOPICS, 1):", "if False:"),
    (
        "subscriptions are free",
        "if not self._charge_subscription(caller):\n"
        "            return over_quota(SUBSCRIPTIONS)\n"
        "        reader = PullReader",
        "reader = PullReader",
    ),
    (
        "a buffer does not go to the first reader",
        "        self._lifecycle.apply(TopicEvent.SUBSCRIBE, topic, reader)\n",
        "        topic.current.readers[reader.id] = reader\n"
        "        self._lifecycle._update_fanout(topic)\n",
    ),
    (
        "a buffer does not go to the first push reader",
        "            self._lifecycle.apply(TopicEvent.RELEASE, topic)",
        "            pass",
    ),
    (
        "push readers are not counted",
        "pushed = self._fanout.subscriber_count(name)\n        if topic.current is not None:",
        "pushed = 0\n        if topic.current is not None:",
    ),
    (
        "those of the old life are counted",
        "        if topic.current is not None:\n"
        "            return len(topic.current.readers) + pushed\n",
        "",
    ),
    (
        "every peer sees everything",
        "any(self._policy.allows(caller, verb, name, creator) for verb in verbs)",
        "True",
    ),
    (
        "PARTs make no message",
        "self._delivery.accept_pushed(topic.current, first_id, offsets, body, buffers=buffers)",
        "pass",
    ),
)

READERS = mutants(
    "dialects/freud/server/pull_reader.py",
    (
        "an attached reader stays in the table of detached ones",
        "        reader.is_owned = True\n        self._detached.discard(reader)\n",
        "        reader.is_owned = True\n",
    ),
    (
        "ended subscriptions stay charged",
        "        self._quotas.release(reader.identity, SUBSCRIPTIONS, 1)\n",
        "",
    ),
    (
        "ended subscriptions keep their bytes",
        "        self._quotas.release(reader.identity, BYTES, reader.held_bytes)\n",
        "",
    ),
    (
        "the abandoned are not reaped",
        '            self.end(reader, "abandoned")',
        "            pass",
    ),
    (
        "the abandoned are reaped at once",
        "find_unused_since(now_s - self._detached_s)",
        "find_unused_since(now_s)",
    ),
    (
        "a wait is no use",
        "            if reader.waiters:\n                self.renew(reader)",
        "            if False:\n                self.renew(reader)",
    ),
    (
        "connections that close abandon nothing",
        "            self._detached.add(reader)\n",
        "            pass\n",
    ),
    (
        "waiting Gets hear nothing of the end",
        "            self._lifecycle.on_reader_ended(reader, reader.incarnation)\n        reader.wake()\n",
        "            self._lifecycle.on_reader_ended(reader, reader.incarnation)\n",
    ),
    (
        "a peer that waits is not served what is given back",
        "        for reader in readers:\n            reader.wake()\n\n    def attach",
        "\n    def attach",
    ),
    (
        "what is lost with a connection is not counted",
        '                self._counters.count("dropped", "disconnected", _count_messages(messages))\n',
        "                pass\n",
    ),
)

SUCCESSION = mutants(
    "dialects/freud/server/topic_lifecycle.py",
    (
        "topics stay charged",
        "        self._quotas.release(marked.creator, TOPICS, 1)\n",
        "",
    ),
    (
        "the notice has id 0",
        "            self._fanout.next_id(topic.name),\n            deletion_notice",
        "            0,\n            deletion_notice",
    ),
    ("the notice names nothing", "deletion_notice(topic.name)", 'deletion_notice(b"")'),
    (
        "a deletion keeps the buffer",
        '        self._delivery.drop_buffer(marked, "topic_deleted")\n',
        "",
    ),
    (
        "a deletion has no end",
        "        self._set_deadline(marked, self._clock() + self._timeout_s)\n",
        "",
    ),
    (
        "a topic without readers stays",
        "        put_and_wake(marked.readers.values(), Range(notice, 0, 1))\n"
        "        self._settle_marked(topic, marked)\n",
        "        put_and_wake(marked.readers.values(), Range(notice, 0, 1))\n",
    ),
    (
        "the first of the marked makes way",
        "        if not topic.marked:\n",
        "        if topic.current is not None or not topic.marked:\n",
    ),
    (
        "a buffer waits forever",
        "            self._set_deadline(current, self._clock() + self._timeout_s)\n",
        "",
    ),
    (
        "push readers do not count when it goes live",
        "has_reader = current.readers or self._fanout.subscriber_count(topic.name)",
        "has_reader = current.readers",
    ),
    (
        "the name is not collected",
        "self._fanout.set_collect(topic.name, collect)",
        "self._fanout.set_collect(topic.name, False)",
    ),
    (
        "a buffer is not collected",
        "(bool(current.readers) or buffers)",
        "bool(current.readers)",
    ),
    ("ids go on in the next life", "self._fanout.set_next_id(topic.name, 0)", "pass"),
    (
        "a late buffer is not dropped",
        '        self._delivery.drop_buffer(topic.current, "no_subscriber")\n',
        "",
    ),
)

MOVEMENT = mutants(
    "dialects/freud/server/ephemeral_delivery.py",
    (
        "heard by no peer, and Ok",
        "if not current.readers and not pushed:",
        "if False:",
    ),
    (
        "unheard messages are not counted",
        '            self._counters.count("dropped", "no_subscriber", count)\n',
        "",
    ),
    (
        "push readers hear nothing",
        "if pushed and not self._push(connection, current.name, run.offsets, run.bodies):",
        "if False:",
    ),
    (
        "a blocked produce stays charged",
        "            self._plain.release(current, size)\n            return ProduceResult(WAIT)",
        "            return ProduceResult(WAIT)",
    ),
    (
        "buffers are free",
        "if not self._quotas.charge(current.creator, BYTES, len(run.bodies), trial=run.count > 1):",
        "if False:",
    ),
    (
        "buffers of empty messages are endless",
        "        if current.buffered_messages + run.count > self._limits.max_unread_messages:\n"
        "            return ProduceResult(over_quota(UNREAD))\n",
        "",
    ),
    (
        "a buffer that goes out stays charged",
        "        self._quotas.release(current.creator, BYTES, current.buffered_bytes)\n"
        "        buffered = current.take_buffer()\n",
        "        buffered = current.take_buffer()\n",
    ),
    (
        "a buffer is not pushed",
        "            if not relayed:\n",
        "            if False:\n",
    ),
    (
        "rqueue's own messages are pushed again",
        "            if not relayed:\n",
        "            if True:\n",
    ),
    (
        "a buffer goes to push readers only",
        "        self._put_within_room(current, [messages for messages, _ in buffered])\n",
        "",
    ),
    (
        "pushing late takes ids",
        "        self._fanout.set_next_id(current.name, next_id)\n",
        "",
    ),
    (
        "who lacks room for all gets nothing",
        "        fit = find_fitting(messages, self._quotas.room(account, BYTES), room_messages)\n",
        "        fit = find_fitting(found, -1, room_messages)\n",
    ),
    (
        "what did not fit is not counted",
        '        self._counters.count("dropped", BYTES, fit.too_large)\n',
        "",
    ),
    (
        "what were too many is not counted",
        '        self._counters.count("dropped", UNREAD, fit.too_many)\n',
        "",
    ),
    (
        "what fits of a batch is free",
        "        self._quotas.charge(account, BYTES, sum(run.size for run in fit.runs), trial=True)\n",
        "",
    ),
    (
        "what fits keeps what does not",
        "return [copy_range(run) for run in fit.runs]",
        "return fit.runs",
    ),
    (
        "no peer is woken by rqueue",
        "                    reader.put(run)\n"
        "        for reader in readers:\n"
        "            reader.wake()\n",
        "                    reader.put(run)\n",
    ),
)

READER = [
    *mutants(
        "dialects/freud/server/pull_reader.py",
        ("last come, first served", "next(iter(self.waiters))", "next(reversed(self.waiters))"),
        (
            "one is served at a time",
            "                first()\n",
            "                first()\n                break\n",
        ),
    ),
    *mutants(
        "dialects/freud/server/ephemeral_delivery.py",
        ("what fits leaves room", "        room_bytes -= size\n", ""),
        (
            "one too large ends it",
            "            too_large += 1\n            continue\n",
            "            return FittingRanges(runs, messages.end - place, 0)\n",
        ),
    ),
    *mutants(
        "dialects/freud/server/topic_lifecycle.py",
        (
            "a buffer swaps what came before it",
            "self.buffer.append(BufferedRange(messages, relayed))",
            "self.buffer.insert(0, BufferedRange(messages, relayed))",
        ),
        ("relayed or not is one", "last.relayed != relayed or ", ""),
        (
            "a released buffer is counted on",
            "self.buffered_bytes = self.buffered_messages = 0\n        return",
            "return",
        ),
    ),
]

SESSION = mutants(
    "dialects/freud/server/session.py",
    ("goes on while it waits", "        self.halt = Halt.WAITING\n", ""),
    ("goes on while it is blocked", "            self.halt = Halt.BLOCKED\n", ""),
    ("who rests once rests forever", "self._scheduler.join(self._on_turn)", "pass"),
    (
        "fan-outs weigh nothing",
        "        self.weight_left -= READER_WEIGHT * self._topics.fan_out_count(run.topic)\n",
        "",
    ),
    (
        "Lists are made for no peer",
        "        if self._is_gone and run.type in READ_ONLY_REQUESTS:\n            return True\n",
        "",
    ),
    (
        "the gone lose their place at once",
        "            self.pipe.retain_slot()\n",
        "            pass\n",
    ),
    ("the gone keep their place", "        self.pipe.release_slot()\n", ""),
    (
        "what the gone left is not finished",
        "        if self._is_gone:\n            self._finish_abandoned()\n",
        "        if self._is_gone:\n            self._leave_bus()\n",
    ),
    ("the gone wait for push readers", "waits=not self._is_gone", "waits=True"),
    (
        "no wait ever ends",
        "            self._timer = self._call_later(max_blocking_s, self._on_get_timeout)",
        "            pass",
    ),
    ("negative is zero", "polls = run.max_blocking_s == 0", "polls = run.max_blocking_s <= 0"),
    (
        "a half-close leaves Gets waiting",
        "polls = run.max_blocking_s == 0 or self.phase != Phase.OPEN",
        "polls = run.max_blocking_s == 0",
    ),
    (
        "a half-close ends no wait",
        "        self._change_phase(PhaseEvent.HALF_CLOSE)\n"
        "        if self.halt == Halt.WAITING:\n            self._on_get_timeout()\n",
        "        self._change_phase(PhaseEvent.HALF_CLOSE)\n",
    ),
    (
        "a half-close never closes",
        "            self._change_phase(PhaseEvent.DRAINED)\n"
        "            self._broker.finish(self._connection)",
        "            pass",
    ),
    (
        "a half-close closes at once",
        "        self._change_phase(PhaseEvent.HALF_CLOSE)\n",
        "        self._change_phase(PhaseEvent.HALF_CLOSE)\n"
        "        self._broker.finish(self._connection)\n",
    ),
    (
        "gone, and it still gets",
        "return self._is_gone or self._get(run)",
        "return self._get(run)",
    ),
    (
        "requests of the gone are not done",
        "        self.run()\n        # Requests that were received",
        "        self.pending.clear()\n        # Requests that were received",
    ),
    (
        "what came behind is forgotten",
        "        self.pipe.redeliver()\n        if self.halt == Halt.RESTING:",
        "        if self.halt == Halt.RESTING:",
    ),
    (
        "its subscriptions stay owned",
        "        self._readers.detach(self._requests.readers.values())\n",
        "",
    ),
    (
        "its end is not told",
        "        self._broker.leave(self._connection)\n",
        "",
    ),
    (
        "the dead wait on",
        "        self._stop_waiting()\n        # A resting session",
        "        # A resting session",
    ),
    (
        "a woken Get takes all there is",
        "weight := self.answer_messages(run, reader, 1)",
        "weight := self.answer_messages(run, reader, run.unanswered)",
    ),
    ("a woken connection stops", "        self._call_soon(self._resume)\n", ""),
    ("a woken connection pushes in", "self._call_soon(self._resume)", "self._resume()"),
    (
        "the end of a subscription is an empty message",
        "            self.answer_gets(run, Code.DOESNT_EXIST, 1)\n",
        "            self.answer_gets(run, Code.OK, 1)\n",
    ),
    (
        "a batch over quota fails whole",
        "if kind is OutcomeKind.OVER_QUOTA and run.count > 1:",
        "if False:",
    ),
    (
        "halves in the wrong order",
        "[run.part(middle, run.count), run.part(0, middle)]",
        "[run.part(0, middle), run.part(middle, run.count)]",
    ),
    (
        "a blocked produce is answered",
        "            self.halt = Halt.BLOCKED\n            return False\n",
        "            self.answer_produced(run, 0)\n            return True\n",
    ),
    (
        "oversized does not close",
        "            if run.closes:",
        "            if False:",
    ),
    (
        "malformed is not counted",
        '            self._broker.counters.count("refused", f"malformed_{run.reason}")\n',
        "",
    ),
    (
        "closed, and it goes on",
        "                self._change_phase(PhaseEvent.CLOSE)\n",
        "",
    ),
    (
        "behind a wait it is read without end",
        "        self.pipe.pause_reading()\n        # While reading",
        "        # While reading",
    ),
    (
        "hanging up is not noticed while paused",
        "        self.pipe.watch_hangup(self.on_hangup)\n",
        "",
    ),
    (
        "it is never read from again",
        "        self.pipe.resume_reading()\n        # A half-closed",
        "        # A half-closed",
    ),
    ("a stall is not watched", "        self._broker.watch_stall(self._connection)\n", ""),
    (
        "a stall that is over is held against it",
        "        self._broker.end_stall(self._connection)\n        self.answers.on_drained()\n",
        "        self.answers.on_drained()\n",
    ),
)

ANSWERING = [
    *mutants(
        "dialects/freud/server/request_executor.py",
        ("unsubscribing frees nothing", "        self._topics.unsubscribe(reader)\n", ""),
        (
            "refusals are not booked",
            "        if outcome.kind is OutcomeKind.NO:\n",
            "        if False:\n",
        ),
        ("quotas are booked twice", " and outcome.text not in QUOTAS:", ":"),
        ("Lists weigh nothing", "return NAME_WEIGHT * self._topics.known_count", "return 0"),
    ),
    *mutants(
        "dialects/freud/server/fair_scheduler.py",
        (
            "those behind the first are forgotten",
            "        if self._resting:\n            self._call_soon(self._serve)\n",
            "",
        ),
        (
            "all who rest take a share each",
            "        if len(self._resting) == 1:\n            self._call_soon(self._serve)\n",
            "        self._call_soon(self._serve)\n",
        ),
    ),
    *mutants(
        "dialects/freud/server/session.py",
        ("what is owed is not told", "self.answers.unsent_bytes", "0"),
    ),
    *mutants(
        "bus/stall_monitor.py",
        (
            "who never reads is never cut",
            '            self._cut(connection, "slow_consumer")',
            "            pass",
        ),
        ("cut without a window", ">= self._limits.slow_consumer_timeout_s:", ">= 0:"),
        ("the host's queue is not looked at", " + connection.pipe.unconfirmed_bytes()", ""),
        (
            "pauses of the bus count for clients",
            "        for connection in self._windows:\n",
            "        for connection in ():\n",
        ),
        (
            "a window lasts forever",
            "            self._windows[connection] = StallWindow(now_s, owed)",
            "            pass",
        ),
    ),
    *mutants(
        "bus/delivery.py",
        (
            "who was passed by hears nothing more",
            "                self._fanout.attach(connection.number, topic)\n",
            "                pass\n",
        ),
        ("what the full have lost is not counted", "            lost += len(ends) - 1\n", ""),
        (
            "waits twice",
            "        if connection.blocked_by is not None:\n            return  #",
            "        if False:\n            return  #",
        ),
    ),
    *mutants(
        "transports/stream_connection.py",
        (
            "what came before a break is lost",
            "            self._read_rest()\n",
            "            pass\n",
        ),
    ),
    *mutants(
        "dialects/rqueue/server/session.py",
        (
            "whole messages overtake PARTs",
            "            if routed.stop == FRAGMENTS_FIRST and not self._connection.is_closed:\n"
            "                continue\n",
            "",
        ),
    ),
]

ALL = [
    *(LIFECYCLE + TOPICS + READERS + SUCCESSION + MOVEMENT + READER),
    *(SESSION + ANSWERING),
]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-freud"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
