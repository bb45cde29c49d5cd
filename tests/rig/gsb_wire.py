"""Plain-Python decoding of SP streams and GSB failures, for peers that the tests play."""

from __future__ import annotations

import struct
from typing import NamedTuple

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb.codec import StatusCode
from polybus.errors import BadFrame

LENGTH = struct.Struct(">Q")
# The kinds of packets that a client may send.
FROM_CLIENTS = frozenset(
    {
        "hello",
        "register_request",
        "unregister_request",
        "service_call_request",
        "call_reply",
        "subscribe_request",
        "unsubscribe_request",
        "broadcast_request",
        "ping",
        "pong",
        "cancel",
    }
)


class Failure(NamedTuple):
    code: int
    message: str
    origin: str


def read_failure(data: bytes) -> Failure:
    """Return the failure in the data of a reply with code 500; data of any form is one."""
    try:
        failure = codec.unpack(data)
        return Failure(int(failure["code"]), str(failure["message"]), str(failure["origin"]))
    except Exception:
        return Failure(StatusCode.FAILURE, "the service failed", codec.Origin.SERVICE)


class StreamFrames:
    """Split a stream that arrives in any pieces into payloads.

        frames = StreamFrames(Form.TCP, max_bytes)
        for payload in frames.feed(data): ...

    The greeting is first and is checked. `feed` raises `BadFrame` if the stream is invalid or a
    frame is larger than `max_bytes`.
    """

    def __init__(self, form: sp.Form, max_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._held = bytearray()
        self.greeted = False

    def feed(self, data: bytes) -> list[bytes]:
        self._held += data
        if not self.greeted and not self._greet():
            return []
        payloads, at = [], 0
        while (size := self._whole(at)) is not None:
            at += sp.head_size(self._form)
            payloads.append(bytes(memoryview(self._held)[at : at + size]))
            at += size
        if at:
            del self._held[:at]
        return payloads

    def _greet(self) -> bool:
        sp.check_greeting(bytes(self._held[: len(sp.GREETING)]))
        if len(self._held) < len(sp.GREETING):
            return False
        del self._held[: len(sp.GREETING)]
        self.greeted = True
        return True

    def _whole(self, at: int) -> int | None:
        """Return the size of the payload of the frame at `at`, or None if it is incomplete."""
        have = len(self._held) - at
        if self._form is sp.Form.IPC and have and self._held[at] != sp.IPC_MARK:
            raise BadFrame(sp.BAD_FRAME)
        head = sp.head_size(self._form)
        if have < head:
            return None
        size: int = LENGTH.unpack_from(self._held, at + self._form)[0]
        if size > self._max_bytes:
            raise BadFrame(sp.TOO_LARGE)
        return size if have >= head + size else None
