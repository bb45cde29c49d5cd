"""ZMTP 3.0 without security, as bytes: what a DEALER says to a ROUTER (rfc.zeromq.org/spec/23)."""

from bench.harness.load import Hello

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
# How a ROUTER's READY ends: its last property is an empty Identity.
READY_ENDS = b"\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"


def _frame(flags: int, data: bytes) -> bytes:
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | LONG]) + len(data).to_bytes(8, "big") + data


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def message(*frames: bytes) -> bytes:
    """A whole message, in an envelope of one empty frame, as a REQ socket sends it."""
    *before, last = (b"", *frames)
    return b"".join(_frame(MORE, frame) for frame in before) + _frame(0, last)


def hello() -> Hello:
    ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
    return Hello(GREETING + _frame(COMMAND, ready), until=READY_ENDS)
