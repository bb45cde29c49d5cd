"""Fuzzes the parsing of records of a log, as from a damaged disk.

The input is a segment behind its header, as it is and with the checksum of its first record
made right. The invariant, for any input: nothing crashes, and what is accepted is a record
that docs/spec/log.md gives the same bytes.
"""

from __future__ import annotations

import xxhash

from polybus.store.log import codec
from polybus.store.log.write_ahead_log import LogRecord
from tests.rig.oracle import log as oracle

LOG_ID = 0x0123456789ABCDEF


def target(data: bytes) -> None:
    judge(data)
    if len(data) >= codec.HEAD_BYTES:
        length = int.from_bytes(data[16:20], "little") % (len(data) - codec.HEAD_BYTES + 1)
        hashed = LOG_ID.to_bytes(8, "little") + length.to_bytes(4, "little")
        hashed += data[20 : codec.HEAD_BYTES + length]
        checksum = xxhash.xxh64_intdigest(hashed, LOG_ID)
        judge(checksum.to_bytes(8, "little") + hashed + bytes(8))


def judge(data: bytes) -> None:
    head = codec.decode_head(data, 0, LOG_ID)
    if head is None or head.size > len(data) or not codec.is_intact(data, 0, head):
        return
    payload = data[codec.HEAD_BYTES : codec.HEAD_BYTES + head.length]
    record = LogRecord(head.epoch, head.writer, head.number, (payload,))
    encoded = oracle.encode_record(
        LOG_ID, record, head.synced, version=head.version, kind=head.kind
    )
    assert len(encoded) == head.size
    end = codec.HEAD_BYTES + head.length
    assert encoded[:end] == data[:end]


SEEDS = [
    oracle.encode_record(LOG_ID, LogRecord(1, 2, 3, (b"payload",)), 2),
    oracle.encode_record(LOG_ID, LogRecord(1, 2, 3, (b"",)), 2, kind=1),
    oracle.encode_record(LOG_ID, LogRecord(1, 2, 3, (bytes(100),)), 2, version=2),
]
WORDS = [LOG_ID.to_bytes(8, "little"), b"\xff\xff\xff\xff", b"\x01\x00", b"\x00\x00"]
