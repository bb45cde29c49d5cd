"""Record batches to blocks, and rows to record batches."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from polybus.errors import MalformedRequest, TooLarge
from polybus.model import run_table
from polybus.model.arrow import (
    HEADERS_TYPE,
    MAX_SHARED_NULLS,
    PRODUCE_SCHEMA,
    READ_SCHEMA,
    batch_of,
    block_of,
)
from polybus.model.block import MAX_BLOCK_BYTES, Block, BlockSlice, gather
from polybus.model.rows import EMPTY, Rows
from polybus.testing.conformance.sample_blocks import block, contents

NOW = 99
KEYS = ["k", None, "é", None]
BODIES = [b"a", b"", b"ccc", b"dd"]
TIMES = [1, None, -3, 4]
HEADERS = [None, [("h", b"v"), ("h", b"")], [], [("ü", b"\xff")]]
EXPECTED = block(
    *BODIES,
    keys=KEYS,
    headers=HEADERS,
    insertion_ms=[NOW if time is None else time for time in TIMES],
)


def produced(**changes: object) -> pa.RecordBatch:
    values = {"shard_key": KEYS, "body": BODIES, "insertion_ms": TIMES, "headers": HEADERS}
    columns = [
        pa.array(values[field.name], field.type)
        if field.name not in changes
        else changes[field.name]
        for field in PRODUCE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, names=PRODUCE_SCHEMA.names)


def rows_of(made) -> Rows:
    piece = BlockSlice(
        made.layout(), run_table.make_table(10, 500, made.count), 7, 3, 0, made.count
    )
    return gather([piece], max_rows=100, max_bytes=1 << 20)


def test_a_batch_becomes_a_block():
    assert block_of(produced(), NOW) == EXPECTED


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("end", range(1, 5))
def test_a_slice_of_a_batch_becomes_the_slice_of_the_block(start, end):
    if start < end:
        assert block_of(produced()[start:end], NOW) == EXPECTED.slice(start, end)


def test_columns_after_the_body_may_be_missing():
    assert block_of(produced().select(["shard_key", "body"]), NOW) == block(
        *BODIES, keys=KEYS, insertion_ms=NOW
    )


def test_columns_of_nulls_cost_nothing():
    empty = {
        "shard_key": pa.nulls(4, pa.utf8()),
        "insertion_ms": pa.nulls(4, pa.int64()),
        "headers": pa.nulls(4, HEADERS_TYPE),
    }
    assert block_of(produced(**empty), NOW) == block(*BODIES, insertion_ms=NOW)


def test_names_of_a_map_s_fields_do_not_matter():
    kind = pa.map_(pa.field("name", pa.utf8(), nullable=False), pa.field("content", pa.binary()))
    assert block_of(produced(headers=pa.array(HEADERS, kind)), NOW) == EXPECTED


def test_bytes_hidden_by_nulls_are_left_out():
    offsets = struct.pack("<5i", 0, 1, 6, 8, 9)
    keys = pa.Array.from_buffers(
        pa.utf8(),
        4,
        [pa.py_buffer(b"\x05"), pa.py_buffer(offsets), pa.py_buffer("khiddeéx".encode())],
    )
    assert block_of(produced(shard_key=keys), NOW) == EXPECTED


def test_maps_that_nulls_hide_are_left_out():
    pairs = pa.StructArray.from_arrays(
        [pa.array(["hidden", "h", "h", "ü"]), pa.array([b"x", b"v", b"", b"\xff"])],
        fields=[HEADERS_TYPE.key_field, HEADERS_TYPE.item_field],
    )
    buffers = [pa.py_buffer(b"\x0e"), pa.py_buffer(struct.pack("<5i", 0, 1, 3, 3, 4))]
    headers = pa.Array.from_buffers(HEADERS_TYPE, 4, buffers, children=[pairs])
    assert block_of(produced(headers=headers), NOW) == EXPECTED


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("shard_key", pa.array(KEYS, pa.large_utf8())),
        ("shard_key", pa.array([b"k", None, b"x", None], pa.binary())),
        ("shard_key", pa.array(KEYS).dictionary_encode()),
        ("shard_key", pa.nulls(4)),
        ("shard_key", pa.array([b"\xff", None, b"x", None]).view(pa.utf8())),
        ("body", pa.array(BODIES, pa.large_binary())),
        ("body", pa.array(["a", "b", "c", "d"])),
        ("body", pa.array([b"a", None, b"c", b"d"])),
        ("insertion_ms", pa.array([1, 2, 3, 4], pa.int32())),
        ("insertion_ms", pa.array([1, 2, 3, 4], pa.timestamp("ms"))),
        ("headers", pa.array([None] * 4, pa.map_(pa.utf8(), pa.utf8()))),
        ("headers", pa.array([None] * 4, pa.map_(pa.large_utf8(), pa.binary()))),
        ("headers", pa.array([[("h", None)], None, None, None], HEADERS_TYPE)),
        ("headers", pa.array([["h"], None, None, None])),
    ],
)
def test_a_wrong_column_is_named(name, column):
    with pytest.raises(MalformedRequest, match=f"^{name}"):
        block_of(produced(**{name: column}), NOW)


def test_header_names_are_utf8():
    pairs = pa.StructArray.from_arrays(
        [pa.array([b"\xff"]).view(pa.utf8()), pa.array([b"v"])],
        fields=[HEADERS_TYPE.key_field, HEADERS_TYPE.item_field],
    )
    offsets = pa.py_buffer(struct.pack("<5i", 0, 1, 1, 1, 1))
    headers = pa.Array.from_buffers(HEADERS_TYPE, 4, [None, offsets], children=[pairs])
    with pytest.raises(MalformedRequest, match=r"^headers"):
        block_of(produced(headers=headers), NOW)


def test_missing_unknown_and_doubled_columns_are_named():
    batch = produced()
    for name in ("shard_key", "body"):
        others = [other for other in batch.schema.names if other != name]
        with pytest.raises(MalformedRequest, match=f"^{name}: .* missing"):
            block_of(batch.select(others), NOW)
    with pytest.raises(MalformedRequest, match=r"^extra"):
        block_of(batch.append_column("extra", pa.array([1] * 4)), NOW)
    with pytest.raises(MalformedRequest, match=r"^body: .* several"):
        block_of(batch.append_column("body", pa.array(BODIES)), NOW)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(MalformedRequest, match="no rows"):
        block_of(produced()[:0], NOW)


ASTRAY = [(0, 2, 1, 3, 4), (0, 1, 2, 3, 99), (-1, 1, 2, 3, 4)]


def lying(
    name: str, kind: pa.DataType, cuts: tuple[int, ...], validity: bytes | None
) -> pa.RecordBatch:
    """pyarrow validates batches that it builds, so the bytes are changed afterwards."""
    offsets = bytearray(struct.pack("<5i", 0, 1, 2, 3, 4))
    bits = None if validity is None else pa.py_buffer(validity)
    buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(b"abcd")]
    batch = produced(**{name: pa.Array.from_buffers(kind, 4, buffers)})
    offsets[:] = struct.pack("<5i", *cuts)
    return batch


@pytest.mark.parametrize("cuts", ASTRAY)
@pytest.mark.parametrize("validity", [None, b"\x05"])
def test_keys_whose_offsets_lead_astray_are_refused(cuts, validity):
    with pytest.raises(MalformedRequest):
        block_of(lying("shard_key", pa.utf8(), cuts, validity), NOW)


@pytest.mark.parametrize("cuts", ASTRAY)
def test_bodies_whose_offsets_lead_astray_are_refused(cuts):
    with pytest.raises(MalformedRequest):
        block_of(lying("body", pa.binary(), cuts, None), NOW)


def test_too_much_for_a_block_is_said():
    body = pa.array([bytes(MAX_BLOCK_BYTES)])
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, pa.utf8()), body], names=["shard_key", "body"])
    with pytest.raises(TooLarge):
        block_of(batch, NOW)


def test_rows_become_a_batch():
    batch = batch_of(rows_of(EXPECTED))
    batch.validate(full=True)
    assert batch.schema == READ_SCHEMA
    assert batch.to_pydict() == {
        "id": [10, 11, 12, 13],
        "shard": [3] * 4,
        "offset": [7, 8, 9, 10],
        "timestamp_ns": [500] * 4,
        "insertion_ms": [1, NOW, -3, 4],
        "shard_key": KEYS,
        "body": BODIES,
        "headers": HEADERS,
    }


def test_rows_without_keys_and_headers_become_a_batch_of_nulls():
    batch = batch_of(rows_of(block(b"a", b"b")))
    batch.validate(full=True)
    assert batch.column("shard_key").to_pylist() == [None, None]
    assert batch.column("headers").to_pylist() == [None, None]


@pytest.mark.parametrize("count", [MAX_SHARED_NULLS, MAX_SHARED_NULLS + 1])
def test_many_rows_without_keys_and_headers_are_sound(count):
    made = Block.from_columns(b"", bytes((count + 1) * 4), insertion_ms=0)
    piece = BlockSlice(made.layout(), run_table.make_table(1, 0, count), 0, 0, 0, count)
    batch = batch_of(gather([piece], max_rows=count, max_bytes=1))
    batch.validate(full=True)
    for name in ("shard_key", "headers"):
        assert batch.column(name).null_count == len(batch.column(name)) == count


def test_no_rows_are_an_empty_batch():
    batch = batch_of(EMPTY)
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (0, READ_SCHEMA)


def test_a_batch_refers_to_the_memory_of_its_rows():
    rows = rows_of(EXPECTED)
    address = batch_of(rows).column("body").buffers()[2].address
    assert address == pa.py_buffer(rows.bodies).address


def test_read_rows_can_be_produced_again():
    read = batch_of(rows_of(EXPECTED)).select(PRODUCE_SCHEMA.names)
    again = block_of(read, 0)
    assert contents(again) == contents(EXPECTED)
    assert again == EXPECTED
