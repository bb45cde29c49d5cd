"""Golden vectors of the deployed framing of GSB, read from ya.json beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())


@dataclass(frozen=True)
class Vector:
    """One frame."""

    name: str
    frame: bytes

    @property
    def payload(self) -> bytes:
        return self.frame[4:]

    @property
    def kind(self) -> str:
        return self.name.partition(",")[0]

    def __str__(self) -> str:
        return self.name


VECTORS = [Vector(entry["name"], bytes.fromhex(entry["frame"])) for entry in _FILE["frames"]]
BY_NAME = {vector.name: vector for vector in VECTORS}
