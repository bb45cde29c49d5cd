"""ZMTP 3.0 without security, as bytes: a DEALER's side (rfc.zeromq.org/spec/23).

with RawPeer(port) as peer:
    peer.send(frame(MORE, b""))          # any frames, also incomplete ones
"""

from __future__ import annotations

import socket
import time
from typing import Final

from tests.rig.closing import Closing

MORE, LONG, COMMAND = 1, 2, 4
SHORT_BYTES: Final = 255
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
# How a ROUTER's READY ends: its last property is an empty Identity.
READY_ENDS: Final = b"\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
PIECE: Final = 65536


def frame(flags: int, data: bytes) -> bytes:
    if len(data) <= SHORT_BYTES:
        return bytes([flags, len(data)]) + data
    return bytes([flags | LONG]) + len(data).to_bytes(8, "big") + data


def message(*frames: bytes) -> bytes:
    """A whole message, in an envelope of one empty frame, as a REQ socket sends it."""
    *before, last = (b"", *frames)
    return b"".join(frame(MORE, one) for one in before) + frame(0, last)


def ready(socket_type: bytes = b"DEALER") -> bytes:
    properties = _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    return frame(COMMAND, b"\x05READY" + properties)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


class RawPeer(Closing):
    """A connection that has done a DEALER's handshake; the caller sends the rest."""

    def __init__(self, port: int, timeout_s: float = 20.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self.send(GREETING + ready())
        self._wait_for(READY_ENDS)

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError once the bus has cut the connection."""
        self._socket.sendall(data)

    def is_cut(self, timeout_s: float) -> bool:
        """Return whether the bus closes the connection in time. Discards received bytes."""
        end_s = time.monotonic() + timeout_s
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                if not self._socket.recv(PIECE):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _wait_for(self, end: bytes) -> None:
        heard = b""
        while not heard.endswith(end):
            piece = self._socket.recv(PIECE)
            if not piece:
                raise ConnectionResetError("the bus ended it before it began")
            heard += piece
