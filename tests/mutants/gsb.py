"""Mutants of GSB's server and client. Their tests must fail for each.

    python tests/mutants/gsb.py [--unit | --live] [part of a mutant's name ...]

The procedure is that of bus.py. `unit` runs in memory; `live` is a real server with plain
sockets. Mutants of the compiled rules of calls are in gsb_calls.py.
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
        "tests/unit/gsb/ya",
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
        "a hang-up releases no names",
        'Packets that it has sent are still handled."""\n        self.services.unregister_all(peer)',
        'Packets that it has sent are still handled."""',
    ),
    (
        "a closed connection releases no names",
        "        self.services.unregister_all(peer)\n        if",
        "        if",
    ),
    ("closed peers are pinged", "self.pings.peers.pop(peer, None)", "pass"),
    ("a closed peer still blocks others", "        self.pressure.remove(peer)\n", ""),
    ("a lost caller cancels nothing", 'caller went away", cancel=True)', 'x", cancel=False)'),
    (
        "a cancel does not reach the service",
        'Code.CANCELLED, "cancelled by the caller", cancel=True',
        'Code.CANCELLED, "cancelled by the caller", cancel=False',
    ),
    ("unknown cancels are not counted", 'self.counters.count("refused", "unknown_cancel")', "pass"),
    (
        "an oversized reply does not end its call",
        '                call, StatusCode.TOO_LARGE, "a reply is larger than max_packet_bytes", cancel=True\n',
        '                call, StatusCode.TOO_LARGE, "x", cancel=True\n            ) if False else (\n',
    ),
    (
        "the deadline of a hello is ignored",
        "(hello.deadline_ms or self._limits.deadline_ms)",
        "self._limits.deadline_ms",
    ),
    ("the credits of a hello are ignored", "peer.credits = hello.credits", "pass"),
    ("every peer is pinged", "        if hello.ping:\n", "        if True:\n"),
)

PRESSURE = mutants(
    "dialects/gsb/server/back_pressure.py",
    (
        "services of a caller with room are not resumed",
        "self._resume_service(call)\n        # Copied",
        "pass\n        # Copied",
    ),
    (
        "waiting calls get no credit when the caller has room",
        "        for call in waiting_calls:\n            self.grant(call)\n",
        "",
    ),
    (
        "waiters are not resumed",
        "        self.resume_waiters(peer)\n\n    def resume_waiters",
        "\n    def resume_waiters",
    ),
    (
        "an ended call of a full caller still halts its service",
        "        if call.caller.full:\n            self._resume_service(call)",
        "        pass",
    ),
    (
        "the end of a call does not resume its service",
        "            call.endpoint.schedule_retry()\n\n    def wait",
        "            pass\n\n    def wait",
    ),
    (
        "a full caller's calls get credit",
        "        if call.caller.full:\n            call.caller.awaiting_credit",
        "        if False:\n            call.caller.awaiting_credit",
    ),
    (
        "the clock runs without credit",
        "                call.stop_clock(now_s)\n",
        "                pass\n",
    ),
    ("the clock stays stopped", "        call.resume_clock(now_s)\n", ""),
    (
        "services with credits are halted",
        "        if not call.endpoint.credits:\n            call.endpoint.full_calls += 1",
        "        if True:\n            call.endpoint.full_calls += 1",
    ),
)

