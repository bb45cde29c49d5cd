"""Records of a file log, written from docs/spec/log.md with nothing of the log in it."""

from __future__ import annotations

import struct

import xxhash

from polybus.store.log.write_ahead_log import LogRecord


def encode_record(
    log_id: int, record: LogRecord, synced: int, *, version: int = 1, kind: int = 0
) -> bytes:
    payload = record.payload
    head = struct.pack("<Q", log_id) + struct.pack("<I", len(payload))
    head += struct.pack("<H", version) + struct.pack("<H", kind)
    head += struct.pack("<4Q", record.number, record.epoch, record.writer, synced)
    checksum = xxhash.xxh64(head + payload, seed=log_id).intdigest()
    whole = struct.pack("<Q", checksum) + head + payload
    return whole + b"\0" * (-len(whole) % 8)


def encode_segment_header(segment_bytes: int, log_id: int) -> bytes:
    head = b"\x89PBWLOG\n" + struct.pack("<HHIQQ", 1, 0, 0, segment_bytes, log_id)
    return head + struct.pack("<Q", xxhash.xxh64(head).intdigest())
