"""A whole bus in memory: real broker, real sessions, no sockets and no clock.

The test moves the clock and runs the turns of the loop:

    bus = MemoryBus(Limits(outbox_high_water_bytes=1000))
    reader, writer = bus.connect(), bus.connect()
    reader.deliver(subscribe(b"t"))
    writer.deliver(publish(b"t", b"x"))
    bus.turn()                           # run the callbacks of the loop
    bus.pass_time(5)                     # five seconds pass
    bus.connect_freud(identity=ALICE)    # a Freud connection
    bus.connect_gsb()                    # a GSB connection
    bus.connect_ya()                     # one of its deployed framing

With `durable=True` the bus has a store. The test decides when commits and reads run:

    bus.make("t")                        # create a durable topic
    bus.commit()                         # run pending commits; `turn` delivers their results
    bus.read()                           # run pending reads
    bus.settle()                         # all of these until none is pending

A dialect whose folder was deleted is not opened, so that the tests of the others still run
(tests/unit/test_dialect_removal.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from polybus.bus.broker import Broker
from polybus.bus.policy import Policy
from polybus.durable.durable_bus import DurableBus, attach_store, durable_bus
from polybus.durable.topic_names import CREATOR, NameReservation, creator_record
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import Limits, QuotaLimits
from polybus.model.topic import Topic
from tests.rig.installed_dialects import has_dialect
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.store.stepped_store import SteppedStore

if TYPE_CHECKING:
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.session import FreudServer
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.server.session import GsbServer
    from polybus.dialects.gsb.ya.session import YaServer
    from polybus.dialects.rqueue.limits import RqueueLimits
    from polybus.dialects.rqueue.server.session import RqueueServer

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
        gsb_padding: bytes = b"",
        quotas: QuotaLimits | None = None,
        policy: Policy | None = None,
        durable: bool = False,
    ) -> None:
        self.now_s = 1000.0
        self.wall_ahead_ns = 0  # the wall clock may be set back; the monotonic clock may not
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
        # After the store because sessions of all dialects use durable topics.
        if has_dialect("rqueue"):
            from polybus.dialects.rqueue.limits import RqueueLimits
            from polybus.dialects.rqueue.server.session import RqueueServer

            self._rqueue = RqueueServer(self.broker, rqueue or RqueueLimits())
        self._last_to_run: type[Any] | tuple[()] = ()
        if has_dialect("freud"):
            from polybus.dialects.freud.limits import FreudLimits
            from polybus.dialects.freud.server.fair_scheduler import FairScheduler
            from polybus.dialects.freud.server.session import FreudServer

            self._freud = FreudServer(self.broker, freud or FreudLimits(), self)
            self.topics = self._freud.topics
            self._last_to_run = FairScheduler
        self._gsb_limits = gsb
        # Its GSB peers add this to each packet that they send (gsb_memory_peer.py).
        self.gsb_padding = gsb_padding
        if gsb is not None:
            assert self.gsb is not None

    @cached_property
    def gsb(self) -> GsbServer:
        """Opened at its first use without limits: the keys of its node take much time."""
        from polybus.dialects.gsb.limits import GsbLimits
        from polybus.dialects.gsb.network.node_key import NodeKey
        from polybus.dialects.gsb.server.session import GsbServer

        key = NodeKey(bytes(32))  # the same id in every run
        return GsbServer(self.broker, self._gsb_limits or GsbLimits(), self, ANONYMOUS, key)

    @cached_property
    def _ya(self) -> YaServer:
        from polybus.dialects.gsb.ya.session import YaServer

        return YaServer(self.gsb)

    def connect(self, appetite: int | None = None, identity: Identity = ANONYMOUS) -> MemoryPipe:
        """A new rqueue connection. With an appetite it reads that many bytes and stops."""
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

    def connect_ya(self, appetite: int | None = None, identity: Identity = ANONYMOUS) -> MemoryPipe:
        """A connection of GSB's deployed framing."""
        return self._connect(self._ya, appetite, identity)

    def connections(self) -> list[dict[str, Any]]:
        """Return all open connections, as operators see them."""
        rows, following = self.broker.overview.connections.page("", 1 << 20)
        assert following is None
        return rows

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
        """Run callbacks of the loop until none is pending.

        Sessions run in the order of their connections and paused ones last. Any order would be
        right; this one makes results reproducible.
        """
        while self._soon:
            place = min(range(len(self._soon)), key=lambda at: self._rank(self._soon[at]))
            self._soon.pop(place)()

    # Durable topics.

    @property
    def durable(self) -> DurableBus:
        bus = durable_bus(self.broker)
        assert bus is not None
        return bus

    def make(
        self, name: str, shards: int = 1, creator: Identity = ANONYMOUS, **settings: object
    ) -> Topic:
        """Create a durable topic and bind its name as the native port does."""
        binding = self.durable.names
        reservation, _ = binding.reserve(creator, name)
        assert isinstance(reservation, NameReservation), f"topic {name!r} exists"
        topic = self.store.create(name, shards, {CREATOR: creator_record(creator), **settings})
        binding.complete(reservation, topic, self.store.bounds(topic.number).next_id)
        return topic

    def drop(self, topic: Topic) -> None:
        self.store.drop(topic.name)
        self.durable.names.remove(topic)

    def commit(self, count: int | None = None) -> None:
        """Run `count` pending commits, or all."""
        for _ in range(len(self.store.waiting) if count is None else count):
            self.store.step()

    def read(self, count: int | None = None) -> None:
        """Run `count` pending reads, or all. `turn` delivers their results."""
        for _ in range(len(self._reads) if count is None else count):
            self._reads.popleft()()

    @property
    def reads(self) -> int:
        """The number of pending reads."""
        return len(self._reads)

    def settle(self) -> None:
        """Run turns, commits and reads until none is pending."""
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
        """Advance the clock, with a tick of the server's timer every quarter of a second."""
        end = self.now_s + seconds
        while self.now_s < end:
            tick_s = min(end, self.now_s + TICK_S)
            self._fire_until(tick_s)
            self.broker.tick()
            self.turn()

    def pause(self, seconds: float) -> None:
        """Advance the clock while the bus does not run, as that of a stopped process."""
        self.now_s += seconds
        self.broker.tick()
        self.turn()

    def stats(self, *path: str) -> Any:
        value: Any = self.broker.stats()
        for name in path:
            value = value.get(name, 0)
        return value

    @property
    def close_reasons(self) -> dict[str, int]:
        """The connections that the bus has closed, by reason."""
        closed: dict[str, int] = self.stats("connections", "closed")
        return closed

    def _connect(
        self,
        dialect: RqueueServer | FreudServer | GsbServer | YaServer,
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
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, self._last_to_run):
            return len(self._sessions) + 1
        return self._sessions.get(owner, 0)

    def _fire_until(self, end: float) -> None:
        """Run the timers that are due by `end`, each at its time."""
        while self._timers and self._timers[0].due_s <= end:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.now_s = max(self.now_s, timer.due_s)
                timer.callback()
                self.turn()
        self.now_s = end
