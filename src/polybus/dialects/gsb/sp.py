"""SP, the stream protocol below GSB: a greeting each way, then frames. No I/O, no clock.

    greeting  =  00 'S' 'P' 00 | protocol u16 | 00 00              (big-endian; PAIR v0: 16)
    frame     =  length u64 | payload                              over TCP and TLS
    frame     =  01 | length u64 | payload                         over Unix sockets (ipc)

It is what nng speaks: `pynng.Pair0(dial=...)` is a peer. One payload is one nng
message, and for GSB one Packet (codec.py). The two ends greet at once; neither
waits for the other.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from polybus.errors import BadFrame

PAIR0 = 16
GREETING = struct.pack(">4sHH", b"\0SP\0", PAIR0, 0)

# Reasons for which a peer is not served, as the counters name them.
BAD_GREETING = "bad_greeting"  # not SP, another version of it, or not PAIR v0
BAD_FRAME = "bad_frame"  # a frame over ipc that does not begin with 01
TOO_LARGE = "too_large"

_LENGTH = struct.Struct(">Q")
IPC_MARK = 1


class Form(IntEnum):
    """What stands before a frame's length: nothing, or the mark of one byte."""

    TCP = 0
    IPC = 1


def frame(payload: bytes, form: Form) -> bytes:
    return b"\1"[: form.value] + _LENGTH.pack(len(payload)) + payload


def head_size(form: Form) -> int:
    return form.value + _LENGTH.size


def check_greeting(data: bytes) -> None:
    """`data` has the 8 bytes of a greeting, or fewer that came so far."""
    if not GREETING.startswith(data):
        raise BadFrame(BAD_GREETING)


class Frames:
    """Payloads out of a stream of bytes that comes in any pieces.

        frames = Frames(Form.TCP, max_bytes)
        for payload in frames.feed(data): ...

    The greeting comes first and is checked. `BadFrame` ends it: the stream cannot be
    understood any more. Nothing over `max_bytes` is ever waited for.
    """

    def __init__(self, form: Form, max_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._held = bytearray()
        self.greeted = False

    def feed(self, data: bytes) -> list[bytes]:
        self._held += data
        if not self.greeted and not self._greet():
            return []
        found, at = [], 0
        while (size := self._whole(at)) is not None:
            at += head_size(self._form)
            found.append(bytes(memoryview(self._held)[at : at + size]))
            at += size
        if at:
            del self._held[:at]
        return found

    def _greet(self) -> bool:
        check_greeting(bytes(self._held[: len(GREETING)]))
        if len(self._held) < len(GREETING):
            return False
        del self._held[: len(GREETING)]
        self.greeted = True
        return True

    def _whole(self, at: int) -> int | None:
        """The size of the payload whose frame begins here, once all of it is there."""
        have = len(self._held) - at
        if self._form is Form.IPC and have and self._held[at] != IPC_MARK:
            raise BadFrame(BAD_FRAME)
        head = head_size(self._form)
        if have < head:
            return None
        size: int = _LENGTH.unpack_from(self._held, at + self._form)[0]
        if size > self._max_bytes:
            raise BadFrame(TOO_LARGE)
        return size if have >= head + size else None
