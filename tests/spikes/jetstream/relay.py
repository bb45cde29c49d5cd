"""A relay between a client and the server that can lose the server's answers.

That is how an answer is lost in the wild: the request arrives, takes effect, and
the connection breaks before the answer arrives.
"""

from __future__ import annotations

import socket
import threading

CHUNK_BYTES = 1 << 16


class Relay:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._deaf = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def lose_answers(self) -> None:
        """Drop all later answers of the server."""
        self._deaf.set()

    def heal(self) -> None:
        """Stop dropping answers on new connections."""
        self._deaf.clear()

    def close(self) -> None:
        # shutdown wakes a thread that waits in accept or recv; close alone would not.
        for end in [self._listener, *self._sockets]:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            self._start(client, server, answers=False)
            self._start(server, client, answers=True)

    def _start(self, source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        thread = threading.Thread(target=self._pump, args=(source, target, answers), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while chunk := source.recv(CHUNK_BYTES):
                if not (answers and self._deaf.is_set()):
                    target.sendall(chunk)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # one side is gone, and with it this direction
