"""Recorded conversations of the deployed bus's Rust client, read from ya_client.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = json.loads(Path(__file__).with_suffix(".json").read_text())


@dataclass(frozen=True)
class Step:
    """One frame, in the order in which a proxy between client and bus saw them."""

    connection: int
    is_of_client: bool
    frame: bytes


@dataclass(frozen=True)
class Conversation:
    name: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return self.name


CONVERSATIONS = [
    Conversation(
        one["name"],
        tuple(
            Step(number, sender == "client", bytes.fromhex(frame))
            for number, sender, frame in one["steps"]
        ),
    )
    for one in _FILE["conversations"]
]
