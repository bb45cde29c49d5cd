"""Strategies for messages and damaged blocks, and the kernel's verdict on them."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from polybus.kernel import blocks as kernel
from polybus.kernel.blocks import Layout
from polybus.model.block import Block
from polybus.testing.conformance import sample_blocks as testing
from tests.rig.oracle import blocks as oracle
from tests.rig.oracle.blocks import Message

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.one_of(
    st.sampled_from(["", "a", "key", "é", "€", "𝄞", "12345678", "1234567é"]), st.text(max_size=12)
).map(lambda text: text.encode())
BODY = st.binary(max_size=20)
PAIRS = st.lists(st.tuples(TEXT, BODY), max_size=3).map(tuple)


@st.composite
def message_lists(draw: st.DrawFn, max_size: int = 20) -> list[Message]:
    """Some lists have keys or headers everywhere, some nowhere, some here and there."""
    key = draw(st.sampled_from([st.none(), TEXT, st.none() | TEXT]))
    headers = draw(st.sampled_from([st.none(), PAIRS, st.none() | PAIRS]))
    one = st.builds(Message, INT64, BODY, key, headers)
    return draw(st.lists(one, min_size=1, max_size=max_size))


def build(messages: list[Message]) -> Block:
    """The kernel's block of them."""
    return testing.block(
        *(one.body for one in messages),
        keys=[None if one.key is None else one.key.decode() for one in messages],
        headers=[
            None if one.headers is None else [(name.decode(), value) for name, value in one.headers]
            for one in messages
        ],
        insertion_ms=[one.insertion_ms for one in messages],
    )


def plain(message: Message) -> tuple[object, ...]:
    """Return a message in the form of polybus.testing.conformance.sample_blocks.contents."""
    key = None if message.key is None else message.key.decode()
    headers = (
        None
        if message.headers is None
        else tuple((name.decode(), value) for name, value in message.headers)
    )
    return (message.insertion_ms, key, message.body, headers)


def verdict(data: bytes) -> str | None:
    """Return the kernel's reason why the data is not a block, or None if it is one."""
    try:
        Layout(data).close()
    except kernel.BadBlock as error:
        return str(error)
    return None


def expected_verdict(data: bytes) -> str | None:
    try:
        oracle.decode(data)
    except oracle.Bad as error:
        return str(error)
    return None


def refitted(data: bytes) -> bytes:
    """The same bytes with the magic, size and checksum that let a reader look further."""
    if len(data) < oracle.HEADER.size:
        return data
    size = struct.pack("<I", len(data))
    return oracle.resealed(oracle.MAGIC + data[8:24] + size + data[28:])
