"""Counts of messages that do not pass the fan-out."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple


class TrafficTotals(NamedTuple):
    """Totals. Received bytes are those of blocks, delivered ones of keys, bodies and headers."""

    received: int = 0
    received_bytes: int = 0
    delivered: int = 0
    delivered_bytes: int = 0


@dataclass(slots=True)
class LoopTraffic:
    """Counts of a dialect that runs on the loop only."""

    received: int = 0
    received_bytes: int = 0
    delivered: int = 0
    delivered_bytes: int = 0


class SharedTraffic:
    """Counts of the native port, updated once per batch from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._received = self._received_bytes = 0
        self._delivered = self._delivered_bytes = 0

    @property
    def totals(self) -> TrafficTotals:
        with self._lock:
            received = self._received, self._received_bytes
            return TrafficTotals(*received, self._delivered, self._delivered_bytes)

    def receive(self, messages: int, size: int) -> None:
        with self._lock:
            self._received += messages
            self._received_bytes += size

    def deliver(self, messages: int, size: int) -> None:
        with self._lock:
            self._delivered += messages
            self._delivered_bytes += size
