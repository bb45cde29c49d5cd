"""Fuzzes the client's side of GSB's wire: any bytes of a bus.

The first byte chooses ipc or TCP framing. The invariant, for any input: nothing crashes, and
the packets, the bytes consumed, the size of the frame that has begun and the error are those
of the oracle, which uses the protobuf library.
"""

from __future__ import annotations

from tests.property.kernel.test_gsb_client import CAP, scanned
from tests.rig.oracle import gsb_client as oracle


def target(data: bytes) -> None:
    is_ipc, stream = bool(data[:1] and data[0] & 1), data[1:]
    expected = oracle.scan(stream, 0, len(stream), is_ipc, CAP)
    assert scanned(stream, 0, len(stream), is_ipc) == expected


GOOD = (
    oracle.encode_reply(False, b"17", 0, True, b"data"),
    oracle.encode_reply(False, b"17", 500, False, b"x" * 200),
    b"\0\0\0\0\0\0\0\x12\x82\x01\x0f\x0a\x011\x12\x01d\x1a\x03who\x22\x02at",
    b"\0\0\0\0\0\0\0\x05\x7a\x03\x0a\x01t",
)
SEEDS = [b"\0" + one for one in GOOD] + [b"\1" + b"\1".join((b"", *GOOD))]
WORDS = [*GOOD, *(one[8:] for one in GOOD), b"\0\0\0\0\0\0\0\x05"]
