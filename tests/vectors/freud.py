"""Freud's golden vectors, read from freud.json beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())

MAX_FRAME_BYTES: int = _FILE["max_frame_bytes"]
_HEX = ("topic", "subscriber", "body")


@dataclass(frozen=True)
class Vector:
    """One frame with a value or the reason why it is bad. `asked` is the request of an answer."""

    name: str
    sender: str
    asked: str | None
    frame: bytes
    value: dict[str, Any] | None
    bad: str | None

    def __str__(self) -> str:
        return self.name


def vectors(sender: str) -> list[Vector]:
    """Return the vectors of frames that the `client` or the `server` sends."""
    every = [_vector(entry) for entry in _FILE["vectors"]]
    return [one for one in every if one.sender == sender]


def _vector(entry: dict[str, Any]) -> Vector:
    value = entry.get("value")
    if value is not None:
        value = {key: _field(key, field) for key, field in value.items()}
    return Vector(
        entry["name"],
        entry["sender"],
        entry.get("asked"),
        bytes.fromhex(entry["frame"]),
        value,
        entry.get("bad"),
    )


def _field(key: str, field: Any) -> Any:
    if key == "topics":
        return [bytes.fromhex(name) for name in field]
    return bytes.fromhex(field) if key in _HEX else field
