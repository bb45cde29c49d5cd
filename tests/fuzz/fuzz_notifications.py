"""Fuzzes the client's side of rqueue's wire: any bytes of a server.

The first byte chooses the cut of the rest. The invariant, for any input:

- nothing crashes, and no more is consumed than was given;
- messages, parts, their order and the reason for the end are the oracle's;
- in two cuts the result is the same as in one piece.
"""

from __future__ import annotations

from tests.property.kernel.test_notifications import CAP, drip, frame, named
from tests.rig.oracle import notifications as oracle


def target(data: bytes) -> None:
    cut, stream = data[:1], data[1:]
    expected = oracle.scan(stream, 0, len(stream), CAP)
    assert expected[0] <= len(stream)
    assert drip(stream, list(cut)) == expected


GOOD = (
    frame(7, named(b"a") + b"content"),
    frame(7, named(b"t" * 255)),
    frame(7, named(b"a") + bytes(CAP - 2)),
    frame(8, named(b"a") + bytes(16) + b"\x00\x00\x00\x02" + b"half"),
    frame(8, named(b"a") + bytes(16) + b"\xff\xfe\xff\xff"),
    frame(9, b"of the future"),
)
SEEDS = [bytes([len(one) // 2]) + one for one in GOOD]
SEEDS.append(b"\x20" + b"".join(GOOD))
WORDS = [*GOOD, *(one[:5] for one in GOOD), *(one[5:11] for one in GOOD)]
