"""Fuzzes rqueue's framing: any bytes of a client.

The first two bytes of the input choose the cut and the frame cap; the rest are the bytes that
a connection receives. The invariant, for any input:

- nothing crashes, and no more is consumed than was given;
- the readers' output, the collected batches, every control frame in its place, and the
  reason for the end are those of the oracle, call by call;
- in two cuts the output is the same as in one piece.
"""

from __future__ import annotations

from tests.property.kernel import frames
from tests.property.kernel.streams import audience, cut, told, whole

CAPS = (frames.SMALL_CAP, frames.LARGE_CAP)
CUT_STEP = 11  # with one byte, cuts reach everywhere in a stream of some frames


def target(data: bytes) -> None:
    place, choice = (*data[:2], 0, 0)[:2]
    stream, max_payload = data[2:], CAPS[choice % len(CAPS)]
    expected = whole(stream, max_payload)
    assert expected.consumed <= len(stream)
    assert told(audience(max_payload), cut(stream, [place * CUT_STEP])) == expected


GOOD = (
    frames.publish(b"a", b"body"),
    frames.publish(b"t" * 255, b""),
    frames.publish(b"unheard", b"body"),
    frames.publish_of_length(b"b", frames.SMALL_CAP),
    frames.publish_of_length(b"b", frames.LARGE_CAP),
    frames.publish_part(b"a", 0, 2, b"half"),
    frames.publish_part(b"a", 65534, 65535, b""),
    frames.subscribe(b"a"),
    frames.remove(b"12345678"),
    frames.DEREGISTER,
)
SEEDS = [
    bytes([len(frame) // 2 // CUT_STEP, cap]) + frame for frame in GOOD for cap in range(len(CAPS))
]
SEEDS.append(b"\x20\x01" + b"".join(GOOD))
WORDS = [*GOOD, *frames.TOPICS, *(frame[:5] for frame in GOOD), *(frame[5:11] for frame in GOOD)]
