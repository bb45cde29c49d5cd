"""What goes through the native port, counted from many threads at once: once a batch."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple


class Totals(NamedTuple):
    """Received bytes are those of blocks, delivered ones those of keys, bodies and headers."""

    received: int = 0
    received_bytes: int = 0
    delivered: int = 0
    delivered_bytes: int = 0


class Traffic:
    def __init__(self) -> None:
        self._lock = Lock()
        self._totals = Totals()

    @property
    def totals(self) -> Totals:
        return self._totals

    def receive(self, messages: int, size: int) -> None:
        with self._lock:
            old = self._totals
            self._totals = old._replace(
                received=old.received + messages, received_bytes=old.received_bytes + size
            )

    def deliver(self, messages: int, size: int) -> None:
        with self._lock:
            old = self._totals
            self._totals = old._replace(
                delivered=old.delivered + messages, delivered_bytes=old.delivered_bytes + size
            )
