"""Subscribers on a store in memory, without a loop: the test runs every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from polybus.bus.counters import Counters
from polybus.bus.policy import Policy
from polybus.bus.quotas import Quotas
from polybus.bus.shares import Shares
from polybus.dialects.pirate.codec import GET, HELLO, PUT, SUB, UNSUB, ClientRequest
from polybus.dialects.pirate.limits import PirateLimits
from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext
from polybus.dialects.pirate.server.subscription_table import StoredSubscribers, Subscription
from polybus.durable.topic_names import TopicNames
from polybus.durable.topic_registry import DurableTopics
from polybus.model.commit import Commit
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import Limits, QuotaLimits
from polybus.store.contract import Store
from polybus.store.memory.memory_store import MemoryStore

WAIT_S = 20
EMPTY = Commit()


class Quiet:
    """A log without output."""

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...


class MemorySubscribers:
    """A bus with durable subscribers. `ask` returns the result of a request."""

    def __init__(self, store: Store | None = None, **limits: Any) -> None:
        self.store = store or MemoryStore()
        self.now_s = 100.0
        self.ephemeral: set[bytes] = set()
        self.counters = Counters()
        self.policy = Policy()
        self._steps: deque[Callable[[], None]] = deque()
        self._futures: list[Future[Any]] = []
        durable = self.durable = DurableTopics(self.store)
        quotas = Quotas(QuotaLimits(), self.counters, Quiet())
        self.binding = TopicNames(durable, self.policy, quotas, self.ephemeral.__contains__)
        self.context = SubscriberContext(
            durable,
            self.binding,
            self.policy,
            self.counters,
            Shares(Limits(user_share=1, admin_reserve=0), self.policy.is_admin),
            replace(PirateLimits(), **limits),
            self._steps.append,
            self._work,
            lambda: self.now_s,
            lambda: 5_000_000,
            Quiet(),
        )
        self.bus = DurableSubscribers(self.context, StoredSubscribers(self.context))
        self.settle()

    def again(self, **limits: Any) -> MemorySubscribers:
        """Return the bus after a restart on the same store."""
        return MemorySubscribers(self.store, **limits)

    def _work(self, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        self._steps.append(lambda: then(future))

    def settle(self) -> None:
        """Run all due steps, and those that follow."""
        while True:
            while self._steps:
                self._steps.popleft()()
            done: Future[Any] = self.store.commit(EMPTY)
            wait([done], WAIT_S)
            if not self._steps:
                return

    def send(self, request: ClientRequest, caller: Identity = ANONYMOUS) -> list[Any]:
        """Send a request without waiting. Its result is appended to the returned list."""
        results: list[Any] = []
        self.bus.handlers[request.op](request, caller, results.append)
        return results

    def ask(self, request: ClientRequest, caller: Identity = ANONYMOUS) -> Any:
        results = self.send(request, caller)
        self.bus.on_turn_end()
        self.settle()
        (answer,) = results
        return answer

    def subscriptions(self) -> list[Subscription]:
        return list(self.bus.table)

    def collect(self) -> None:
        self.now_s += 1
        self.bus.tick(self.now_s)
        self.settle()
        self.now_s += 1
        self.bus.tick(self.now_s)
        self.settle()

    def client(self, name: bytes = b"c") -> MemoryClient:
        return MemoryClient(self, name)

    def bodies(self, topic: str) -> list[int]:
        """Return the ids of the stored messages."""
        known = self.durable.get(topic)
        rows = self.store.read(known.number, "all", 0)
        ids = memoryview(rows.ids).cast("B").cast("q")
        return list(ids)


class MemoryClient:
    """A client with correct counters."""

    def __init__(self, world: MemorySubscribers, name: bytes) -> None:
        self.world, self.name = world, name
        self.counter = 0
        self.epoch, _ = world.ask(ClientRequest(HELLO, name, 0, hash(name) & 0xFFFF))

    def next(self) -> int:
        self.counter += 1
        return self.counter

    def sub(self, topic: str, caller: Identity = ANONYMOUS) -> Any:
        return self.world.ask(ClientRequest(SUB, self.name, self.epoch, self.next(), topic), caller)

    def unsub(self, topic: str) -> Any:
        return self.world.ask(ClientRequest(UNSUB, self.name, self.epoch, self.next(), topic))

    def put(self, topic: str, *body: bytes, caller: Identity = ANONYMOUS) -> Any:
        request = ClientRequest(PUT, self.name, self.epoch, self.next(), topic, body or (b"x",))
        return self.world.ask(request, caller)

    def get(self, topic: str, last: int = 0, caller: Identity = ANONYMOUS) -> Any:
        request = ClientRequest(GET, self.name, self.epoch, 0, topic, (), last)
        return self.world.ask(request, caller)
