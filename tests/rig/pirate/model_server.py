"""The model behind a ROUTER: an in-memory pirate server, for tests of clients and of these tools.

    with ModelServer() as server:
        connect(server.endpoint)

It answers at once, and forgets all when it ends. A model that does something wrong, put in
its place, shows whether a test notices.
"""

from __future__ import annotations

import time
from threading import Thread

import zmq

from tests.rig.closing import Closing
from tests.rig.pirate import wire
from tests.rig.pirate.model import Model
from tests.rig.pirate.wire import Answer, Frames

LOOK_MS = 20


class ModelServer(Closing):
    def __init__(self, model: Model | None = None) -> None:
        self.model = model or Model()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._stopping = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stopping:
            if self._socket.poll(LOOK_MS):
                self._answer(self._socket.recv_multipart())

    def _answer(self, message: Frames) -> None:
        if b"" not in message[1:]:
            return
        end = message.index(b"", 1) + 1
        reply = reply_frames(self.model.answer(message[end:]))
        self._socket.send_multipart([*message[:end], *reply])


def reply_frames(answer: Answer) -> Frames:
    word, *rest = answer
    if word == "OK":
        return [b"OK", *(wire.number(one) for one in rest if isinstance(one, int))]
    if word == "ERR":
        return [b"ERR", str(rest[0]).encode(), b"as the model says"]
    if word == "NONE":
        return [b"NONE"]
    identity, body = rest
    assert isinstance(identity, int)
    assert isinstance(body, bytes)
    parts = [body[at : at + wire.MAX_FRAME] for at in range(0, len(body), wire.MAX_FRAME)]
    return [b"MSG", wire.number(identity), wire.number(time.time_ns()), *(parts or [b""])]
