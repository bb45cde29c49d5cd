"""A peer of GSB's deployed framing, of a bus in memory. Its codec is tests/rig/ya_wire.py."""

from __future__ import annotations

from typing import Any

from polybus.model.identity import ANONYMOUS, Identity
from tests.rig import ya_wire
from tests.rig.memory_bus import MemoryBus
from tests.rig.ya_wire import CALL, HELLO, REPLY, Frames, Packet


class YaMemoryPeer:
    """One connection that has exchanged hellos."""

    def __init__(
        self,
        bus: MemoryBus,
        *,
        identity: Identity = ANONYMOUS,
        appetite: int | None = None,
        instance: bytes = b"",
    ) -> None:
        self.bus = bus
        self.pipe = bus.connect_ya(appetite, identity)
        self.session: Any = self.pipe.session
        self._frames = Frames()
        self._read = 0
        self._packets: list[Packet] = []
        self.send(ya_wire.hello(instance))
        if appetite is None:
            self.hello = self.next(HELLO)

    def send(self, *frames: bytes) -> None:
        self.pipe.deliver(b"".join(frames))
        self.bus.turn()

    def packets(self) -> list[Packet]:
        """Return the packets received since the last call."""
        self.bus.turn()
        data = bytes(self.pipe.taken[self._read :])
        self._read += len(data)
        before, self._packets = self._packets, []
        return before + self._frames.feed(data)

    def next(self, kind: int) -> Packet:
        """Return the next packet, which must be of this kind."""
        packets = self.packets()
        assert packets, f"no packet of kind {kind} arrived"
        self._packets = packets[1:]
        assert packets[0].kind == kind, packets[0]
        return packets[0]

    def request(self, kind: int, name: str) -> int:
        """Send a request without an id. Returns the code of its reply."""
        self.send(ya_wire.frame(kind, {1: name}))
        return self.next(kind + 1).number(1)

    def register(self, service_id: str) -> int:
        return self.request(ya_wire.REGISTER, service_id)

    def call(self, address: str, request_id: str = "1", data: bytes = b"") -> None:
        self.send(ya_wire.call(address, request_id, data))

    def called(self) -> Packet:
        return self.next(CALL)

    def reply(self, call: Packet, data: bytes = b"", code: int = 0, kind: int = 0) -> None:
        self.send(ya_wire.reply(call.text(3), data, code, kind))

    def replies(self) -> list[tuple[str, int, int, bytes]]:
        """Return all received packets, which must be replies: id, code, type, data."""
        packets = self.packets()
        assert {packet.kind for packet in packets} <= {REPLY}, packets
        return [(one.text(1), one.number(2), one.number(3), one.data(4)) for one in packets]

    @property
    def is_read(self) -> bool:
        return self.pipe.reading
