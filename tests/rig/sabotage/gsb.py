"""Sabotages of GSB's calls. Each also turns the fast path off, which has rules of its own."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch

CALLS = "dialects/gsb/server/call_router.py"
TABLE = "        table = self.table = self.pressure.table\n"
SLOW = Edit(CALLS, TABLE, TABLE + "        table.fast_path_enabled = False\n")
FAIL_SERVED = "            self.fail(call, StatusCode.UNAVAILABLE, lost, cancel=False)\n"

SABOTAGES = [
    # Calls of a service that went away are dropped without an answer.
    Patch(
        "gone-off",
        CALLS,
        FAIL_SERVED,
        "            self.end(call, StatusCode.UNAVAILABLE)\n",
        (SLOW,),
    ),
    # No call reaches its deadline.
    Patch(
        "deadlines-off",
        "dialects/gsb/server/call_router.py",
        "        if due_s < self._table.next_due_s:\n",
        "        if False:\n",
        (SLOW,),
    ),
    # Services are not notified of a cancelled call.
    Patch(
        "cancel-off",
        CALLS,
        "        if cancel and not call.endpoint.gone:\n",
        "        if False:\n",
        (SLOW,),
    ),
    # Replies that belong to no call are not counted.
    Patch(
        "late-off",
        CALLS,
        '            self.counters.count("dropped", "unknown_call")\n            return True\n',
        "            return True\n",
        (SLOW,),
    ),
    # No peer is ever full.
    Patch(
        "pressure-off",
        "dialects/gsb/server/back_pressure.py",
        "        peer.full = True\n",
        "        return\n",
        (SLOW,),
    ),
    # A second call with an open request id replaces the first.
    Patch(
        "ids-off",
        CALLS,
        "        if request_id in caller.calls:\n",
        "        if False:\n",
        (SLOW,),
    ),
    # Packets of any size are handled.
    Patch(
        "sizes-off",
        "dialects/gsb/server/session.py",
        "        self._max_packet_bytes = limits.max_packet_bytes\n",
        "        self._max_packet_bytes = 1 << 40\n",
        (
            SLOW,
            Edit(
                "dialects/gsb/server/back_pressure.py",
                "            max_packet_bytes=limits.max_packet_bytes,\n",
                "            max_packet_bytes=1 << 40,\n",
            ),
        ),
    ),
    # A client of the deployed framing that reconnects does not replace its earlier connection.
    Patch(
        "ya-replace-off",
        "dialects/gsb/ya/session.py",
        "            if earlier is not None and not earlier.gone:\n",
        "            if False:\n",
    ),
    # Failures reach clients of the deployed framing as the bus has them.
    Patch(
        "ya-failures-raw",
        "dialects/gsb/ya/session.py",
        "        if code:\n            code, data = codec.encode_failure(data)\n",
        "        code &= 0xFFFFFFFF\n",
    ),
    # A client of the deployed framing needs no hello.
    Patch(
        "ya-hello-off",
        "dialects/gsb/ya/session.py",
        '        if self.is_first:\n            if kind != "hello":\n',
        '        if kind == "hello":\n            if False:\n',
    ),
    # Connections of the deployed framing end without ending their calls.
    Patch(
        "ya-gone-off",
        "dialects/gsb/ya/session.py",
        "    def _marks_frames(self",
        """    def on_ended(self) -> None:
        self.broker.leave(self.connection)

    def on_half_closed(self) -> bool:
        self.broker.finish(self.connection)
        return True

    def _marks_frames(self""",
    ),
    # A bus that stops closes its connections and answers no open call.
    Patch(
        "stop-answers-no-call",
        "dialects/gsb/server/session.py",
        "        self.calls.stop()\n",
        "        pass\n",
    ),
    # The signature of a call from another node is not checked.
    Patch(
        "signature-off",
        "dialects/gsb/network/call_signer.py",
        "        if not key.matches(call.counter, call.address.encode(), call.data, call.mac):\n",
        "        if False:\n",
        (SLOW,),
    ),
    # A call from another node may be repeated.
    Patch(
        "replays-off",
        "dialects/gsb/network/call_signer.py",
        "        return key.accept(call.counter)\n",
        "        return True\n",
        (SLOW,),
    ),
    # Calls are relayed without end.
    Patch(
        "hops-off",
        "dialects/gsb/network/network.py",
        "        if message.hops >= MAX_HOPS:\n",
        "        if False:\n",
        (SLOW,),
    ),
    # Any number of nodes may link.
    Patch(
        "link-bound-off",
        "dialects/gsb/network/network.py",
        "        return others + len(self.dialled) < self._limits.max_links\n",
        "        return True\n",
    ),
    # A service waits for a node that does not read.
    Patch(
        "full-links-wait",
        CALLS,
        "            if service.is_link or is_full_link:\n",
        "            if service.is_link:\n",
        (SLOW,),
    ),
    # A service waits for credit of another node without end.
    Patch(
        "starved-calls-stay",
        "dialects/gsb/network/network.py",
        "        self._end_starved_calls(now_s)\n",
        "        pass\n",
    ),
    # PARTIALs of relayed calls need no credit.
    Patch(
        "credits-off",
        "dialects/gsb/server/back_pressure.py",
        "        if partial and call.caller.is_link and not has_credit:\n",
        "        if False:\n",
        (SLOW,),
    ),
]
