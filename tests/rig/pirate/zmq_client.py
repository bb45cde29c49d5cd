"""A pirate client of bare pyzmq, that sends any given frames.

    bare = Bare(endpoint, b"a")
    bare.hello()
    bare.ask(wire.counted(wire.PUT, b"a", bare.epoch, 7, "orders", b"x"))    # ("OK", 7, 1)
    bare.put("orders", b"x")             # with its own counter, sent again until answered

Each request has a number before the empty frame, so a late answer to an earlier one is
known, and dropped. It keeps its state in memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Self

import zmq

from tests.rig.closing import Closing
from tests.rig.pirate import wire
from tests.rig.pirate.wire import Answer, Frames

TRY_S = 0.25  # of one try, where requests are sent again
GROWTH, MOST_TRY_S = 1.5, 5.0
PATIENCE_S = 60.0
LONG_S = 900.0  # a run of minutes shall not fail because a machine stands still for one


class NoAnswer(Exception):
    """No answer arrived in time."""


class Bare(Closing):
    @classmethod
    def introduced(cls, endpoint: str, name: str, try_s: float = 0.1) -> Self:
        """One that has its epoch, and tries again soon, for as long as it takes."""
        bare = cls(endpoint, name.encode(), try_s=try_s, patience_s=LONG_S)
        bare.hello()
        return bare

    def __init__(
        self,
        endpoint: str,
        client: bytes,
        *,
        try_s: float = TRY_S,
        patience_s: float = PATIENCE_S,
        curve: Sequence[bytes] | None = None,
    ) -> None:
        """`curve` are its public and secret key, and the public one of the bus."""
        self.client = client
        self.epoch = 0
        self.counter = 0
        self.lasts: dict[str, int] = {}
        self.sent_again = 0
        self._endpoint = endpoint
        self._try_s, self._patience_s = try_s, patience_s
        self._curve = curve
        self._context = zmq.Context()
        self._number = random.getrandbits(63)
        self._socket = self._open()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    # --- as it comes

    def send(self, message: Sequence[bytes]) -> None:
        """Send any frames as one message."""
        self._socket.send_multipart(list(message))

    def receive(self, timeout_s: float) -> Frames | None:
        """Return the next message with its envelope."""
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return None
        return self._socket.recv_multipart()

    def once(self, request: Sequence[bytes], timeout_s: float) -> Frames | None:
        """The answer's frames, without the envelope; none if it does not come in time."""
        self._number += 1
        envelope = [wire.number(self._number), b""]
        self.send([*envelope, *request])
        end_s = time.monotonic() + timeout_s
        while (message := self.receive(end_s - time.monotonic())) is not None:
            if message[:2] == envelope:
                return message[2:]
        return None

    def ask(self, request: Sequence[bytes]) -> Answer:
        """Send a request once. Raises NoAnswer if there is no answer."""
        frames = self.once(request, self._patience_s)
        if frames is None:
            raise NoAnswer(f"no answer to {request[:2]}")
        return wire.read_answer(frames)

    # --- as a client does

    def insist(self, request: Sequence[bytes]) -> Answer:
        """Send a request again, on a new socket each time, until it is answered.

        Each try waits longer, because a busy machine may never answer in the time of the first.
        """
        end_s, try_s = time.monotonic() + self._patience_s, self._try_s
        while (frames := self.once(request, try_s)) is None:
            try_s = min(try_s * GROWTH, max(MOST_TRY_S, self._try_s))
            if time.monotonic() > end_s:
                raise NoAnswer(f"no answer to {request[:2]} in {self._patience_s:g} s")
            self.sent_again += 1
            self._socket.close()
            self._socket = self._open()
        return wire.read_answer(frames)

    def hello(self) -> Answer:
        """Get an epoch, and continue from the highest known counter."""
        answer = self.insist(wire.hello(self.client, random.getrandbits(64)))
        _, self.epoch, counter = answer  # type: ignore[assignment]
        self.counter = max(self.counter, counter)  # type: ignore[call-overload]
        return answer

    def put(self, topic: str, *body: bytes) -> Answer:
        """Put a message in these frames; a frame that is too large is split."""
        cut = [part for one in body for part in wire.in_frames(one)]
        return self._counted(wire.PUT, topic, *cut)

    def sub(self, topic: str) -> Answer:
        answer = self._counted(wire.SUB, topic)
        if answer[0] == "OK":
            self.lasts[topic] = max(self.lasts.get(topic, 0), _number(answer[2]))
        return answer

    def unsub(self, topic: str) -> Answer:
        answer = self._counted(wire.UNSUB, topic)
        if answer[0] == "OK":
            self.lasts.pop(topic, None)
        return answer

    def get(self, topic: str) -> Answer:
        last = self.lasts.get(topic, 0)
        answer = self.insist(wire.get(self.client, self.epoch, topic, last))
        if answer[0] == "MSG":
            self.lasts[topic] = _number(answer[1])
        return answer

    def delivered(self) -> None:
        """Do nothing: `get` has recorded the message."""

    def mark(self) -> dict[str, Any]:
        """Return no fields: this client is never restarted."""
        return {}

    def _counted(self, op: bytes, topic: str, *body: bytes) -> Answer:
        self.counter += 1
        request = wire.counted(op, self.client, self.epoch, self.counter, topic, *body)
        return self.insist(request)

    def _open(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        if self._curve is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self._curve
        socket.connect(self._endpoint)
        return socket


def _number(found: object) -> int:
    assert isinstance(found, int)
    return found
