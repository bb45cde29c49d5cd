"""Fuzzes both sides of Freud's wire: input of a client and of a server.

The first two bytes of the input choose the cut and the frame cap; the rest are the bytes that
a connection receives. The invariant, for any input:

- nothing crashes, and no more is consumed than was given;
- the requests, taken out of their groups, are the oracle's, and so are the answers;
- received in two cuts, or byte by byte, it all comes out as received whole;
- framing survives all but oversized frames: after any frame under the cap the next request
  is read.
"""

from __future__ import annotations

from polybus.dialects.freud.client.answer_batch import scan_answers
from tests.property.kernel.freud_requests import drip, frame, scanner
from tests.rig.oracle import freud as oracle
from tests.vectors.freud import MAX_FRAME_BYTES, vectors

CAPS = (MAX_FRAME_BYTES, 30, 0x7FFF_FFFF)
CUT_STEP = 11  # with one byte, cuts reach everywhere in a stream of some frames
MAX_DRIPPED_BYTES = 64  # byte by byte costs the square of the size
PROBE = frame(6, b"")


def target(data: bytes) -> None:
    place, choice = (*data[:2], 0, 0)[:2]
    stream, cap = data[2:], CAPS[choice % len(CAPS)]
    check_requests(stream, cap, place * CUT_STEP)
    check_answers(stream, cap, place * CUT_STEP)
    check_framing(stream, cap)


def check_requests(stream: bytes, cap: int, cut: int) -> None:
    expected = oracle.scan(stream, cap)
    assert drip(scanner(cap), stream, ()) == expected
    assert drip(scanner(cap), stream, [cut]) == expected
    if len(stream) <= MAX_DRIPPED_BYTES:
        assert drip(scanner(cap), stream, range(len(stream))) == expected


def check_answers(stream: bytes, cap: int, cut: int) -> None:
    found, consumed, too_large = [], 0, False
    for end in (cut % (len(stream) + 1), len(stream)):
        if too_large:
            break
        took, batch, too_large = scan_answers(stream, consumed, end, cap)
        consumed += took
        found += [(one.code, one.payload) for one in batch]
    assert (consumed, found, too_large) == oracle.scan_answers(stream, cap)


def check_framing(stream: bytes, cap: int) -> None:
    """Send the input as the payload of one frame, whose type is its first byte."""
    if len(stream) > cap:
        return
    wrapped = frame(stream[0] % 10 if stream else 0, stream[1:])
    _, found = drip(scanner(cap), wrapped + PROBE, ())
    assert (len(found), found[1]) == (2, oracle.Request(6, b""))


FRAMES = [one.frame for sender in ("client", "server") for one in vectors(sender)]
SEEDS = [bytes([len(one) // 2 // CUT_STEP, at % 3]) + one for at, one in enumerate(FRAMES)]
SEEDS += [b"\x05\x00" + one * 3 for one in FRAMES if len(one) < 40]
WORDS = [one for one in FRAMES if len(one) < 60] + [one[:8] for one in FRAMES] + [oracle.RESERVED]
