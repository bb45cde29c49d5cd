"""Bytes of segments and records (docs/spec/log.md)."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

import xxhash

from polybus.errors import Damaged, WrongFormat
from polybus.store.log.write_ahead_log import Bytes, LogRecord

VERSION: Final = 1

# --- segments

MAGIC: Final = b"\x89PBWLOG\n"
SEGMENT_HEADER_BYTES: Final = 4096  # records begin at a page
_SEGMENT = Struct("<8sHHIQQ")  # magic, version, two zeros, segment bytes, log id
_CHECKSUM = Struct("<Q")


def encode_segment_header(segment_bytes: int, log_id: int) -> bytes:
    head = _SEGMENT.pack(MAGIC, VERSION, 0, 0, segment_bytes, log_id)
    head += _CHECKSUM.pack(xxhash.xxh64_intdigest(head))
    return head.ljust(SEGMENT_HEADER_BYTES, b"\0")


def decode_segment_header(data: bytes) -> tuple[int, int]:
    """Return the segment's bytes and the id of its log. Raises `WrongFormat` or `Damaged`."""
    if len(data) < _SEGMENT.size + _CHECKSUM.size or not data.startswith(MAGIC):
        raise WrongFormat("it is not a segment of a log")
    magic_and_all = data[: _SEGMENT.size]
    _, version, _, _, segment_bytes, log_id = _SEGMENT.unpack(magic_and_all)
    (checksum,) = _CHECKSUM.unpack_from(data, _SEGMENT.size)
    if checksum != xxhash.xxh64_intdigest(magic_and_all):
        raise Damaged("its header is damaged")
    if version != VERSION:
        raise WrongFormat(f"it has version {version}; this version of polybus reads {VERSION}")
    return segment_bytes, log_id


# --- records

RECORD: Final = 0
CLOSED: Final = 1  # the mark of a clean close
HEAD_BYTES: Final = 56
ALIGNMENT: Final = 8
# checksum, log id, length, version, kind, number, epoch, writer, synced
_HEAD = Struct("<QQIHHQQQQ")
_HASHED = Struct("<QIHHQQQQ")  # all of the head that the checksum covers
ID_AT: Final = 8  # of the log id in a head


class Head(NamedTuple):
    """The head of a record, which means the same in every version.

    `synced` is a number: the records up to it were durable before this one was written.
    """

    checksum: int
    log_id: int
    length: int
    version: int
    kind: int
    number: int
    epoch: int
    writer: int
    synced: int

    @property
    def size(self) -> int:
        """Bytes of the record with its padding."""
        return record_bytes(self.length)


def record_bytes(length: int) -> int:
    """Return the bytes that a payload of this length takes in a segment."""
    return (HEAD_BYTES + length + ALIGNMENT - 1) & -ALIGNMENT


def encode_record(log_id: int, record: LogRecord, length: int, synced: int) -> list[Bytes]:
    """Return the buffers of a record: its head, the parts, and the padding."""
    epoch, writer, number, parts = record
    hashed = _HASHED.pack(log_id, length, VERSION, RECORD, number, epoch, writer, synced)
    # The seed is secret, so no payload of a client can hold bytes that pass for a record.
    digest = xxhash.xxh64(hashed, log_id)
    for part in parts:
        digest.update(part)
    head = _CHECKSUM.pack(digest.intdigest()) + hashed
    padding = bytes(-length % ALIGNMENT)
    return [head, *parts, padding] if padding else [head, *parts]


def encode_mark(log_id: int, number: int, epoch: int) -> bytes:
    """Return the mark of a clean close: a head alone, with the number of the next record."""
    hashed = _HASHED.pack(log_id, 0, VERSION, CLOSED, number, epoch, 0, number - 1)
    return _CHECKSUM.pack(xxhash.xxh64_intdigest(hashed, log_id)) + hashed


def decode_head(data: bytes, at: int, log_id: int) -> Head | None:
    """Return the head at an index, None if there is none of this log."""
    if at < 0 or at + HEAD_BYTES > len(data):
        return None
    head = Head._make(_HEAD.unpack_from(data, at))
    return head if head.log_id == log_id else None


def check_version(head: Head, where: str) -> None:
    """Raise `WrongFormat` for a record that a newer version of polybus wrote."""
    if head.version != VERSION:
        raise WrongFormat(
            f"{where}: record {head.number} has version {head.version}; "
            f"this version of polybus reads {VERSION}"
        )


def is_intact(data: bytes, at: int, head: Head) -> bool:
    """Compare the checksum of a record that is whole in the data."""
    hashed = memoryview(data)[at + ID_AT : at + HEAD_BYTES + head.length]
    return xxhash.xxh64_intdigest(hashed, head.log_id) == head.checksum
