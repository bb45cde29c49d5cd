"""A gate between clients and their server, where a test drops requests and replies.

    with Gate(bus.endpoint) as gate:
        connect(gate.endpoint)
        gate.lose_replies = 1          # the next one; ALL: until it is 0; requests likewise
        gate.requests                  # all requests so far, as frames after the envelope
        gate.again(gate.requests[0])   # sends a late copy; returns the server's answer

The gate drops whole messages, as a broken connection does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from threading import Thread
from typing import Final

import zmq

from tests.rig.closing import Closing

ALL: Final = inf
LOOK_MS: Final = 10
PATIENCE_MS: Final = 20_000


class Gate(Closing):
    def __init__(self, server: str) -> None:
        self.requests: list[list[bytes]] = []
        self.replies: list[list[bytes]] = []
        self.lose_requests: float = 0
        self.lose_replies: float = 0
        self._server = server
        self._stopping = False
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        for socket in (self._front, self._back):
            socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._back.connect(server)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def again(self, request: Sequence[bytes]) -> list[bytes]:
        """Send a late copy of a request on a connection of its own. Returns the answer."""
        with self._context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect(self._server)
            socket.send_multipart(list(request))
            assert socket.poll(PATIENCE_MS), "the server does not answer"
            return socket.recv_multipart()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)

    # --- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._front, self._back):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(LOOK_MS))
            if self._front in ready:
                self._came(self._front.recv_multipart())
            if self._back in ready:
                self._went(self._back.recv_multipart())

    def _came(self, message: list[bytes]) -> None:
        self.requests.append(_content(message))
        if self.lose_requests:
            self.lose_requests -= 1
        else:
            self._back.send_multipart(message)

    def _went(self, message: list[bytes]) -> None:
        self.replies.append(_content(message))
        if self.lose_replies:
            self.lose_replies -= 1
        else:
            self._front.send_multipart(message)


def _content(message: list[bytes]) -> list[bytes]:
    return message[message.index(b"") + 1 :]
