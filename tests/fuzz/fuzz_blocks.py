"""Fuzzes the parsing of blocks, as from a damaged disk or another program.

The input is parsed as it is, and again with a valid magic, size and checksum, so that the
reader gets past the header. The invariant, for any input:

- nothing crashes, and the verdict, with its reason, is the oracle's;
- an accepted block is canonical: rebuilt from its messages it is the same
  bytes, and so are its cuts put together.
"""

from __future__ import annotations

from polybus.kernel.blocks import Layout, concat, cut
from tests.property.kernel.block_values import build, expected_verdict, refitted, verdict
from tests.rig.oracle import blocks as oracle
from tests.rig.oracle.blocks import Message


def target(data: bytes) -> None:
    judge(data)
    judge(refitted(data))


def judge(data: bytes) -> None:
    found = verdict(data)
    assert found == expected_verdict(data)
    if found is None:
        check_form(data)


def check_form(data: bytes) -> None:
    messages = oracle.decode(data)
    assert oracle.encode(messages) == data
    assert build(messages).data == data
    with Layout(data) as layout:
        middle = layout.count // 2
        if middle:
            halves = cut(layout, 0, middle), cut(layout, middle, layout.count)
            assert concat([Layout(half) for half in halves]) == data


GOOD = (
    [Message(0, b"")],
    [Message(1, b"body"), Message(2, b"more")],
    [Message(1, b"a", b"k"), Message(2, b"b"), Message(3, b"", "é€𝄞".encode())],
    [Message(1, b"a", b""), Message(2, b"b", b"key")],
    [Message(1, b"a", None, ((b"name", b"value"), (b"n", b"")))],
    [Message(1, b"a", None, ()), Message(2, b"b")],
    [Message(at, b"%d" % at, b"k" if at % 3 else None, None if at % 2 else ()) for at in range(17)],
)
SEEDS = [oracle.encode(messages) for messages in GOOD]
WORDS = [
    *(bytes([count, 0, 0, 0]) for count in (0, 1, 2, 3, 8, 9)),
    *(bytes([flags, 0]) for flags in range(16)),
    *(b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", "é".encode()),
]
