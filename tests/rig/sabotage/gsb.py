"""Sabotages of GSB's calls."""

from __future__ import annotations

from tests.rig.patching import Patch

CALLS = "dialects/gsb/server/call_router.py"
FAIL_SERVED = "            self.fail(call, StatusCode.UNAVAILABLE, lost, cancel=False)\n"

SABOTAGES = [
    # Calls of a service that went away are dropped without an answer.
    Patch(
        "gone-off",
        CALLS,
        FAIL_SERVED,
        "            self.table.end(call, StatusCode.UNAVAILABLE)\n",
    ),
    # No call reaches its deadline.
    Patch(
        "deadlines-off",
        "dialects/gsb/server/call_router.py",
        "        if due_s < NEVER:\n",
        "        if False:\n",
    ),
    # Services are not notified of a cancelled call.
    Patch(
        "cancel-off",
        CALLS,
        "        if cancel and not call.endpoint.gone:\n",
        "        if False:\n",
    ),
    # Replies that belong to no call are not counted.
    Patch(
        "late-off",
        CALLS,
        '        self.counters.count("dropped", "unknown_call")\n',
        "        pass\n",
    ),
    # No peer is ever full.
    Patch(
        "pressure-off",
        "dialects/gsb/server/back_pressure.py",
        "        peer.full = True\n",
        "        return\n",
    ),
    # A second call with an open request id is not answered.
    Patch(
        "ids-off",
        CALLS,
        "        if refusal in COUNTED:\n",
        "        if refusal == Refusal.ID_IN_USE:\n            return\n        if refusal in COUNTED:\n",
    ),
    # Packets of any size are handled.
    Patch(
        "sizes-off",
        CALLS,
        "            max_packet_bytes=limits.max_packet_bytes,\n",
        "            max_packet_bytes=1 << 40,\n",
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
    # A call from another node is checked with the key of the neighbour that has sent it.
    Patch(
        "signature-off",
        "dialects/gsb/network/network.py",
        "            origin.key = self._keys.key_for(announced)\n",
        "            neighbour = self.topology.get(next(iter(self.links)))\n"
        "            origin.key = self._keys.key_for(neighbour or announced)\n",
    ),
    # A call from another node may be repeated.
    Patch(
        "replays-off",
        "dialects/gsb/network/call_keys.py",
        "            key = CallKey(",
        '            key = type("AnyCall", (CallKey,), {"accept": lambda *_: True})(',
    ),
    # Calls are relayed beyond the last hop.
    Patch(
        "hops-off",
        CALLS,
        "            max_hops=MAX_HOPS,\n",
        "            max_hops=MAX_HOPS + 1,\n",
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
        "        if service.is_link or is_full_link:\n",
        "        if service.is_link:\n",
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
        CALLS,
        "        self.pressure.wait(service, caller)\n",
        "        self.pressure.wait(service, caller)\n        self.pressure.on_credit(call, 1)\n",
    ),
]
