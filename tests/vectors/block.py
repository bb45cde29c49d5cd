"""Golden blocks, read from block.json beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())


@dataclass(frozen=True)
class Vector:
    """One block. It has messages, or it is bad for a reason."""

    name: str
    data: bytes
    messages: list[dict[str, Any]] | None  # insertion_ms, key, body, headers
    bad: str | None

    def __str__(self) -> str:
        return self.name


def vectors() -> list[Vector]:
    return [
        Vector(
            entry["name"],
            bytes.fromhex("".join(entry["block"])),
            [_message(one) for one in entry["messages"]] if "messages" in entry else None,
            entry.get("bad"),
        )
        for entry in _FILE["vectors"]
    ]


def _message(entry: dict[str, Any]) -> dict[str, Any]:
    headers = entry["headers"]
    return {
        **entry,
        "body": bytes.fromhex(entry["body"]),
        "headers": None
        if headers is None
        else tuple((name, bytes.fromhex(value)) for name, value in headers),
    }
