"""Mutants of GSB's server and client. Their tests must fail for each.

    python tests/mutants/gsb.py [--unit | --live] [part of a mutant's name ...]

The procedure is that of bus.py. `unit` runs in memory, with and without the fast path; `live`
is a real server with plain sockets.
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
        "tests/unit/gsb/test_calls.py",
        "tests/unit/gsb/test_pressure.py",
        "tests/unit/gsb/test_session.py",
        "tests/unit/gsb/test_topics.py",
        "tests/unit/gsb/test_sp.py",
        "tests/unit/gsb/test_codec.py",
        "tests/property/gsb/test_model.py",
        "tests/property/gsb/test_pressure.py",
    ),
    "live": (
        "tests/faults/test_gsb_bad_input.py",
        "tests/faults/test_gsb_endings.py",
        "tests/interop/test_gsb_log.py",
        "tests/interop/test_gsb_whole_bus.py",
        "tests/unit/gsb/client/test_reconnecting.py",
    ),
}

CALLS = mutants(
    "dialects/gsb/server/call_router.py",
    (
        "names outlive a hang-up",
        'Packets that it has sent are still handled."""\n        self.services.unregister_all(peer)',
        'Packets that it has sent are still handled."""',
    ),
    (
        "names outlive their connection",
        "        self.services.unregister_all(peer)\n        for",
        "        for",
    ),
    ("the gone are pinged", "self.pings.peers.pop(peer, None)", "pass"),
    ("the gone hold others up", "        self.pressure.remove(peer)\n", ""),
    ("a vanished caller cancels nothing", 'caller went away", cancel=True)', 'x", cancel=False)'),
    ("a full service is called", "        if service.full:\n", "        if False:\n"),
    ("pending grows", "        call.service.pending -= 1\n", ""),
    ("calls are not counted", "        call.service.calls += 1\n", ""),
    (
        "cancel is not reported",
        'Code.CANCELLED, "cancelled by the caller", cancel=True',
        'Code.CANCELLED, "cancelled by the caller", cancel=False',
    ),
    ("unknown cancels are not counted", 'self.counters.count("refused", "unknown_cancel")', "pass"),
    (
        "any reply passes",
        "if not self.pressure.can_forward(call, partial=kind == PARTIAL):",
        "if False:",
    ),
    ("a deadline never starts again", "            call.restart_clock(self._clock())\n", ""),
    ("a PARTIAL ends its call", "        if kind == PARTIAL:\n", "        if False:\n"),
    (
        "a large reply ends nothing",
        '                call, StatusCode.TOO_LARGE, "a reply is larger than max_packet_bytes", cancel=True\n',
        '                call, StatusCode.TOO_LARGE, "x", cancel=True\n            ) if False else (\n',
    ),
    ("an empty id is an id", "if not 0 < len(request_id) <=", "if not len(request_id) <="),
    ("ids may be longer", "len(request_id) <= MAX_REQUEST_ID_BYTES:", "len(request_id) <= 256:"),
    ("one call too many", "if len(caller.calls) >= self", "if len(caller.calls) > self"),
    ("any code is counted as it is", "code if code in CODES else StatusCode.FAILURE", "code"),
    ("tables forget nothing", "        call.endpoint.serving.pop(call.id, None)\n", ""),
    (
        "hellos set no deadline",
        "(deadline_ms or self._limits.deadline_ms)",
        "self._limits.deadline_ms",
    ),
    ("hellos give no credits", "peer.credits = keeps_credits", "pass"),
    ("every peer is pinged", "        if pings:\n", "        if True:\n"),
)

