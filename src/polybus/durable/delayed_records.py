"""Delayed batches as records of the store.

    delay/TTTTTTTT/DDDDDDDDDDDDDDDD/SSSSSSSSSSSSSSSS/PPPP → a part of the batch

T is the number of the topic, D the time at which it is due (nanoseconds since 1970), S the
place in the order of arrival and P the part, all in hex. So a scan returns the batches of a
topic in due order, those of one time in the order of arrival. Part 0 begins with a header:

    version u8, messages u32, bytes of the block u32, parts u16, length u16 and account

The rest of all parts together is the block (docs/spec/block.md). The account is the caller's,
who is charged for the messages. A batch is written and removed in one commit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import Damaged, TooLarge
from polybus.model.block import Block
from polybus.model.commit import MAX_RECORD_BYTES, RecordChange, StoredRecord

if TYPE_CHECKING:
    from polybus.store.contract import Store

PREFIX: Final = b"delay/"
VERSION: Final = 1
_HEADER = struct.Struct(">BIIHH")
# With the shards that its messages go to, a batch must fit into one commit.
MAX_PARTS: Final = 256
MAX_ACCOUNT_BYTES: Final = 1024
# A scan copies whole records, so this many bound its memory to 32 MiB.
PAGE_RECORDS: Final = 64
PART_ZERO: Final = b"/0000"


class DelayedBatch(NamedTuple):
    """A batch of one topic. `records` are its keys with their versions, by part."""

    topic: int
    due_ns: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    size_bytes: int
    account: str
    records: tuple[tuple[bytes, int], ...]
    data: bytes

    def block(self) -> Block:
        """Return the messages. Raises `Damaged` if they are not what was stored."""
        return Block.open(self.data)


class BatchHeader(NamedTuple):
    """The key and the header of a batch; its block begins at `data_start` of part 0."""

    topic: int
    due_ns: int
    sequence: int
    count: int  # type: ignore[assignment]
    size_bytes: int
    parts: int
    account: str
    data_start: int


def topic_prefix(topic: int) -> bytes:
    return PREFIX + b"%08x/" % topic


def encode_batch(
    topic: int, due_ns: int, sequence: int, block: Block, account: str
) -> tuple[RecordChange, ...]:
    """Return the changes that store a batch. Raises `TooLarge`."""
    owner = account.encode()[:MAX_ACCOUNT_BYTES]
    first = _HEADER.size + len(owner)
    parts = -(-(first + block.size_bytes) // MAX_RECORD_BYTES)
    if parts > MAX_PARTS:
        most = MAX_PARTS * MAX_RECORD_BYTES
        raise TooLarge(f"a delayed batch must have at most {most} bytes, got {block.size_bytes}")
    header = _HEADER.pack(VERSION, block.count, block.size_bytes, parts, len(owner)) + owner
    whole = b"".join((header, block.data))
    place = topic_prefix(topic) + b"%016x/%016x" % (due_ns, sequence)
    return tuple(
        RecordChange(
            place + b"/%04x" % part,
            whole[part * MAX_RECORD_BYTES : (part + 1) * MAX_RECORD_BYTES],
            0,
        )
        for part in range(parts)
    )


def scan_headers(store: Store) -> Iterator[tuple[int, BatchHeader | None]]:
    """Yield the topic and the header of every delayed batch; None if it is damaged."""
    after = b""
    while page := store.scan(PREFIX, after, PAGE_RECORDS):
        for record in page:
            if record.key.endswith(PART_ZERO):
                topic = int(record.key[len(PREFIX) : len(PREFIX) + 8], 16)
                try:
                    yield topic, _read_header(record)
                except Damaged:
                    yield topic, None
        after = page[-1].key


def scan_batches(store: Store, topic: int) -> Iterator[DelayedBatch]:
    """Yield the batches of a topic in due order. Raises `Damaged`."""
    header: BatchHeader | None = None
    parts: list[StoredRecord] = []
    after = b""
    while page := store.scan(topic_prefix(topic), after, PAGE_RECORDS):
        for record in page:
            if record.key.endswith(PART_ZERO):
                header, parts = _read_header(record), []
            if header is None:
                raise Damaged(f"delayed batch {record.key!r} has no first part")
            parts.append(record)
            if len(parts) == header.parts:
                yield _join_parts(header, parts)
                header = None
        after = page[-1].key
    if header is not None:
        raise Damaged(f"delayed batch {parts[0].key!r} has {len(parts)} of {header.parts} parts")


def scan_records(store: Store, topic: int, limit: int) -> tuple[list[bytes], list[BatchHeader]]:
    """Return the first keys of a topic, and the headers that can be read among them."""
    keys: list[bytes] = []
    headers: list[BatchHeader] = []
    while len(keys) < limit:
        after = keys[-1] if keys else b""
        page = store.scan(topic_prefix(topic), after, min(PAGE_RECORDS, limit - len(keys)))
        if not page:
            break
        keys += [record.key for record in page]
        for record in page:
            if record.key.endswith(PART_ZERO):
                with suppress(Damaged):
                    headers.append(_read_header(record))
    return keys, headers


def _join_parts(header: BatchHeader, parts: list[StoredRecord]) -> DelayedBatch:
    data = b"".join([parts[0].value[header.data_start :], *[part.value for part in parts[1:]]])
    if len(data) != header.size_bytes:
        text = f"delayed batch {parts[0].key!r} has {len(data)} of {header.size_bytes} bytes"
        raise Damaged(text)
    records = tuple((part.key, part.version) for part in parts)
    return DelayedBatch(*header[:5], header.account, records, data)


def _read_header(record: StoredRecord) -> BatchHeader:
    try:
        _, topic, due, sequence, _ = record.key.split(b"/")
        version, count, size, parts, length = _HEADER.unpack_from(record.value)
        if version != VERSION:
            raise ValueError(version)
        start = _HEADER.size + length
        account = record.value[_HEADER.size : start].decode()
        return BatchHeader(
            int(topic, 16), int(due, 16), int(sequence, 16), count, size, parts, account, start
        )
    except (ValueError, struct.error):
        raise Damaged(f"delayed batch {record.key!r} cannot be read") from None
