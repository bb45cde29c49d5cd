"""A model of a GSB bus, written from the specification.

It has names, open calls and the packets sent to each peer, but no time and no back-pressure.
Packets are tuples. Ids of the bus are its count of calls, in hexadecimal.
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
    """`sent[peer]` are the packets for a peer, in order."""

    names: dict[str, int] = field(default_factory=dict)
    calls: dict[str, OpenCall] = field(default_factory=dict)
    sent: dict[int, list[Sent]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    opened: int = 0
    unknown_replies: int = 0
    unknown_cancels: int = 0

    def join(self, peer: int) -> None:
        self.sent[peer] = []

    def register(self, peer: int, name: str) -> None:
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
            self.names[name] = peer
        self._send(peer, "register_reply", code)

    def unregister(self, peer: int, name: str) -> None:
        code = 0 if self.names.get(name) == peer else 404
        if code == 0:
            del self.names[name]
        self._send(peer, "unregister_reply", code)

    def call(self, peer: int, address: str, request_id: str, data: bytes) -> None:
        code = self._refusal(peer, address, request_id)
        if code:
            self._fail(peer, request_id, code)
            return
        place = without_node(address)
        if place == "sys/ping":
            self.opened += 1
            self._send(peer, "call_reply", request_id, 0, FULL, data)
            return
        service = self._find(place)
        if service is None:
            self._fail(peer, request_id, 404)
            return
        self.opened += 1
        call_id = f"{self.opened:x}"
        self.calls[call_id] = OpenCall(peer, request_id, service)
        self._send(service, "call_request", call_id, data, "local:anonymous", place)

    def reply(self, peer: int, call_id: str, code: int, kind: int, data: bytes) -> None:
        call = self.calls.get(call_id)
        if call is None or call.service != peer:
            self.unknown_replies += 1
            return
        if kind == FULL:
            del self.calls[call_id]
        self._send(call.caller, "call_reply", call.request_id, code, kind, data)

    def cancel(self, peer: int, request_id: str) -> None:
        call_ids = [
            call_id
            for call_id, call in self.calls.items()
            if (call.caller, call.request_id) == (peer, request_id)
        ]
        if not call_ids:
            self.unknown_cancels += 1
            return
        call = self.calls.pop(call_ids[0])
        self._send(call.service, "cancel", call_ids[0])
        self._fail(peer, request_id, 499)

    def leave(self, peer: int) -> None:
        self.gone.add(peer)
        self.names = {name: owner for name, owner in self.names.items() if owner != peer}
        for call_id, call in list(self.calls.items()):
            if call.service == peer:
                del self.calls[call_id]
                self._fail(call.caller, call.request_id, 503)
        for call_id, call in list(self.calls.items()):
            if call.caller == peer:
                del self.calls[call_id]
                self._send(call.service, "cancel", call_id)

    def _refusal(self, peer: int, address: str, request_id: str) -> int:
        if not 0 < len(request_id.encode()) <= 255:
            return 400
        mine = [call.request_id for call in self.calls.values() if call.caller == peer]
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
            peer = self.names.get("/".join(segments[:count]))
            if peer is not None:
                return peer
        return None

    def _fail(self, peer: int, request_id: str, code: int) -> None:
        self._send(peer, "failure", request_id, code)

    def _send(self, peer: int, *packet: object) -> None:
        if peer not in self.gone:
            self.sent[peer].append(packet)


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
