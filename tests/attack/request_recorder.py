"""Records the bytes that a client sends, so that a raw client can send them again.

    with RequestRecorder(port) as recorder:
        client = flight.connect(f"grpc://127.0.0.1:{recorder.port}")
        ...
    recorder.sent

A Flight client needs HTTP/2, protobuf and Arrow; its bytes on a new connection are valid on any
other new connection, too.
"""

from __future__ import annotations

import socket
from threading import Thread
from types import TracebackType
from typing import Self

PIECE = 65536


class RequestRecorder:
    """Relays one connection to a local port. `sent` has the client's bytes so far."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sent = bytearray()
        self._thread = Thread(target=self._relay, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> bytes:
        return bytes(self._sent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self._thread.join()

    def _relay(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # closed without a client
            return
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            answers = Thread(target=_carry, args=(far, near, bytearray()), daemon=True)
            answers.start()
            _carry(near, far, self._sent)
            answers.join()


def _carry(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    try:
        while piece := source.recv(PIECE):
            record += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
