"""Mutants of the rules of GSB's calls (call_table.pyx). Their tests must fail for each.

    python tests/mutants/gsb_calls.py [part of a mutant's name ...]

The procedure is that of run.py, each mutant is compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import run  # noqa: E402
from tests.rig.patching import patches as mutants  # noqa: E402

TESTS = (
    "tests/unit/gsb/test_calls.py",
    "tests/unit/gsb/test_pressure.py",
    "tests/unit/gsb/test_session.py",
    "tests/unit/gsb/network/test_call_keys.py",
    "tests/unit/gsb/network/test_relayed_calls.py",
    "tests/unit/gsb/ya/test_ya_session.py",
    "tests/property/gsb/test_model.py",
    "tests/property/gsb/test_pressure.py",
)

FRAMES = mutants(
    "dialects/gsb/server/call_table.pyx",
    (
        "the mark of an ipc frame is not checked",
        "            if self.ipc and at[0] != IPC_MARK:\n",
        "            if False:\n",
    ),
    (
        "max_packet_bytes is one byte larger",
        "length > <uint64_t>self.table.max_packet_bytes:",
        "length > <uint64_t>self.table.max_packet_bytes + 1:",
    ),
    (
        "one peer may take all of a turn",
        "if self.slow >= MAX_SLOW and not self.draining:",
        "if False:",
    ),
    (
        "a session that ends yields",
        "if self.slow >= MAX_SLOW and not self.draining:",
        "if self.slow >= MAX_SLOW:",
    ),
    (
        "a waiting packet is dropped",
        "                if not self.packet(at + head, <Py_ssize_t>length, now_s):\n",
        "                if not self.packet(at + head, <Py_ssize_t>length, now_s) and False:\n",
    ),
    (
        "a waiting large packet is dropped",
        "        if done or self.gone:\n            self.large = None",
        "        if True:\n            self.large = None",
    ),
    (
        "the slow path overtakes gathered output",
        "        self.slow += 1\n        self.table.flush()\n",
        "        self.slow += 1\n",
    ),
    ("a hello may come later", "            self.is_first = False\n", "            pass\n"),
)

CALLS = mutants(
    "dialects/gsb/server/call_table.pyx",
    (
        "a full service is called",
        "        if route.service.endpoint.full:\n",
        "        if False:\n",
    ),
    (
        "an empty request id is accepted",
        "if not 0 < PyBytes_GET_SIZE(request_id) <=",
        "if not PyBytes_GET_SIZE(request_id) <=",
    ),
    (
        "request ids may have 256 bytes",
        "<= MAX_REQUEST_ID_BYTES:",
        "<= MAX_REQUEST_ID_BYTES + 1:",
    ),
    (
        "an id is used twice",
        "        if PyDict_GetItem(self.calls, request_id) is not NULL:\n",
        "        if False:\n",
    ),
    (
        "one call too many",
        "PyDict_Size(self.calls) >= self.table.max_open_calls",
        "PyDict_Size(self.calls) > self.table.max_open_calls",
    ),
    (
        "routes stay when names have changed",
        "        if self.generation != self.table.generation:\n",
        "        if False:\n",
    ),
    ("calls are not counted", "        route.service.calls += 1\n", ""),
    ("pending calls are not counted", "        route.service.pending += 1\n", ""),
    ("pending is never decremented", "        call.service.pending -= 1\n", ""),
    (
        "a call of a full caller does not halt its service",
        "            table.router.pressure.halt_service(call)\n",
        "            pass\n",
    ),
    (
        "an earlier deadline does not move the timer",
        "        if now_s + deadline_s < table.next_due_s:\n",
        "        if now_s + deadline_s < table.next_due_s and table.opened == 1:\n",
    ),
    (
        "a call of any size goes over a link",
        "        if data.size + RELAY_BYTES > self.table.max_packet_bytes:\n",
        "        if False:\n",
    ),
)

ENDS = mutants(
    "dialects/gsb/server/call_table.pyx",
    (
        "a call ends twice",
        "!= <PyObject*>call:\n            return False\n",
        "!= <PyObject*>call:\n            return True\n",
    ),
    (
        "closed calls stay in the service's table",
        "        PyDict_DelItem(call.endpoint.serving, call.id)\n",
        "",
    ),
    (
        "any code is counted as it is",
        "if not 0 <= code < CODES or not self.is_code[code]:",
        "if not 0 <= code < CODES:",
    ),
    (
        "the end of a call resumes nothing",
        "            self.router.pressure.on_call_end(call)\n",
        "            pass\n",
    ),
    (
        "accounts count no failures",
        "call.reply_bytes, code != 0)",
        "call.reply_bytes, False)",
    ),
)

REPLIES = mutants(
    "dialects/gsb/server/call_table.pyx",
    ("any reply type is accepted", "        if packet.type > PARTIAL:\n", "        if False:\n"),
    (
        "every reply is forwarded at once",
        "        if not call.can_forward(packet.type == PARTIAL):\n",
        "        if False:\n",
    ),
    ("a PARTIAL ends its call", "        if packet.type == PARTIAL:\n", "        if False:\n"),
    (
        "a PARTIAL does not restart the deadline",
        "        call.restart_clock(now_s)\n",
        "",
    ),
    ("a PARTIAL uses no credit", "            call.credit -= 1\n", "            pass\n"),
    (
        "no credit is granted",
        "            self.table.router.pressure.grant(call)\n",
        "            pass\n",
    ),
    (
        "the clock of a relayed call runs without credit",
        "            if not call.has_credit():\n                call.stop_clock(now_s)\n",
        "            pass\n",
    ),
    (
        "replies of a draining service wait",
        "        if self.endpoint.draining:\n            return True\n        if is_partial",
        "        if is_partial",
    ),
    (
        "credits are unlimited",
        "self.endpoint.credits and self.has_credit())",
        "self.endpoint.credits)",
    ),
    (
        "relayed calls need no credit",
        "        if is_partial and self.caller.is_link and not self.has_credit():\n",
        "        if False:\n",
    ),
    (
        "the outbox has no hard limit",
        "        return self.outbox_bytes <= self.table.hard_limit_bytes\n",
        "        return True\n",
    ),
)

RELAYS = mutants(
    "dialects/gsb/server/call_table.pyx",
    (
        "any form of a relayed call",
        "        if not has_valid_form(packet, self.table.max_hops):\n",
        "        if False:\n",
    ),
    (
        "any run is called",
        "if origin is None or (origin.key is not None and not origin.key.is_for(packet)):",
        "if origin is None:",
    ),
    (
        "calls are not signed",
        "        if origin.key is None or not origin.key.check_call(packet):\n",
        "        if False:\n",
    ),
    (
        "calls are relayed forever",
        "        if packet.hops >= <uint64_t>",
        "        if packet.hops > 9 + <uint64_t>",
    ),
    ("hops are not counted", "        onward.hops += 1\n", ""),
    (
        "a relayed call has the deadline of the link",
        "cdef double deadline_s = packet.deadline_ms / 1000.0",
        "cdef double deadline_s = self.deadline_s",
    ),
    (
        "a relayed call has the free replies of the bus",
        "        call.free_partials = <Py_ssize_t>packet.free_partials\n",
        "",
    ),
    (
        "calls have no account",
        "        call.origin, call.account = origin.identity, origin.account\n",
        "        call.origin = origin.identity\n",
    ),
)

ALL = [*FRAMES, *CALLS, *ENDS, *REPLIES, *RELAYS]

if __name__ == "__main__":
    run.TREE = ROOT / "build" / "mutants-gsb-calls"
    run.PACKAGE = run.TREE / "src" / "polybus"
    run.TESTS = TESTS
    sys.exit(run.main(ALL))
