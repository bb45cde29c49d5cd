"""GSB's golden vectors, read from gsb.json beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())

GREETINGS: dict[str, bytes] = {
    form: bytes.fromhex(text) for form, text in _FILE["greeting"].items()
}


@dataclass(frozen=True)
class Vector:
    """One message as nng writes it to a TCP stream, and to a Unix socket."""

    name: str
    tcp: bytes
    ipc: bytes

    @property
    def payload(self) -> bytes:
        return self.tcp[8:]

    @property
    def kind(self) -> str:
        return self.name.partition(",")[0]

    def __str__(self) -> str:
        return self.name


VECTORS = [
    Vector(entry["name"], bytes.fromhex(entry["tcp"]), bytes.fromhex(entry["ipc"]))
    for entry in _FILE["frames"]
]
PACKETS = [vector for vector in VECTORS if vector.payload]
