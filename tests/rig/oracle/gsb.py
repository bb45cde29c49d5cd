"""What a bus with GSB must do, written from the spec in the most obvious way.

Without time and without pressure: who has registered what, which calls are open, and what
each party is sent. Packets are tuples; ids of the bus are its count of calls, in hex.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SEGMENTS = re.compile(r"[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})*")
NODE = re.compile(r"0x[0-9a-f]{40}")
FULL, PARTIAL = 0, 1

Sent = tuple[object, ...]


@dataclass
class OpenCall:
    caller: int
    request_id: str
    service: int


@dataclass
class GsbBus:
    """`sent[party]` are the packets for a party, in their order."""

    names: dict[str, int] = field(default_factory=dict)
    calls: dict[str, OpenCall] = field(default_factory=dict)
    sent: dict[int, list[Sent]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    opened: int = 0
    unknown_replies: int = 0
    unknown_cancels: int = 0

    def join(self, party: int) -> None:
        self.sent[party] = []

    def register(self, party: int, name: str) -> None:
        if (
            not is_name(name)
            or name.split("/")[0] in ("local", "net", "sys")
            or NODE.fullmatch(name.split("/")[0])
        ):
            code = 400
        elif name in self.names:
            code = 409
        else:
            code = 0
            self.names[name] = party
        self._send(party, "register_reply", code)

    def unregister(self, party: int, name: str) -> None:
        code = 0 if self.names.get(name) == party else 404
        if code == 0:
            del self.names[name]
        self._send(party, "unregister_reply", code)

    def call(self, party: int, address: str, request_id: str, data: bytes) -> None:
        code = self._refusal(party, address, request_id)
        if code:
            self._fail(party, request_id, code)
            return
        place = without_node(address)
        if place == "sys/ping":
            self.opened += 1
            self._send(party, "call_reply", request_id, 0, FULL, data)
            return
        service = self._find(place)
        if service is None:
            self._fail(party, request_id, 404)
            return
        self.opened += 1
        call_id = f"{self.opened:x}"
        self.calls[call_id] = OpenCall(party, request_id, service)
        self._send(service, "call_request", call_id, data, "local:anonymous", place)

    def reply(self, party: int, call_id: str, code: int, kind: int, data: bytes) -> None:
        call = self.calls.get(call_id)
        if call is None or call.service != party:
            self.unknown_replies += 1
            return
        if kind == FULL:
            del self.calls[call_id]
        self._send(call.caller, "call_reply", call.request_id, code, kind, data)

    def cancel(self, party: int, request_id: str) -> None:
        found = [
            call_id
            for call_id, call in self.calls.items()
            if (call.caller, call.request_id) == (party, request_id)
        ]
        if not found:
            self.unknown_cancels += 1
            return
        call = self.calls.pop(found[0])
        self._send(call.service, "cancel", found[0])
        self._fail(party, request_id, 499)

    def leave(self, party: int) -> None:
        self.gone.add(party)
        self.names = {name: owner for name, owner in self.names.items() if owner != party}
        for call_id, call in list(self.calls.items()):
            if call.service == party:
                del self.calls[call_id]
                self._fail(call.caller, call.request_id, 503)
        for call_id, call in list(self.calls.items()):
            if call.caller == party:
                del self.calls[call_id]
                self._send(call.service, "cancel", call_id)

    def _refusal(self, party: int, address: str, request_id: str) -> int:
        if not 0 < len(request_id.encode()) <= 255:
            return 400
        mine = [call.request_id for call in self.calls.values() if call.caller == party]
        if request_id in mine:
            return 409
        place = without_node(address)
        if place is None or not is_name(place):
            return 400
        is_elsewhere = address.startswith("/net/") or NODE.fullmatch(address.split("/")[0])
        if is_elsewhere or (place.split("/")[0] == "sys" and place != "sys/ping"):
            return 404
        return 0

    def _find(self, place: str | None) -> int | None:
        segments = (place or "").split("/")
        for count in range(len(segments), 0, -1):
            found = self.names.get("/".join(segments[:count]))
            if found is not None:
                return found
        return None

    def _fail(self, party: int, request_id: str, code: int) -> None:
        self._send(party, "failure", request_id, code)

    def _send(self, party: int, *packet: object) -> None:
        if party not in self.gone:
            self.sent[party].append(packet)


def is_name(text: str) -> bool:
    return len(text) <= 255 and SEGMENTS.fullmatch(text) is not None


def without_node(address: str) -> str | None:
    """The service's part of an address; None if it has none."""
    if address.startswith("/local/"):
        return address[len("/local/") :]
    if address.startswith("/net/"):
        node, _, rest = address[len("/net/") :].partition("/")
        return rest if NODE.fullmatch(node) else None
    first, _, rest = address.partition("/")
    return rest if NODE.fullmatch(first) else address