REST = [
    *mutants(
        "dialects/gsb/server/service_registry.py",
        (
            "any peer registers",
            "if not self._broker.policy.allows(peer.connection.pipe.identity, CREATE",
            "if False and (peer, CREATE",
        ),
        (
            "a name is registered twice",
            "        if name in self._by_name:\n",
            "        if False:\n",
        ),
        ("one name too many", "if len(peer.services) >= self", "if len(peer.services) > self"),
        (
            "any connection may unregister a name",
            "peer.services.pop(name, None) is None",
            "peer.services.pop(name, name) is None",
        ),
        ("cached routes stay valid", "        self._table.generation += 1\n", "        pass\n"),
        (
            "a node id in an address is ignored",
            "        if node is not None and node != self._network.node_id:\n",
            "        if False:\n",
        ),
        (
            "any peer calls",
            "if not self._allows_call(peer.connection.pipe.identity, name, service):",
            "if False:",
        ),
        (
            "rules apply to methods only",
            "{name, service.id if service else name}",
            "{name}",
        ),
        (
            "rules apply to services only",
            "{name, service.id if service else name}",
            "{service.id if service else name}",
        ),
        (
            "changed rules do not apply to cached routes",
            "        broker.policy.on_change(self.invalidate_routes)\n",
            "",
        ),
    ),
    *mutants(
        "dialects/gsb/server/call_router.py",
        (
            "deadlines are checked once",
            "        if nearest_s is not None:\n",
            "        if False:\n",
        ),
    ),
    *mutants(
        "dialects/gsb/server/peer_liveness.py",
        (
            "a halted peer counts as silent",
            "                peer.heard_s = now_s\n",
            "                pass\n",
        ),
        (
            "pings every tick",
            "self._limits.ping_idle_s and not peer.pinged",
            "self._limits.ping_idle_s",
        ),
        (
            "silent peers are not closed",
            'self._broker.cut(peer.connection, "ping_timeout")',
            "pass",
        ),
        (
            "a slow peer that blocks no other is closed",
            "            window = window._replace(held_s=now_s)\n",
            "            pass\n",
        ),
        ("stuck peers are not closed", 'self._broker.cut(peer.connection, "stuck")', "pass"),
        (
            "progress of a slow peer is ignored",
            "or taken - window.taken_bytes >= MIN",
            "or taken - window.taken_bytes < 0 and MIN",
        ),
        (
            "waiting callers do not count as blocked",
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
            "one batch is committed per tick",
            "            self._broker.turn.call_soon(self._continue_flush)\n",
            "",
        ),
        ("pending log records are not bounded", "        if dropped > 0:\n", "        if False:\n"),
        (
            "dropped log records are not counted",
            'self._broker.counters.count("dropped", "audit_overflow", dropped)',
            "pass",
        ),
        (
            "refused calls are logged before earlier ones",
            "        self._collect()  # keeps",
            "        pass  # keeps",
        ),
        (
            "addresses are not escaped",
            "json.dumps(call.address) if not call.service else",
            "f'\"{call.address}\"' if True else",
        ),
    ),
    *mutants(
        "dialects/gsb/server/session.py",
        ("a second hello is accepted", "        if not self.is_first:\n", "        if False:\n"),
        (
            "a closed connection keeps its names",
            "(self.connection, reason)\n        self._calls.leave(self)\n",
            "(self.connection, reason)\n",
        ),
        (
            "no packet is read after an oversized one",
            "            self.is_open = True\n            self.is_first",
            "            self.is_first",
        ),
    ),
    *mutants(
        "dialects/gsb/server/session.py",
        ("a halted session is read", "        self._pipe.pause_reading()\n", ""),
        ("hang-ups are not noticed", "        self._pipe.watch_hangup(self._on_hangup)\n", ""),
        (
            "unread time is not counted",
            "            self.unread_s += self.broker.now_s() - self.halted_since_s\n",
            "",
        ),
        (
            "a session resumes despite full callers",
            "must_wait = self.full_calls and not self.draining",
            "must_wait = False",
        ),
        (
            "large packets are not offered again",
            "            if self.finish_large():\n",
            "            if True:\n",
        ),
        ("received bytes are not redelivered at the end", "        self._pipe.redeliver()\n", ""),
        (
            "received bytes are drained twice",
            "        if self._is_drained:\n            return\n",
            "",
        ),
    ),
    *mutants(
        "dialects/gsb/server/control_requests.py",
        (
            "a denied broadcast succeeds",
            "OK_STATUS if connection.source.denied == denied else refused",
            "OK_STATUS",
        ),
        (
            "a blocked broadcast succeeds",
            "        if routed.stop == BLOCKED:",
            "        if False:",
        ),
        (
            "uncommitted bytes are not bounded",
            "if not pending or pending + size <= limit or self._session.draining:",
            "if True:",
        ),
        ("a commit does not resume the session", "        self._session.schedule_retry()\n", ""),
    ),
    *mutants(
        "dialects/gsb/server/sender_tracker.py",
        (
            "broadcasts have no sender",
            "            encoding.caller = caller\n",
            "            pass\n",
        ),
        (
            "the sender stays set after a broadcast",
            '                encoding.caller = b""\n',
            "                pass\n",
        ),
        (
            "rows do not wait for commits in flight",
            "if topic is None or not topic.in_flight:",
            "if True:",
        ),
        (
            "rows wait for later commits too",
            "waiting[0][0] < next(iter(topic.in_flight))",
            "False",
        ),
        (
            "senders of unread messages are tracked",
            "if message_id and self.has_push_reader(name):",
            "if message_id:",
        ),
        (
            "senders of read messages are kept",
            "            del topic.known[number]\n",
            "            pass\n",
        ),
        ("known senders are not bounded", "if len(topic.known) > MAX_KNOWN:", "if False:"),
        ("rows of one read have one sender", "if topic is None or not topic.known:", "if True:"),
    ),
    *mutants(
        "durable/push_readers.py",
        (
            "senders are forgotten before the slowest reader",
            "min([tail.at_id, *needed])",
            "tail.at_id",
        ),
    ),
    *mutants(
        "dialects/gsb/server/control_requests.py",
        ("replies overtake pending ones", "        if self._slots:\n", "        if False:\n"),
        (
            "sent replies stay charged",
            "self._pending_bytes -= self._slots.popleft().weight",
            "self._slots.popleft()",
        ),
    ),
    *mutants(
        "dialects/gsb/server/oversized_packet.py",
        (
            "a truncated request id is kept",
            "if name == ADDRESS or size <= self._max_kept:",
            "if True:",
        ),
        (
            "oversized packets of any kind are skipped",
            "            if number not in SKIPPED:\n",
            "            if False:\n",
        ),
        (
            "repeated request ids are joined",
            "text = self._texts[name] = bytearray()",
            "text = self._texts.setdefault(name, bytearray())",
        ),
        (
            "unknown fields are entered as messages",
            "number in self._kinds:",
            "True:",
        ),
        ("fields of an earlier kind are kept", "            self._texts.clear()\n", ""),
        (
            "the size of oversized data is not recorded",
            "            self.data_bytes = size\n",
            "            pass\n",
        ),
        (
            "a field may extend beyond its message",
            "if not self._inner_left and (self._held or self._value_left):",
            "if False:",
        ),
        (
            "a truncated oversized packet is accepted",
            "if self._inner_left or self._held or self._value_left or not self.kind:",
            "if False:",
        ),
        (
            "a request id need not be UTF-8",
            "            self.request_id.decode()\n",
            "            pass\n",
        ),
    ),
    *mutants(
        "dialects/gsb/server/session.py",
        ("a full subscriber gets broadcasts", "if self._session.full or", "if"),
        (
            "lost broadcasts are not counted",
            'self._counters.count("dropped", "subscriber_full", lost)',
            "pass",
        ),
    ),
    *mutants(
        "dialects/gsb/sp.py",
        ("any greeting is accepted", "    if not GREETING.startswith(data):", "    if False:"),
    ),
    *mutants(
        "dialects/gsb/service_address.py",
        (
            "sys may be registered",
            'RESERVED = frozenset({"local", "net", BUILT_IN})',
            'RESERVED = frozenset({"local", "net"})',
        ),
        (
            "a node id may be registered",
            "    if is_node_id(first):\n        raise",
            "    if False:\n        raise",
        ),
        ("names may have any length", "    if len(name) > MAX_SERVICE_BYTES:\n", "    if False:\n"),
        (
            "addresses resolve to whole names only",
            '        name = name.rpartition("/")[0]\n',
            "        return None\n",
        ),
        ("/net/ needs no node id", "        if not is_node_id(node):\n", "        if False:\n"),
    ),
]