PRESSURE = mutants(
    "dialects/gsb/server/back_pressure.py",
    (
        "no peer is let go",
        "self._resume_service(call)\n        waiting_calls",
        "pass\n        waiting_calls",
    ),
    (
        "credit is not granted again",
        "        for call in waiting_calls:\n            self.grant(call)\n",
        "",
    ),
    (
        "waiters wait forever",
        "        self.resume_waiters(peer)\n\n    def resume_waiters",
        "\n    def resume_waiters",
    ),
    (
        "a call of a full caller holds no peer up",
        "        if call.caller.full:\n            self._halt_service(call)",
        "        pass",
    ),
    (
        "an ended call still holds up",
        "        if call.caller.full:\n            self._resume_service(call)",
        "        pass",
    ),
    (
        "an ended call leaves its service waiting",
        '            cast("GsbSession", call.endpoint).schedule_retry()\n\n    def wait',
        "            pass\n\n    def wait",
    ),
    (
        "what came before a hang-up waits",
        "if call.endpoint.draining or not caller.full:",
        "if not caller.full:",
    ),
    ("credits have no end", " and (call.free_left(self.table) or call.credit > 0)\n", "\n"),
    (
        "there is no hard bound",
        "return caller.outbox_bytes <= self._hard_limit_bytes",
        "return True",
    ),
    ("credit is not used up", "call.credit = max(0, call.credit - 1)", "pass"),
    (
        "credit is granted to the full",
        "        if call.caller.full:\n            call.caller.awaiting_credit",
        "        if False:\n            call.caller.awaiting_credit",
    ),
    (
        "the clock runs without credit",
        "                call.stop_clock(now_s)\n",
        "                pass\n",
    ),
    ("the clock stands forever", "        call.resume_clock(now_s)\n", ""),
    (
        "those with credits are held up",
        "    def _halt_service(self, call: Call) -> None:\n        if not call.endpoint.credits:",
        "    def _halt_service(self, call: Call) -> None:\n        if True:",
    ),
)

