"""A whole bus in memory: real broker, real sessions, no sockets and no clock.

Time is a number that moves when it is told to, and so are the turns of a loop
that is not there:

    bus = MemoryBus(Limits(outbox_high_water_bytes=1000))
    reader, writer = bus.connect(), bus.connect()
    reader.deliver(subscribe(b"t"))
    writer.deliver(publish(b"t", b"x"))
    bus.turn()                           # the loop comes round
    bus.pass_time(5)                     # and five seconds go by
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polybus.bus.broker import Broker
from polybus.dialects.rqueue.session import RqueueDialect
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import Limits, RqueueLimits
from polybus.testing.pipe import MemoryPipe

TICK_S = 0.25


class RecordedLog:
    """Keeps every event with its fields."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.events.append((event, {"level": "debug", **fields}))

    def info(self, event: str, **fields: Any) -> None:
        self.events.append((event, {"level": "info", **fields}))

    def warning(self, event: str, **fields: Any) -> None:
        self.events.append((event, {"level": "warning", **fields}))

    def warnings(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event, fields) for event, fields in self.events if fields["level"] == "warning"]


class MemoryBus:
    def __init__(self, limits: Limits | None = None, rqueue: RqueueLimits | None = None) -> None:
        self.now_s = 1000.0
        self.log = RecordedLog()
        self._soon: list[Callable[[], None]] = []
        self.broker = Broker(
            limits or Limits(),
            lambda: self.now_s,
            self._soon.append,
            self.log,
            wall_ns=lambda: int(self.now_s * 1e9),
        )
        self._dialect = RqueueDialect(self.broker, rqueue or RqueueLimits())
        self._pipes = 0

    def connect(self, appetite: int | None = None, identity: Identity = ANONYMOUS) -> MemoryPipe:
        """A new connection; with an appetite it takes so many bytes and then no more."""
        self._pipes += 1
        pipe = MemoryPipe(f"memory:{self._pipes}", appetite, identity)
        pipe.attach(self._dialect(pipe))
        return pipe

    def turn(self) -> None:
        """Everything that was put off is done, until there is nothing more."""
        while self._soon:
            self._soon.pop(0)()

    def pass_time(self, seconds: float) -> None:
        """The clock moves on, with a tick of the server's timer every quarter of a second."""
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s = min(end, self.now_s + TICK_S)
            self.broker.tick()
            self.turn()

    def stats(self, *path: str) -> Any:
        found: Any = self.broker.stats()
        for name in path:
            found = found.get(name, 0)
        return found
