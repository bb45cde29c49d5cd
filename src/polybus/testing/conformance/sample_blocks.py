"""Conversion of plain Python values to blocks, and of rows to plain values, for tests."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from polybus.model.block import Block, Headers, Keys, gather
from polybus.model.rows import Column, Rows
from polybus.model.run_table import make_table

MapOrPairs = Mapping[str, bytes] | Sequence[tuple[str, bytes]]


class Message(NamedTuple):
    """One row of a read. `headers` are pairs, in order."""

    id: int
    shard: int
    offset: int
    timestamp_ns: int
    insertion_ms: int
    key: str | None
    body: bytes
    headers: tuple[tuple[str, bytes], ...] | None


def block(
    *bodies: bytes,
    keys: Sequence[str | None] | None = None,
    headers: Sequence[MapOrPairs | None] | None = None,
    insertion_ms: int | Sequence[int] = 0,
) -> Block:
    """Return a block of messages: `block(b"a", b"b", keys=["k", None])`."""
    times = insertion_ms if isinstance(insertion_ms, int) else _numbers("q", insertion_ms)
    return Block.from_columns(
        b"".join(bodies),
        _offsets(bodies),
        insertion_ms=times,
        keys=None if keys is None else _keys(keys),
        headers=None if headers is None else _headers(headers),
    )


def messages(rows: Rows) -> list[Message]:
    """Return all rows as plain values."""
    return [
        Message(*fields)
        for fields in zip(
            _ints("q", rows.ids),
            _ints("i", rows.shards),
            _ints("q", rows.offsets),
            _ints("q", rows.timestamps_ns),
            _ints("q", rows.insertion_ms),
            _read_keys(rows),
            _strings(rows.body_offsets, rows.bodies),
            _read_headers(rows),
            strict=True,
        )
    ]


def contents(block: Block) -> list[tuple[int, str | None, bytes, object]]:
    """Return (insertion_ms, key, body, headers) of each message of a block."""
    piece = (block.layout(), make_table(1, 0, block.count), 0, 0, 0, block.count)
    rows = gather([piece], max_rows=block.count, max_bytes=block.size_bytes)
    return [(row.insertion_ms, row.key, row.body, row.headers) for row in messages(rows)]


# --- encoding


def _numbers(kind: str, values: Iterable[int]) -> bytes:
    listed = list(values)
    return struct.pack(f"<{len(listed)}{kind}", *listed)


def _offsets(parts: Iterable[Sequence[object] | bytes]) -> bytes:
    return _numbers("i", accumulate((len(part) for part in parts), initial=0))


def _validity(values: Sequence[object | None]) -> bytes | None:
    if None not in values:
        return None
    bits = sum((value is not None) << place for place, value in enumerate(values))
    return bits.to_bytes((len(values) + 7) // 8, "little")


def _keys(keys: Sequence[str | None]) -> Keys:
    parts = [(key or "").encode() for key in keys]
    return Keys(b"".join(parts), _offsets(parts), _validity(keys))


def _headers(headers: Sequence[MapOrPairs | None]) -> Headers:
    maps = [_pairs(header_map) for header_map in headers]
    names = [name.encode() for pairs in maps for name, _ in pairs]
    values = [value for pairs in maps for _, value in pairs]
    return Headers(
        _offsets(maps),
        b"".join(names),
        _offsets(names),
        b"".join(values),
        _offsets(values),
        _validity(headers),
    )


def _pairs(headers: MapOrPairs | None) -> list[tuple[str, bytes]]:
    if headers is None:
        return []
    return list(headers.items()) if isinstance(headers, Mapping) else list(headers)


# --- decoding


def _ints(kind: str, column: Column) -> tuple[int, ...]:
    return struct.unpack(f"<{len(column) // struct.calcsize('<' + kind)}{kind}", column)


def _strings(offsets: Column, data: Column) -> Iterator[bytes]:
    cuts = _ints("i", offsets)
    for start, end in pairwise(cuts):
        yield bytes(data[start:end])


def _valid(bits: Column | None, place: int) -> bool:
    return bits is None or bool(bits[place // 8] >> place % 8 & 1)


def _read_keys(rows: Rows) -> Iterator[str | None]:
    if rows.key_offsets is None or rows.keys is None:
        yield from [None] * rows.count
        return
    for place, key in enumerate(_strings(rows.key_offsets, rows.keys)):
        yield key.decode() if _valid(rows.key_validity, place) else None


def _read_headers(rows: Rows) -> Iterator[tuple[tuple[str, bytes], ...] | None]:
    if rows.header_offsets is None:
        yield from [None] * rows.count
        return
    assert rows.header_name_offsets is not None
    assert rows.header_names is not None
    assert rows.header_value_offsets is not None
    assert rows.header_values is not None
    names = [name.decode() for name in _strings(rows.header_name_offsets, rows.header_names)]
    values = list(_strings(rows.header_value_offsets, rows.header_values))
    cuts = _ints("i", rows.header_offsets)
    for place, (start, end) in enumerate(pairwise(cuts)):
        pairs = tuple(zip(names[start:end], values[start:end], strict=True))
        yield pairs if _valid(rows.header_validity, place) else None
