"""The open producers of a client, which are closed with it."""

from __future__ import annotations

from threading import Lock
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    @property
    def is_closed(self) -> bool: ...
    def close(self, timeout_s: float | None = None) -> None: ...


P = TypeVar("P", bound=Closable)


class ProducerSet(Generic[P]):
    """A set of open producers. Thread-safe; producers that were closed are dropped."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: list[P] = []

    def add(self, producer: P) -> P:
        with self._lock:
            self._open = [known for known in self._open if not known.is_closed] + [producer]
        return producer

    def close(self, timeout_s: float | None) -> None:
        """Close all producers."""
        with self._lock:
            producers, self._open = self._open, []
        for producer in producers:
            producer.close(timeout_s)
