"""SP, the stream protocol below GSB: a greeting in each direction, then frames. No I/O, no clock.

    greeting  =  00 'S' 'P' 00 | protocol u16 | 00 00              (big-endian; PAIR v0: 16)
    frame     =  length u64 | payload                              over TCP and TLS
    frame     =  01 | length u64 | payload                         over Unix sockets (ipc)

nng speaks it: `pynng.Pair0(dial=...)` is a peer. One payload is one nng message, and for GSB
one Packet (codec.py). Both ends send their greeting at once; neither waits for the other.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from polybus.errors import BadFrame

PAIR0 = 16
GREETING = struct.pack(">4sHH", b"\0SP\0", PAIR0, 0)

# Reasons for which the bus refuses a peer. They are names of counters.
BAD_GREETING = "bad_greeting"  # not SP, another version of it, or not PAIR v0
BAD_FRAME = "bad_frame"  # an ipc frame that does not begin with 01
TOO_LARGE = "too_large"

_LENGTH = struct.Struct(">Q")
IPC_MARK = 1


class Form(IntEnum):
    """The form of frames; the value is the number of bytes before the length."""

    TCP = 0
    IPC = 1


def frame(payload: bytes, form: Form) -> bytes:
    return b"\1"[: form.value] + _LENGTH.pack(len(payload)) + payload


def head_size(form: Form) -> int:
    return form.value + _LENGTH.size


def check_greeting(data: bytes) -> None:
    """Check the first 8 bytes of a stream, or fewer. Raises `BadFrame` if they are wrong."""
    if not GREETING.startswith(data):
        raise BadFrame(BAD_GREETING)
