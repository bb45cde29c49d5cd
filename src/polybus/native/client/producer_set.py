"""The producers of one client, which are closed with it."""

from __future__ import annotations

from threading import Lock
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    @property
    def is_closed(self) -> bool: ...
    def close(self, timeout_s: float | None = None) -> None: ...


One = TypeVar("One", bound=Closable)


class ProducerSet(Generic[One]):
    """For any number of threads. Those that were closed by themselves are forgotten."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: list[One] = []

    def add(self, producer: One) -> One:
        with self._lock:
            self._open = [one for one in self._open if not one.is_closed] + [producer]
        return producer

    def close(self, timeout_s: float | None) -> None:
        """Each as its own `close` says."""
        with self._lock:
            producers, self._open = self._open, []
        for producer in producers:
            producer.close(timeout_s)
