"""A broker in this process: connections without sockets, a store in memory, no event loop."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from polybus.bus.broker import Broker
from polybus.bus.connection import Connection
from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding
from polybus.durable.durable_bus import attach_store, durable_bus
from polybus.durable.topic_names import NameReservation
from polybus.kernel.fanout import PlainRoute
from polybus.model.identity import ANONYMOUS
from polybus.model.limits import Limits
from polybus.store.memory.memory_store import MemoryStore

MANY = 1 << 20


class QuietLog:
    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...


class NullPipe:
    """A connection whose peer takes everything."""

    peer = "bench"
    identity = ANONYMOUS
    is_unix = False
    certificate_digest = b""
    output = None

    def write(self, data: bytes) -> None: ...
    def write_many(self, chunks: list[bytes]) -> None: ...
    def backlog_bytes(self) -> int:
        return 0

    def unconfirmed_bytes(self) -> int:
        return 0

    def use_plain_route(self, route: PlainRoute) -> None: ...
    def pause_reading(self) -> None: ...
    def watch_hangup(self, hung_up: Callable[[], None]) -> None: ...
    def resume_reading(self) -> None: ...
    def redeliver(self) -> None: ...
    def has_failed(self) -> bool:
        return False

    def retain_slot(self) -> None: ...
    def release_slot(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class InProcessBus:
    """A broker with durable topics; callbacks of the loop run in `turn`."""

    def __init__(self) -> None:
        limits = Limits(
            max_topics=MANY, max_subscriptions_per_connection=MANY, user_share=1, admin_reserve=0
        )
        self._steps: deque[Callable[[], None]] = deque()
        self.broker = Broker(
            limits, time.monotonic, self._steps.append, QuietLog(), wall_ns=time.time_ns
        )
        self.store = MemoryStore()
        attach_store(self.broker, self.store, self._steps.append, self._run_blocking)
        self._encoding = RqueueEncoding(self.broker.new_encoding_number(), 1 << 20)

    def connect(self) -> Connection:
        return self.broker.join("rqueue", NullPipe(), self._encoding)

    def create_topic(self, name: str) -> None:
        durable = durable_bus(self.broker)
        assert durable is not None
        reservation, _ = durable.names.reserve_for_bus(ANONYMOUS, name)
        assert isinstance(reservation, NameReservation)
        durable.names.complete(reservation, self.store.create(name, 1, {}), 1)

    def turn(self) -> None:
        while self._steps:
            self._steps.popleft()()

    def close(self) -> None:
        durable = durable_bus(self.broker)
        assert durable is not None
        durable.close()
        self.store.close()

    def _run_blocking(self, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        self._steps.append(lambda: then(future))
