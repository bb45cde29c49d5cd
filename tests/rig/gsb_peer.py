"""A GSB peer on a plain blocking socket: a caller, a service, or a client that sends bad input.

SP is implemented here again, from bytes that nng sent; packets are protobuf's. Every read has a
timeout.

    with connect(bus.address("gsb")) as service, connect(bus.address("gsb")) as caller:
        service.register("echo")
        caller.send(call("echo", "1", b"data"))
        request = service.call()
        service.send(reply(request.request_id, b"answer"))
        assert caller.reply().data == b"answer"
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.model.address import Address
from tests.rig.closing import Closing

TIMEOUT_S = 20.0  # only a failing test reaches it
READ_BYTES = 1 << 18
GREETING = b"\0SP\0\0\x10\0\0"
FULL, PARTIAL = 0, 1
# For a peer that reads nothing: a small buffer is full soon.
SMALL_BUFFER_BYTES = 4096


class HungUp(Exception):
    """The bus has closed the connection."""


class Silent(AssertionError):
    """No packet arrived before the timeout."""


# --- packets -----------------------------------------------------------------


def packet(kind: str, **fields: Any) -> bytes:
    packet = pb.Packet()
    message = getattr(packet, kind)
    message.SetInParent()
    for name, value in fields.items():
        setattr(message, name, value)
    return packet.SerializeToString()


def hello(**fields: Any) -> bytes:
    return packet("hello", **fields)


def call(address: str, request_id: str, data: bytes = b"") -> bytes:
    return packet("service_call_request", address=address, request_id=request_id, data=data)


def reply(request_id: str, data: bytes = b"", code: int = 0, kind: int = FULL) -> bytes:
    return packet("call_reply", request_id=request_id, data=data, code=code, type=kind)


def partial(request_id: str, data: bytes = b"") -> bytes:
    return reply(request_id, data, kind=PARTIAL)


def cancel(request_id: str) -> bytes:
    return packet("cancel", request_id=request_id)


class Peer(Closing):
    """One connection."""

    def __init__(self, sock: socket.socket, is_ipc: bool) -> None:
        self.socket = sock
        self._is_ipc = is_ipc
        self._received = b""

    # --- sending

    def frame(self, payload: bytes) -> bytes:
        return b"\1" * self._is_ipc + len(payload).to_bytes(8, "big") + payload

    def send(self, *payloads: bytes) -> None:
        self.socket.sendall(b"".join(map(self.frame, payloads)))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes without a frame. The bus may have closed the connection already."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    # --- receiving

    def greeting(self) -> bytes:
        while len(self._received) < len(GREETING):
            self._receive()
        greeting, self._received = self._received[:8], self._received[8:]
        return greeting

    def packet(self) -> pb.Packet:
        """Return the next packet. Raises `HungUp` if the bus closed the connection."""
        head = 8 + self._is_ipc
        while len(self._received) < head:
            self._receive()
        size = int.from_bytes(self._received[head - 8 : head], "big")
        while len(self._received) < head + size:
            self._receive()
        payload = self._received[head : head + size]
        self._received = self._received[head + size :]
        return pb.Packet.FromString(payload)

    def next(self, kind: str) -> Any:
        """Return the next packet, which must be of this kind."""
        packet = self.packet()
        assert packet.WhichOneof("kind") == kind, packet
        return getattr(packet, kind)

    def reply(self) -> pb.CallReply:
        reply: pb.CallReply = self.next("call_reply")
        return reply

    def call(self) -> pb.CallRequest:
        request: pb.CallRequest = self.next("call_request")
        return request

    def wait_for_end(self) -> None:
        """Read until the bus closes the connection."""
        try:
            while True:
                self._receive()
        except HungUp:
            return

    def _receive(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except TimeoutError:
            raise Silent("no packet before the timeout") from None
        except ConnectionResetError:  # it had not read everything
            raise HungUp from None
        if not data:
            raise HungUp
        self._received += data

    # --- requests and their answers

    def register(self, service_id: str) -> int:
        self.send(packet("register_request", service_id=service_id))
        return int(self.next("register_reply").code)

    def ping(self) -> list[pb.Packet]:
        """Return when the bus has handled everything sent before, with the packets before its pong.

        The bus answers a connection's packets in order, so a packet that is missing from the
        result will not arrive later, unless another connection causes it.
        """
        token = str(time.monotonic_ns()).encode()
        self.send(packet("ping", token=token))
        before = []
        while True:
            received = self.packet()
            if received.WhichOneof("kind") == "pong" and received.pong.token == token:
                return before
            before.append(received)

    def close(self) -> None:
        self.socket.close()


def open_socket(
    address: Address, *, small: bool = False, tls: ssl.SSLContext | None = None
) -> socket.socket:
    """Connect a socket with a timeout. `small` shrinks the receive buffer."""
    family = socket.AF_UNIX if address.is_unix else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    sock.connect(address.path if address.is_unix else (address.host, address.port))
    return sock if tls is None else tls.wrap_socket(sock, server_hostname="localhost")


def connect(
    address: Address,
    *,
    greeting: bytes = GREETING,
    first: bytes | None = None,
    small: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Peer:
    """Connect, greet, and send `first` if it is set. `small` shrinks the receive buffer."""
    peer = Peer(open_socket(address, small=small, tls=tls), address.is_unix)
    peer.send_bytes(greeting)
    if greeting == GREETING:
        assert peer.greeting() == GREETING
    if first is not None:
        peer.send(first)
    return peer
