"""Requests that Freud clients send, good and bad, by chance; and groups taken apart again."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from polybus.dialects.freud.server.request_scanner import (
    GetRun,
    Group,
    MalformedFrame,
    ProduceRun,
    RequestScanner,
    SingleRequest,
)
from tests.rig.oracle import freud as oracle

CAP = 400

# --- by chance ---------------------------------------------------------------

# Names that a comparison could confuse: prefixes, another last byte, sizes around the eight
# bytes that are compared at a time, the longest.
NAMES = (
    *(b"a", b"b", b"ab", b"abc", b"abcd", b"1234567", b"12345678", b"12345679", b"123456789"),
    *(b"n" * 254 + b"a", b"n" * 255, "bücher".encode(), "bücheR".encode()),
)
BAD_NAMES = (
    *(b"", b"_", b"_a", b"a,", b"*", b"\0", b"\x1f", b"a\x7f", b"\xc2\x80", b"a\xc2\x85"),
    *(b"\xc2\x9f", b"\xff", b"\xc3", b"\xed\xa0\x80", b"n" * 256, "ü".encode() * 128),
)
IDS = (bytes(16), bytes(15) + b"\1", bytes(range(16)))
WAITS = (0, 1, -1, 2**31 - 1, -(2**31))


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def named(name: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<I", len(name)) + name + rest


alike = st.sampled_from((b"a", b"ab", b"abc"))
names = (
    alike | st.sampled_from(NAMES) | st.text(min_size=1, max_size=9).map(lambda name: name.encode())
)
any_names = st.sampled_from(NAMES + BAD_NAMES) | names | st.binary(max_size=9)
notices = st.builds(
    lambda size, rest: oracle.ESCAPE[:size] + rest, st.integers(6, 13), st.binary(max_size=3)
)
bodies = st.binary(max_size=40) | notices
produces = st.builds(lambda name, body: frame(4, named(name, body)), names, bodies)
# Runs, as they come from clients that pipeline.
runs = st.builds(
    lambda name, contents: b"".join(frame(4, named(name, one)) for one in contents),
    alike | st.sampled_from(NAMES),
    st.lists(bodies, max_size=6),
)
gets = st.builds(
    lambda kind, subscriber, wait, count: frame(kind, subscriber + struct.pack("<i", wait)) * count,
    st.sampled_from((5, 8)),
    st.sampled_from(IDS),
    st.sampled_from(WAITS) | st.integers(-(2**31), 2**31 - 1),
    st.integers(1, 4),
)
others = st.one_of(
    st.builds(
        lambda kind, name: frame(kind, named(name)), st.sampled_from((0, 1, 2, 7)), any_names
    ),
    st.sampled_from(IDS).map(lambda subscriber: frame(3, subscriber)),
    st.just(frame(6, b"")),
)
good = produces | runs | gets | others

# Frames that break a rule, and frames that only seem to. The stream continues after them.
lengths = st.sampled_from((0, 1, 3, 4, 5, 255, 256, CAP, 2**31, 2**32 - 1)) | st.integers(0, 40)
odd = st.one_of(
    st.builds(frame, st.integers(0, 10), st.binary(max_size=30)),
    st.builds(frame, st.integers(0, 2**32 - 1), st.binary(max_size=5)),
    st.builds(frame, st.sampled_from((3, 5, 6, 8)), st.sampled_from(range(14, 23)).map(bytes)),
    st.builds(
        lambda kind, length, rest: frame(kind, struct.pack("<I", length) + rest),
        st.sampled_from((0, 1, 2, 4, 7)),
        lengths,
        st.binary(max_size=20),
    ),
    st.builds(lambda name, body: frame(4, named(name, body)), any_names, bodies),
    st.builds(lambda name, size: frame(4, named(name, bytes(size))), names, st.integers(380, 396)),
)
# Frames that may end the stream.
last = st.one_of(
    st.builds(lambda kind, length: struct.pack("<II", kind, length), st.integers(0, 9), lengths),
    st.builds(
        lambda kind, length: struct.pack("<II", kind, length) + bytes(CAP + 1),
        st.sampled_from((4, 5, 9)),
        st.integers(CAP - 1, CAP + 1),
    ),
    st.binary(max_size=12),
)
streams = st.lists(good | good | odd, max_size=12).map(b"".join)
spoilt = st.tuples(streams, last, streams).map(b"".join)

# --- groups, taken apart -----------------------------------------------------


def scanner(max_frame_bytes: int = CAP) -> RequestScanner:
    return RequestScanner(max_frame_bytes, oracle.is_name)


def columns(offsets: bytes, bodies: bytes) -> list[bytes]:
    ends = array("i", offsets)
    assert (ends[0], ends[-1]) == (0, len(bodies))
    return [bodies[ends[place] : ends[place + 1]] for place in range(len(ends) - 1)]


def ones(groups: Iterable[Group]) -> list[oracle.One]:
    """The requests one by one, as the oracle has them."""
    found: list[oracle.One] = []
    for group in groups:
        match group:
            case ProduceRun():
                contents = columns(group.offsets, group.bodies)
                assert len(contents) == group.count > 0
                found += [oracle.Produce(group.topic, body) for body in contents]
            case GetRun():
                get = oracle.Get(group.subscriber, group.max_blocking_s, group.records)
                found += [get] * group.count
            case SingleRequest():
                found.append(oracle.Request(group.type, group.subject))
            case MalformedFrame():
                found.append(oracle.Malformed(group.reason, group.closes))
    return found


def drip(scanner: RequestScanner, data: bytes, ends: Sequence[int]) -> tuple[int, list[oracle.One]]:
    """Scan `data` as it arrives up to each of `ends`; unread bytes are passed again."""
    found: list[oracle.One] = []
    consumed = 0
    for end in sorted({*(end % (len(data) + 1) for end in ends), len(data)}):
        more = True
        while more:
            scanned = scanner.scan(bytearray(data[:end]), consumed, end)
            consumed += scanned.consumed
            found += ones(scanned.groups)
            more = scanned.more
            assert consumed <= end
            assert scanned.consumed or not more
            if scanned.bad:
                return consumed, found
    return consumed, found