REST = [
    *mutants(
        "dialects/gsb/server/service_registry.py",
        (
            "any peer registers",
            "if not self._broker.policy.allows(peer.party.pipe.identity, CREATE",
            "if False and (peer, CREATE",
        ),
        ("a name is taken twice", "        if name in self._by_name:\n", "        if False:\n"),
        ("one name too many", "if len(peer.services) >= self", "if len(peer.services) > self"),
        (
            "others' names are unregistered",
            "peer.services.pop(name, None) is None",
            "peer.services.pop(name, name) is None",
        ),
        ("routes are never void", "        self._table.generation += 1\n", "        pass\n"),
        ("other nodes are here", "        if parsed.node is not None:\n", "        if False:\n"),
        (
            "any peer calls",
            "return all(self._broker.policy.allows(identity, CALL, name.encode()) for name in names)",
            "return True",
        ),
        (
            "only methods are judged",
            "{parsed.service, service.id if service else parsed.service}",
            "{parsed.service}",
        ),
        (
            "only services are judged",
            "{parsed.service, service.id if service else parsed.service}",
            "{service.id if service else parsed.service}",
        ),
        (
            "new rules change nothing",
            "        broker.policy.on_change(self._invalidate_routes)\n",
            "",
        ),
    ),
    *mutants(
        "dialects/gsb/server/call_router.py",
        (
            "a shorter deadline is not seen",
            "if due_s < self._table.next_due_s:",
            "if self._table.next_due_s == NEVER:",
        ),
        ("only one look", "        if nearest_s is not None:\n", "        if False:\n"),
    ),
    *mutants(
        "dialects/gsb/server/peer_liveness.py",
        (
            "who is not read is silent",
            "                peer.heard_s = now_s\n",
            "                pass\n",
        ),
        (
            "pings every tick",
            "self._limits.ping_idle_s and not peer.pinged",
            "self._limits.ping_idle_s",
        ),
        ("the silent stay", 'self._broker.cut(peer.party, "ping_timeout")', "pass"),
        (
            "a peer that is slow is cut",
            "            window = window._replace(held_s=now_s)\n",
            "            pass\n",
        ),
        ("no peer is cut", 'self._broker.cut(peer.party, "stuck")', "pass"),
        (
            "progress is not seen",
            "or taken - window.taken_bytes >= MIN",
            "or taken_bytes < 0 and MIN",
        ),
        (
            "peers that wait for a service do not count",
            "if any(waiter is not peer and waiter not in held for waiter in peer.waiters):",
            "if False:",
        ),
    ),
    *mutants(
        "dialects/gsb/server/call_log.py",
        (
            "the log is not flushed",
            "        self._write(self._topic, self._pending[:BATCH])\n",
            "",
        ),
        ("the log is written twice", "        del self._pending[:BATCH]\n", ""),
        (
            "the rest waits for a tick",
            "            self._broker.turn.call_soon(self._continue_flush)\n",
            "",
        ),
        ("nothing is too much", "        self._drop(waiting - MAX_PENDING)\n", ""),
        (
            "dropped in silence",
            'self._broker.counters.count("dropped", "audit_overflow", count)',
            "pass",
        ),
        ("order is lost", "        self._collect()  # keeps", "        pass  # keeps"),
        (
            "addresses are not escaped",
            "json.dumps(call.address) if not call.service else",
            "f'\"{call.address}\"' if True else",
        ),
    ),
    *mutants(
        "dialects/gsb/server/session.py",
        ("a hello may come later", "        if not self.is_first:\n", "        if False:\n"),
        ("any type of reply", "        if kind not in REPLY_TYPES:\n", "        if False:\n"),
        ("marks are not looked at", "if self.ipc and at < end and", "if False and"),
        (
            "a packet one byte too large",
            "if size > self._max_packet_bytes:",
            "if size > self._max_packet_bytes + 1:",
        ),
        (
            "closing leaves names",
            "(self.party, reason)\n        self._calls.leave(self)\n",
            "(self.party, reason)\n",
        ),
        (
            "a skipped packet is the last",
            "            self.is_open = True\n            self.is_first",
            "            self.is_first",
        ),
    ),
    *mutants(
        "dialects/gsb/server/session.py",
        ("who is halted is read", "        self._pipe.pause_reading()\n", ""),
        ("hang-ups are not noticed", "        self._pipe.watch_hangup(self._on_hangup)\n", ""),
        (
            "unread time is not counted",
            "            self.unread_s += self.broker.now_s() - self.halted_since_s\n",
            "",
        ),
        (
            "full callers are forgotten",
            "must_wait = self.full_calls and not self.draining",
            "must_wait = False",
        ),
        (
            "large packets are not offered again",
            "            if self.finish_large():\n",
            "            if True:\n",
        ),
        ("the rest is lost", "        self._pipe.redeliver()\n", ""),
        (
            "an end is dealt with again and again",
            "        if self._is_drained:\n            return\n",
            "",
        ),
        ("negative codes fail", "code & MAX_VARINT", "code"),
    ),
    *mutants(
        "dialects/gsb/server/control_requests.py",
        (
            "a denied broadcast is done",
            "OK_STATUS if source.denied == denied else refused",
            "OK_STATUS",
        ),
        (
            "a blocked broadcast is done",
            "        if routed.stop == BLOCKED:\n            return self._wait_for_reader()",
            "        pass",
        ),
        (
            "anything may be in flight to the disk",
            "return bool(pending) and",
            "return False and",
        ),
        ("who waits for the disk waits forever", "        self._session.schedule_retry()\n", ""),
    ),
    *mutants(
        "dialects/gsb/server/sender_tracker.py",
        (
            "callers are not told",
            "            encoding.caller = caller\n",
            "            pass\n",
        ),
        ("callers stick", '                encoding.caller = b""\n', "                pass\n"),
        (
            "what is read waits for nothing",
            "if topic is None or not topic.in_flight:",
            "if True:",
        ),
        (
            "what is read waits for all that comes",
            "waiting[0][0] < next(iter(topic.in_flight))",
            "False",
        ),
        (
            "what no peer hears is remembered",
            "if message_id and self.has_push_reader(name):",
            "if message_id:",
        ),
        (
            "what was heard is remembered",
            "            del topic.known[number]\n",
            "            pass\n",
        ),
        ("there is no end to it", "if len(topic.known) > MAX_KNOWN:", "if False:"),
        ("all of one read is of one sender", "if topic is None or not topic.known:", "if True:"),
    ),
    *mutants(
        "durable/push_readers.py",
        (
            "who is behind is not told",
            "min([tail.at_id, *needed])",
            "tail.at_id",
        ),
    ),
    *mutants(
        "dialects/gsb/server/control_requests.py",
        ("answers overtake", "        if self._slots:\n", "        if False:\n"),
        (
            "what is settled counts",
            "self.pending_bytes -= self._slots.popleft().weight",
            "self._slots.popleft()",
        ),
    ),
    *mutants(
        "dialects/gsb/server/oversized_packet.py",
        (
            "a part of an id is kept",
            "if name == ADDRESS or size <= self._max_kept:",
            "if True:",
        ),
        ("every kind is skipped", "        if kind not in FIELDS:\n", "        if False:\n"),
        (
            "ids are joined",
            "text = self._texts[name] = bytearray()",
            "text = self._texts.setdefault(name, bytearray())",
        ),
        (
            "what is not known ends it",
            "number in Packet.DESCRIPTOR.fields_by_number:",
            "True:",
        ),
        ("kinds are mixed", "            self._texts.clear()\n", ""),
        ("the data has no size", "            self.data_bytes = size\n", "            pass\n"),
        (
            "fields go beyond what they are part of",
            "if not self._inner_left and (self._held or self._value_left):",
            "if False:",
        ),
        (
            "what ends early is a packet",
            "if self._inner_left or self._held or self._value_left or not self.kind:",
            "if False:",
        ),
        ("any bytes are an id", "            self.request_id.decode()\n", "            pass\n"),
    ),
    *mutants(
        "dialects/gsb/server/session.py",
        ("the full get more", "if self._session.full or", "if"),
        ("lost in silence", 'self._counters.count("dropped", "subscriber_full", lost)', "pass"),
    ),
    *mutants(
        "dialects/gsb/sp.py",
        ("another greeting", "    if not GREETING.startswith(data):", "    if False:"),
    ),
    *mutants(
        "dialects/gsb/service_address.py",
        (
            "sys may be registered",
            'RESERVED = frozenset({"local", "net", BUILT_IN})',
            'RESERVED = frozenset({"local", "net"})',
        ),
        (
            "a node's id may be registered",
            "    if is_node_id(first):\n        raise",
            "    if False:\n        raise",
        ),
        ("names of any length", "    if len(name) > MAX_SERVICE_BYTES:\n", "    if False:\n"),
        (
            "only whole names",
            '        name = name.rpartition("/")[0]\n',
            "        return None\n",
        ),
        ("/net/ needs no id", "        if not is_node_id(node):\n", "        if False:\n"),
    ),
]

CLIENT = [
    *mutants(
        "dialects/gsb/client/stream_connection_pool.py",
        ("a lane outlives its client", "if self._closed:  # while it", "if False:  # while it"),
    ),
    *mutants(
        "dialects/gsb/client/service_registration.py",
        (
            "what is given up is tried on",
            "if not link.is_up or self._retried.get(service_id) is not link:",
            "if not link.is_up:",
        ),
        (
            "what is taken cannot be given up",
            "return self._retried.pop(service_id, None) is not None",
            "return False",
        ),
        ("a taken name is given up", "if again and code == StatusCode.CONFLICT:", "if False:"),
    ),
    *mutants(
        "clients/reconnector.py",
        ("who is forbidden gives up", "except (NotConnected, Denied) as", "except NotConnected as"),
    ),
    *mutants(
        "transports/stream_listener.py",
        (
            "hang-ups are not watched",
            "        connection.hangups = self._options.hangups\n",
            "",
        ),
    ),
]

ALL = [*CALLS, *PRESSURE, *REST, *CLIENT]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-gsb"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
