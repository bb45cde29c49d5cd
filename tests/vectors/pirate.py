"""Pirate's golden vectors, read from pirate.json beside this file: frames in hex."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())

CLIENT = bytes.fromhex(_FILE["client"])


class Vector(NamedTuple):
    name: str
    frames: list[bytes]
    value: Any = None

    def __str__(self) -> str:
        return self.name


def _read(kind: str) -> list[Vector]:
    return [
        Vector(one["name"], [bytes.fromhex(frame) for frame in one["frames"]], one.get("value"))
        for one in _FILE[kind]
    ]


REQUESTS, MALFORMED, REPLIES = map(_read, ("requests", "malformed", "replies"))
