"""Memory of large columns: reused, never while it is referenced, and bounded."""

from __future__ import annotations

import pytest

from polybus.kernel import column_slab
from polybus.model import run_table
from polybus.model.block import gather
from polybus.model.rows import Rows
from polybus.testing.conformance.sample_blocks import block

LARGE = column_slab.MIN_SLAB_BYTES


@pytest.fixture(autouse=True)
def nothing_kept():
    column_slab.free_kept_slabs()
    yield
    column_slab.free_kept_slabs()


def read(fill: bytes, size: int) -> Rows:
    piece = (block(fill * size).layout(), run_table.make_table(1, 0, 1), 0, 0, 0, 1)
    return gather([piece], max_rows=1, max_bytes=1)


def test_small_columns_are_plain_bytes():
    assert isinstance(read(b"a", LARGE - 1).bodies, bytes)
    assert column_slab.kept_bytes() == 0


def test_large_columns_are_read_only():
    rows = read(b"a", LARGE)
    assert bytes(rows.bodies) == b"a" * LARGE
    assert memoryview(rows.bodies).readonly


def test_memory_is_reused_after_its_last_view():
    rows = read(b"a", 3 * LARGE)
    assert column_slab.kept_bytes() == 0
    del rows
    kept = column_slab.kept_bytes()
    assert kept >= 3 * LARGE
    rows = read(b"b", 3 * LARGE)
    assert column_slab.kept_bytes() == 0
    assert bytes(rows.bodies) == b"b" * (3 * LARGE)


def test_memory_in_use_is_not_reused():
    bodies = read(b"a", LARGE).bodies[5:9]
    others = [read(b"b", LARGE) for _ in range(5)]
    assert bytes(bodies) == b"aaaa"
    assert all(bytes(one.bodies) == b"b" * LARGE for one in others)


def test_small_column_does_not_use_a_large_slab():
    read(b"a", 40 * LARGE)
    kept = column_slab.kept_bytes()
    rows = read(b"b", LARGE)
    assert column_slab.kept_bytes() == kept
    assert len(rows.bodies) == LARGE


@pytest.mark.parametrize("size", [LARGE, 4 << 20, column_slab.KEEP_BYTES])
def test_kept_memory_is_bounded(size):
    reads = [read(b"a", size) for _ in range(max(2, min(100, 2 * column_slab.KEEP_BYTES // size)))]
    reads.clear()
    assert 0 < column_slab.kept_bytes() <= column_slab.KEEP_BYTES


def test_column_over_the_bound_is_not_kept():
    rows = read(b"a", column_slab.KEEP_BYTES + 1)
    assert len(rows.bodies) == column_slab.KEEP_BYTES + 1
    del rows
    assert column_slab.kept_bytes() == 0


def test_kept_memory_can_be_released():
    reads = [read(b"a", LARGE) for _ in range(3)]
    reads.clear()
    assert column_slab.kept_bytes() > 0
    column_slab.free_kept_slabs()
    assert column_slab.kept_bytes() == 0
