"""Golden records and the header of a segment, read from log.json beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())


@dataclass(frozen=True)
class RecordVector:
    name: str
    log_id: int
    kind: int
    number: int
    epoch: int
    writer: int
    synced: int
    payload: bytes
    data: bytes


@dataclass(frozen=True)
class SegmentVector:
    segment_bytes: int
    log_id: int
    data: bytes


def records() -> list[RecordVector]:
    return [
        RecordVector(
            **{
                **entry,
                "log_id": int(entry["log_id"], 16),
                "writer": int(entry["writer"], 16),
                "payload": bytes.fromhex(entry["payload"]),
                "data": bytes.fromhex("".join(entry["data"])),
            }
        )
        for entry in _FILE["records"]
    ]


def segment() -> SegmentVector:
    entry = _FILE["segment"]
    return SegmentVector(
        entry["segment_bytes"], int(entry["log_id"], 16), bytes.fromhex("".join(entry["data"]))
    )
