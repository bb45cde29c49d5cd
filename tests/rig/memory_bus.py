"""A whole bus in memory: real broker, real sessions, no sockets and no clock.

Time is a number that moves when it is told to, and so are the turns of a loop
that is not there:

    bus = MemoryBus(Limits(outbox_high_water_bytes=1000))
    reader, writer = bus.connect(), bus.connect()
    reader.deliver(subscribe(b"t"))
    writer.deliver(publish(b"t", b"x"))
    bus.turn()                           # the loop comes round
    bus.pass_time(5)                     # and five seconds go by
    bus.connect_freud(identity=ALICE)    # speaks Freud
    bus.connect_gsb()                    # speaks GSB

With `durable=True` there is a store, whose disk and whose readers wait to be told, too:

    bus.make("t")                        # a durable topic
    bus.commit()                         # what waits for the disk is on it (`turn` tells)
    bus.read()                           # what waits to be read is read
    bus.settle()                         # all of this, until nothing is left to be done
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from polybus.bus.broker import Broker
from polybus.bus.policy import Policy
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.fair_scheduler import FairScheduler
from polybus.dialects.freud.server.session import FreudServer
from polybus.dialects.gsb.limits import GsbLimits
from polybus.dialects.gsb.server.session import GsbServer
from polybus.dialects.rqueue.limits import RqueueLimits
from polybus.dialects.rqueue.server.session import RqueueServer
from polybus.durable.durable_bus import DurableBus, attach_store, durable_bus
from polybus.durable.topic_names import CREATOR, NameReservation, creator_record
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import Limits, QuotaLimits
from polybus.model.topic import Topic
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.store.stepped_store import SteppedStore

T = TypeVar("T")
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


@dataclass(order=True)
class MemoryTimer:
    due_s: float
    number: int
    callback: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class MemoryBus:
    def __init__(
        self,
        limits: Limits | None = None,
        rqueue: RqueueLimits | None = None,
        *,
        freud: FreudLimits | None = None,
        gsb: GsbLimits | None = None,
        quotas: QuotaLimits | None = None,
        policy: Policy | None = None,
        durable: bool = False,
    ) -> None:
        self.now_s = 1000.0
        self.wall_ahead_ns = 0  # of the other clock: it may be set, and go back
        self.log = RecordedLog()
        self._soon: list[Callable[[], None]] = []
        self._timers: list[MemoryTimer] = []
        self._timers_made = 0
        self.broker = Broker(
            limits or Limits(),
            lambda: self.now_s,
            self._soon.append,
            self.log,
            wall_ns=self.wall_ns,
            quotas=quotas,
            policy=policy,
        )
        self._sessions: dict[object, int] = {}  # in the order of their connections
        self._reads: deque[Callable[[], None]] = deque()
        if durable:
            self.store = SteppedStore(wall_ns=self.wall_ns, clock_s=lambda: self.now_s)
            attach_store(self.broker, self.store, self._soon.append, self._read_later)
        # After the store: sessions of all dialects use durable topics.
        self._rqueue = RqueueServer(self.broker, rqueue or RqueueLimits())
        self._freud = FreudServer(self.broker, freud or FreudLimits(), self)
        self.topics = self._freud.topics
        self.gsb = GsbServer(self.broker, gsb or GsbLimits(), self, ANONYMOUS)

    def connect(self, appetite: int | None = None, identity: Identity = ANONYMOUS) -> MemoryPipe:
        """A new rqueue connection; with an appetite it takes so many bytes and then no more."""
        return self._connect(self._rqueue, appetite, identity)

    def connect_freud(
        self, appetite: int | None = None, identity: Identity = ANONYMOUS
    ) -> MemoryPipe:
        return self._connect(self._freud, appetite, identity)

    def connect_gsb(
        self,
        appetite: int | None = None,
        identity: Identity = ANONYMOUS,
        *,
        is_unix: bool = False,
    ) -> MemoryPipe:
        return self._connect(self.gsb, appetite, identity, is_unix)

    def wall_ns(self) -> int:
        return int(self.now_s * 1e9) + self.wall_ahead_ns

    # The part of an event loop that sessions use.

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self._soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None], /) -> MemoryTimer:
        self._timers_made += 1
        timer = MemoryTimer(self.now_s + delay, self._timers_made, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def turn(self) -> None:
        """Everything that was put off is done, until there is nothing more.

        Sessions go on in the order of their connections, whoever was woken first, and those
        who rest after all others: no order would be wrong, and this one is easy to foretell.
        """
        while self._soon:
            place = min(range(len(self._soon)), key=lambda at: self._rank(self._soon[at]))
            self._soon.pop(place)()

    # What has to do with durable topics.

    @property
    def durable(self) -> DurableBus:
        found = durable_bus(self.broker)
        assert found is not None
        return found

    def make(
        self, name: str, shards: int = 1, creator: Identity = ANONYMOUS, **settings: object
    ) -> Topic:
        """A durable topic, bound as the native port does it."""
        binding = self.durable.names
        reservation, _ = binding.reserve(creator, name)
        assert isinstance(reservation, NameReservation), "there is one of this name"
        topic = self.store.create(name, shards, {CREATOR: creator_record(creator), **settings})
        binding.complete(reservation, topic, self.store.bounds(topic.number).next_id)
        return topic

    def drop(self, topic: Topic) -> None:
        self.store.drop(topic.name)
        self.durable.names.remove(topic)

    def commit(self, count: int | None = None) -> None:
        """So many of the commits that wait for the disk are carried out, or all."""
        for _ in range(len(self.store.waiting) if count is None else count):
            self.store.step()

    def read(self, count: int | None = None) -> None:
        """So many of the reads that wait are done, or all; `turn` brings their outcomes."""
        for _ in range(len(self._reads) if count is None else count):
            self._reads.popleft()()

    @property
    def reads(self) -> int:
        """How many wait to be done."""
        return len(self._reads)

    def settle(self) -> None:
        """Turns, commits and reads until nothing is left to be done."""
        while self._soon or self._reads or self.store.waiting:
            self.turn()
            self.commit()
            self.read()

    def _read_later(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        def read() -> None:
            outcome: Future[T] = Future()
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)
            self._soon.append(lambda: then(outcome))

        self._reads.append(read)

    def pass_time(self, seconds: float) -> None:
        """The clock moves on, with a tick of the server's timer every quarter of a second."""
        end = self.now_s + seconds
        while self.now_s < end:
            tick_s = min(end, self.now_s + TICK_S)
            self._fire_until(tick_s)
            self.broker.tick()
            self.turn()

    def stats(self, *path: str) -> Any:
        found: Any = self.broker.stats()
        for name in path:
            found = found.get(name, 0)
        return found

    def _connect(
        self,
        dialect: RqueueServer | FreudServer | GsbServer,
        appetite: int | None,
        identity: Identity,
        is_unix: bool = False,
    ) -> MemoryPipe:
        number = len(self._sessions) + 1
        pipe = MemoryPipe(f"memory:{number}", appetite, identity)
        pipe.is_unix = is_unix
        session = dialect(pipe)
        self._sessions[session] = number
        pipe.attach(session)
        return pipe

    def _rank(self, callback: Callable[[], None]) -> int:
        whose = getattr(callback, "__self__", None)
        return (
            len(self._sessions) + 1
            if isinstance(whose, FairScheduler)
            else self._sessions.get(whose, 0)
        )

    def _fire_until(self, end: float) -> None:
        """The timers that are due by then, each at its time, with what follows from it."""
        while self._timers and self._timers[0].due_s <= end:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.now_s = max(self.now_s, timer.due_s)
                timer.callback()
                self.turn()
        self.now_s = end
