"""Consuming: handlers that are called for the messages of topics, shared with a group.

    with fdq.Consumer() as consumer:
        consumer.consume("orders", "billing-1", handle)
        consumer.wait()

A handler that returns acks its message; one that raises gets it again, after a pause that
holds back only the messages of the same key. Everything else is in `consume`.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
import weakref
from collections.abc import Callable
from threading import Condition, Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polybus.dialects.fdq.client import fork_guard
from polybus.dialects.fdq.client.consume_options import ConsumeOptions
from polybus.dialects.fdq.client.executor import IN_HANDLER
from polybus.dialects.fdq.client.group_subscription import GroupSubscription
from polybus.dialects.fdq.client.retry_schedule import Backoff
from polybus.errors import UsageError
from polybus.native import bus_client as buses

if TYPE_CHECKING:
    from polybus.native import ClientOptions

AT_EXIT_S = 5.0  # for those whom nobody has closed
CLOSE_CONNECT_TIMEOUT_S = 2.0  # whoever closes does not wait long for a bus that is away
LEAVE_S = 2.0  # behind the time that `close` was given: for the last acks, if there is a bus
# A handler that computes must not keep the threads that fetch, ack and give signs of life
# from their turns for long: Python's default makes each wait five milliseconds.
DEFAULT_SWITCH_S = 0.005
SWITCH_S = 0.0005


class Consumer:
    """A connection to a bus, for any number of `consume`s. Its threads are its own."""

    def __init__(
        self,
        url: str | None = None,
        *,
        heartbeat_s: float = 2.0,
        dead_s: float = 5.0,
        options: ClientOptions | None = None,
    ) -> None:
        """Is taken for dead after `dead_s` without a sign of life, of which it gives one
        every `heartbeat_s` at least."""
        self._pid = fork_guard.pid
        self._heartbeat_s = heartbeat_s
        self._dead_s = dead_s
        self._bus = buses.connect(url, options)
        self._lock = Lock()
        self._changed = Condition()  # something has ended
        self._subscriptions: list[GroupSubscription] = []
        self._is_closed = False
        _OPEN.add(self)

    def consume(
        self,
        topic: str,
        name: str,
        handler: Callable[[Any], Any],
        group: str = "default",
        *,
        start: str = "earliest",
        executors: int = 1,
        batch: bool = False,
        max_deliver: int = 5,
        handler_timeout_s: float = 300.0,
        create: bool = True,
        first_backoff_s: float = 0.1,
        last_backoff_s: float = 30.0,
    ) -> None:
        """Calls `handler(envelope)` for messages of the topic, on threads; returns at once.

        `name` is unique in the group: a newer consumer of the same name ends this one
        (`Fenced`). `executors` handlers run side by side; messages of one key meet the
        same one, in order. `max_deliver` failed runs make a message a dead letter, in
        the topic TOPIC.dlq; a run over `handler_timeout_s` has failed. `batch=True`: the
        handler gets Arrow batches of neighbouring messages of one shard instead, and
        acks or fails all of them. `start` is for a group that is new. Without `create` a
        topic that is not there is `DoesNotExist`.
        """
        terms = ConsumeOptions(
            topic,
            name,
            handler,
            group,
            start,
            executors,
            batch,
            max_deliver,
            handler_timeout_s,
            create,
            self._heartbeat_s,
            self._dead_s,
            Backoff(first_backoff_s, last_backoff_s),
        )
        fork_guard.check_process(self._pid, "consumer")
        with self._lock:
            if self._is_closed:
                raise UsageError("this consumer was closed")
            if sys.getswitchinterval() == DEFAULT_SWITCH_S:
                sys.setswitchinterval(SWITCH_S)
            consumption = GroupSubscription(self._bus, terms, self._on_end)
            consumption.start()
            self._subscriptions.append(consumption)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all has ended, or any of it by an error, which is raised then. False if the
        time was up before."""
        fork_guard.check_process(self._pid, "consumer")
        with self._changed:
            return self._changed.wait_for(self._has_ended, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Lets handlers finish that are running, acks, and hands the shards over.

        What was fetched and not begun is for others. Handlers that have not come back
        after `timeout_s` are not waited for: they have failed. A handler may call this: then
        it ends when the handler has.
        """
        if self._pid != fork_guard.pid:  # a fork's child has none of the threads
            return
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            consumptions = list(self._subscriptions)
        self._bus.hurry(CLOSE_CONNECT_TIMEOUT_S)
        for one in consumptions:
            one.request_close(deadline_s)
        if IN_HANDLER.get():
            return
        self._await_end(consumptions, deadline_s + LEAVE_S)
        self._bus.close()
        self._await_end(consumptions, deadline_s + 2 * LEAVE_S)  # who waited for the bus ends now
        _OPEN.discard(self)

    def _on_end(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        consumptions = list(self._subscriptions)
        ended = [one for one in consumptions if one.ended.is_set()]
        for one in ended:
            if one.error is not None:
                raise one.error
        return len(ended) == len(consumptions)

    def _await_end(self, consumptions: list[GroupSubscription], deadline_s: float) -> None:
        for one in consumptions:
            left_s = max(0.0, deadline_s - time.monotonic())
            one.ended.wait(None if left_s == math.inf else left_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_OPEN: weakref.WeakSet[Consumer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends leaves its groups, so that others need not wait for its death."""
    for consumer in list(_OPEN):
        consumer.close(AT_EXIT_S)
