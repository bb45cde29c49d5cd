"""A message as its reader gets it."""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """`id` is the topic's, from 1; `timestamp_ns` is the bus's, of its commit."""

    topic: str
    id: int
    timestamp_ns: int
    body: bytes
