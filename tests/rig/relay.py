"""A TCP relay between a client and a bus that breaks connections on request.

with Relay(bus_port) as relay:
    connect(relay.port)
    relay.cut()        # both ends of every connection are reset
    relay.hold()       # forwards no bytes until `release`
    relay.hold_answers()    # forwards requests, holds the bytes of the bus
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from threading import Event, Lock, Thread

from tests.rig.closing import Closing

PIECE = 65536
# On close the kernel sends a reset and discards unsent bytes.
ABRUPTLY = struct.pack("ii", 1, 0)


class Relay(Closing):
    def __init__(
        self, port: int, host: str = "127.0.0.1", *, change: Callable[[bytes], bytes] = bytes
    ) -> None:
        """`change` returns the replacement of a piece, in either direction."""
        self._target = (host, port)
        self._change = change
        self._lock = Lock()
        self._open: set[socket.socket] = set()
        self._requests, self._answers = Event(), Event()
        self.release()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            _reset(end)

    def hold(self) -> None:
        self._requests.clear()
        self._answers.clear()

    def hold_answers(self) -> None:
        self._answers.clear()

    def release(self) -> None:
        self._requests.set()
        self._answers.set()

    def close(self) -> None:
        _reset(self._listener)
        self.release()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                _reset(near)
                continue
            for end in (near, far):  # forward also small pieces at once
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
                self.connections += 1
            for way in ((near, far, self._requests), (far, near, self._answers)):
                Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, flows: Event) -> None:
        try:
            while piece := source.recv(PIECE):
                flows.wait()
                sink.sendall(self._change(piece))
        except OSError:
            pass
        with self._lock:
            self._open -= {source, sink}
        _reset(source)
        _reset(sink)


def _reset(end: socket.socket) -> None:
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPTLY)
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()
