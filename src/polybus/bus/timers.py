"""The part of an event loop that the bus and its sessions need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer: ...
    def call_soon(self, callback: Callable[[], None], /) -> object: ...
