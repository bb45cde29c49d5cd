"""rqueue's golden vectors, read from rqueue.json beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())

MAX_PAYLOAD: int = _FILE["max_payload"]
_HEX = ("topic", "content", "message_id", "chunk")


@dataclass(frozen=True)
class Vector:
    """One frame. It has a value, or it is bad for a reason."""

    name: str
    sender: str
    frame: bytes
    value: dict[str, Any] | None
    bad: str | None

    def __str__(self) -> str:
        return self.name


def vectors(sender: str | None = None) -> list[Vector]:
    """Return all vectors, or those of frames that a `client` or the `server` sends."""
    every = [_vector(entry) for entry in _FILE["vectors"]]
    return [one for one in every if sender in (None, one.sender)]


def _vector(entry: dict[str, Any]) -> Vector:
    value = entry.get("value")
    if value is not None:
        value = {
            key: bytes.fromhex(field) if key in _HEX else field for key, field in value.items()
        }
    frame = bytes.fromhex(entry["frame"])
    return Vector(entry["name"], entry["sender"], frame, value, entry.get("bad"))