CLIENT = [
    *mutants(
        "dialects/gsb/client/stream_connection_pool.py",
        (
            "a stream connection outlives its client",
            "if self._closed:  # while it",
            "if False:  # while it",
        ),
    ),
    *mutants(
        "dialects/gsb/client/service_registration.py",
        (
            "an unregistered name is still retried",
            "if not connection.is_up or self._retried.get(service_id) is not connection:",
            "if not connection.is_up:",
        ),
        (
            "a taken name cannot be unregistered",
            "return self._retried.pop(service_id, None) is not None",
            "return False",
        ),
        ("a taken name is not retried", "if again and code == StatusCode.CONFLICT:", "if False:"),
    ),
    *mutants(
        "clients/reconnector.py",
        (
            "a denied reconnect is not retried",
            "except (NotConnected, Denied) as",
            "except NotConnected as",
        ),
    ),
    *mutants(
        "transports/stream_listener.py",
        (
            "hang-ups are not watched",
            "self._lost, options.hangups)",
            "self._lost, None)",
        ),
    ),
]

YA = [
    *mutants(
        "dialects/gsb/ya/session.py",
        ("a second hello is ignored", "raise BadFrame(gsb_codec.SECOND_HELLO)", "pass"),
        (
            "an oversized first packet is skipped",
            "        if self.is_first:\n            raise",
            "        if False:\n            raise",
        ),
        (
            "instance ids of all users are one",
            "key = (self._pipe.identity.name, instance)",
            'key = ("", instance)',
        ),
        ("its clients are not pinged", "self._calls.pings.peers[self] = None", "pass"),
        (
            "calls without a reply have the client's id",
            "        if request.no_reply:\n            request_id",
            "        if False:\n            request_id",
        ),
        (
            "calls without a reply get one",
            "        if request_id.startswith(NO_REPLY):\n            return\n",
            "",
        ),
        (
            "calls without a reply stay open",
            "            self._calls.table.end(call, StatusCode.OK)\n",
            "            pass\n",
        ),
        (
            "a failing service there has not failed",
            "        if reply.code:\n",
            "        if False:\n",
        ),
        (
            "services get the names of here",
            "self._registered_as[name] + call.address.decode()[len(name) :]",
            "call.address.decode()",
        ),
        (
            "replies of the bus are sent twice",
            "        self.send(codec.frame(pb.Packet(call_reply=reply)))\n",
            "        self.send(2 * codec.frame(pb.Packet(call_reply=reply)))\n",
        ),
        (
            "pings are not answered",
            "                self.send(codec.frame(pb.Packet(pong=pb.Pong())))\n",
            "                pass\n",
        ),
        (
            "instance ids have any length",
            "        if len(instance) > codec.MAX_INSTANCE_BYTES:\n",
            "        if False:\n",
        ),
    ),
    *mutants(
        "dialects/gsb/ya/codec.py",
        (
            "codes of replies are any",
            "code if code in known else StatusCode.BAD_REQUEST",
            "code",
        ),
        (
            "refusals are failures",
            "pb.CALL_BAD_REQUEST if is_refusal else pb.CALL_FAILURE",
            "pb.CALL_FAILURE",
        ),
        ("failures of the bus have no code", '        text = f"{code} {text}"\n', "        pass\n"),
        (
            "a key of a failure's map must be hashable",
            "except (ValueError, TypeError):",
            "except ValueError:",
        ),
        ("long failures are not cut", "bytes(memoryview(data)[:MAX_FAILURE_BYTES])", "bytes(data)"),
    ),
    *mutants(
        "dialects/gsb/ya/ya_address.py",
        (
            "local names may be public",
            "        if name.startswith(PUBLIC):\n",
            "        if False:\n",
        ),
        (
            "addresses of nodes keep their names",
            'f"{NET}{node}{slash}{PUBLIC}{name}" if name else address',
            "address",
        ),
        (
            "any path is a name",
            '    if address.startswith("/"):\n        raise',
            "    if False:\n        raise",
        ),
    ),
]

ALL = [*CALLS, *PRESSURE, *REST, *CLIENT, *YA]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-gsb"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
