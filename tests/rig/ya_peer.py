"""A client of the deployed GSB framing on a blocking socket (tests/rig/ya_wire.py).

with connect(bus.address("gsb+ya")) as service, connect(bus.address("gsb+ya")) as caller:
    assert service.register("/local/echo") == 0
    caller.send(call("/local/echo", "1", b"data"))
    request = service.next(CALL)
    service.send(reply(request.text(3), b"answer"))
    assert caller.next(REPLY).data(4) == b"answer"
"""

from __future__ import annotations

import socket
import ssl

from polybus.model.address import Address
from tests.rig import ya_wire
from tests.rig.closing import Closing
from tests.rig.gsb_peer import READ_BYTES, HungUp, open_socket
from tests.rig.ya_wire import HELLO, Frames, Packet


class YaPeer(Closing):
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._frames = Frames()
        self._packets: list[Packet] = []

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def packet(self) -> Packet:
        while not self._packets:
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise HungUp
            self._packets = self._frames.feed(data)
        return self._packets.pop(0)

    def next(self, kind: int) -> Packet:
        """Return the next packet, which must be of this kind."""
        packet = self.packet()
        assert packet.kind == kind, packet
        return packet

    def request(self, kind: int, name: str) -> int:
        """Send a request without an id. Returns the code of its reply."""
        self.send(ya_wire.frame(kind, {1: name}))
        return self.next(kind + 1).number(1)

    def register(self, service_id: str) -> int:
        return self.request(ya_wire.REGISTER, service_id)

    def wait_for_end(self) -> None:
        """Read until the bus closes the connection."""
        try:
            while True:
                self.packet()
        except (HungUp, ConnectionResetError):
            return

    def close(self) -> None:
        self.socket.close()


def dial(address: Address, *, small: bool = False, tls: bool = False) -> YaPeer:
    """Connect without a hello. `small` shrinks the receive buffer."""
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return YaPeer(open_socket(address, small=small, tls=context))


def connect(
    address: Address, *, instance: bytes = b"", small: bool = False, tls: bool = False
) -> YaPeer:
    """Connect and exchange hellos."""
    peer = dial(address, small=small, tls=tls)
    peer.send(ya_wire.hello(instance))
    assert peer.next(HELLO).text(1) == "polybus"
    return peer
