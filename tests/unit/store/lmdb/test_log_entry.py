"""Encoding of log entries, and detection of damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import Damaged
from polybus.store.lmdb import log_entry
from polybus.store.lmdb.log_entry import LogEntry, StagePart

NUMBER = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(0, 2**32 - 1)
PARTS = st.lists(st.builds(StagePart, st.integers(0, 2**64 - 1), NUMBER, NUMBER), max_size=60)
ENTRIES = st.builds(
    lambda kind, topic, shard, first, count, charged, runs, parts: LogEntry(
        kind, topic, shard, first, count, charged, runs * 24, tuple(parts)
    ),
    st.integers(0, 255), SMALL, SMALL, NUMBER, NUMBER, NUMBER,
    st.binary(max_size=60), PARTS,
)  # fmt: skip


@given(ENTRIES, st.binary(max_size=50), st.binary(max_size=10))
def test_encoded_entry_is_decoded(entry: LogEntry, block: bytes, more: bytes) -> None:
    found = log_entry.decode(memoryview(log_entry.encode(entry, block) + more))
    assert found[:8] == entry[:8]
    assert all(isinstance(part, StagePart) for part in found.parts)
    assert found.block(memoryview(log_entry.encode(entry, block))) == block


@given(ENTRIES, st.data())
def test_flipped_bit_in_the_head_is_damage(entry: LogEntry, data: st.DataObject) -> None:
    raw = bytearray(log_entry.encode(entry))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        log_entry.decode(bytes(raw))


@given(ENTRIES, st.data())
def test_truncated_entry_is_damage(entry: LogEntry, data: st.DataObject) -> None:
    raw = log_entry.encode(entry, b"block")
    with pytest.raises(Damaged):
        log_entry.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])
