"""A consumer: handlers that run for the messages of topics, shared within a group.

    with fdq.Consumer() as consumer:
        consumer.consume("orders", "billing-1", handle)
        consumer.wait()

A handler that returns acks its message. A message whose handler raises is delivered again
after a backoff that delays only messages of the same key. See `Consumer.consume`.

Threads of one `consume` call (`GroupSubscription`):

    heartbeat ─ fetcher ─▶ executors (a key-ordered queue each) ─▶ acker: acks, retries, timeouts
                   ▲                                                  │
                   └─────────────── assigned shards ◀─────────────────┘

A subscription ends when it is closed, or by an error that a retry cannot fix: `Fenced`, a
topic that was dropped, a right that was revoked. It does not wait for runs in that case.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Self

from polybus.dialects.fdq.client import fork_guard
from polybus.dialects.fdq.client.acker import Acker, Backoff
from polybus.dialects.fdq.client.assigned_shards import MAX_EXECUTORS, AssignedShards
from polybus.dialects.fdq.client.executor import IN_HANDLER, Executor, PoisonGuard, WakeSignal
from polybus.dialects.fdq.client.fetcher import FetchBuffer, Fetcher, create_window
from polybus.dialects.fdq.client.group_member import RETRYABLE, ConsumerClosing, GroupMember
from polybus.dialects.fdq.client.transaction import TransactionCommitter
from polybus.errors import Expired, UsageError
from polybus.model import topic_name
from polybus.native import bus_client as buses
from polybus.native.protocol.requests import GroupHeartbeat

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.handler_run import HandlerRun
    from polybus.native import Client, ClientOptions

log = logging.getLogger("polybus.fdq")

STARTS = ("earliest", "latest")
MAX_NAME_BYTES = 128  # of a consumer's and a group's name
MAX_RUNNING = 1024  # offsets per shard that a heartbeat may carry; a batch may have more
AT_EXIT_S = 5.0  # for consumers that the program has not closed
CLOSE_CONNECT_TIMEOUT_S = 2.0  # a closing consumer does not wait long for an unreachable bus
LEAVE_S = 2.0  # for the last acks, after the timeout of `close`
# A handler that computes must not keep the other threads from the GIL for long: Python's
# default makes each of them wait five milliseconds.
DEFAULT_SWITCH_S = 0.005
SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """The arguments of one `consume` call, checked before any thread starts."""

    topic: str
    name: str
    handler: Callable[[Any], Any]
    group: str = "default"
    start: str = "earliest"
    executors: int = 1
    batch: bool = False
    max_deliver: int = 5
    handler_timeout_s: float = 300.0
    create: bool = True
    heartbeat_s: float = 2.0
    dead_s: float = 5.0
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        if not callable(self.handler):
            raise UsageError(f"handler must be callable, got {type(self.handler).__name__}")
        topic_name.check_topic_name(self.topic)
        for label, name in (("name", self.name), ("group", self.group)):
            if not _is_name(name):
                raise UsageError(f"{label} must be text of 1 to {MAX_NAME_BYTES} bytes")
        if self.start not in STARTS:
            raise UsageError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        if not _is_integer(self.executors) or not 1 <= self.executors <= MAX_EXECUTORS:
            raise UsageError(f"executors must be 1 to {MAX_EXECUTORS}, got {self.executors!r}")
        if not _is_integer(self.max_deliver) or self.max_deliver < 1:
            raise UsageError(f"max_deliver must be at least 1, got {self.max_deliver!r}")
        if not self.handler_timeout_s > 0:
            raise UsageError(f"handler_timeout_s must be above 0, got {self.handler_timeout_s!r}")
        if not 0 < self.heartbeat_s < self.dead_s < math.inf:
            raise UsageError(
                "heartbeat_s must be above 0 and below dead_s,"
                f" got heartbeat_s {self.heartbeat_s!r} and dead_s {self.dead_s!r}"
            )


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and 1 <= len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, int)


class GroupSubscription:
    """One `consume` call: its threads, from their start to their end."""

    def __init__(self, bus: Client, options: ConsumeOptions, on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.ended = Event()
        self._on_end = on_end
        self._options = options
        self._wake_signal = WakeSignal()
        self._shards = AssignedShards()
        self._buffer = FetchBuffer(create_window(options))
        self._member = GroupMember(bus, options, self._on_lost, time.monotonic)
        self._stopping = Event()
        guard = PoisonGuard(self._report_start, self._stopping)
        self._executors = [
            Executor(
                index,
                options,
                self._member,
                wake_signal=self._wake_signal,
                guard=guard,
                on_free=self._buffer.free,
            )
            for index in range(options.executors)
        ]
        parts = options, self._member, self._shards, self._executors
        self._acker = Acker(*parts, self._wake_signal)
        committer = TransactionCommitter(bus, self._member)
        self._fetcher = Fetcher(*parts, committer, self._buffer, self._wake_signal.wake_urgently)
        self._heartbeat_lock = Lock()
        self._lock = Lock()
        self._deadline_s = math.inf
        self._is_reachable = True  # False once the warning was logged

    def start(self) -> None:
        """Join the group and start the threads. Raises the error of the join."""
        self._member.join()
        for executor in self._executors:
            executor.start()
        for name, main in (
            ("fetch", self._fetch_loop),
            ("beat", self._heartbeat_loop),
            ("ack", self._ack_loop),
        ):
            label = f"polybus-fdq-{self._options.topic}-{name}"
            Thread(target=self._run_thread, args=(main,), name=label, daemon=True).start()

    def request_close(self, deadline_s: float = math.inf) -> None:
        """Begin to close. `ended` is set when it has closed, at `deadline_s` at the latest."""
        with self._lock:
            self._deadline_s = min(self._deadline_s, deadline_s)
        # First of all, so that no thread joins again while the shards close.
        self._member.is_leaving = True
        self._shards.close()
        self._stopping.set()
        self._buffer.close()
        self._wake_signal.wake_urgently()

    # --- threads

    def _run_thread(self, main: Callable[[], None]) -> None:
        try:
            main()
        except ConsumerClosing:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        options = self._options
        with self._lock:
            if self.error is not None or self._stopping.is_set():
                log.info("%s: error while stopping: %s", options.name, error)
                return
            self.error = error
        log.error("%s stops consuming %s: %s", options.name, options.topic, error)
        log.debug("traceback", exc_info=error)
        self.request_close(0.0)

    def _fetch_loop(self) -> None:
        while not self._stopping.is_set():
            self._fetcher.fetch_once()

    def _heartbeat_loop(self) -> None:
        while not self._stopping.wait(self._options.heartbeat_s):
            self._send_heartbeat()
        # Runs that are still active keep their shards until they have ended.
        while not self.ended.wait(self._options.heartbeat_s) and self.error is None:
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        try:
            with self._heartbeat_lock:
                self._send_running()
            self._is_reachable = True
        except Expired:
            pass
        except RETRYABLE as error:
            if self._is_reachable:
                options = self._options
                log.warning("%s of %s: heartbeat failed: %s", options.name, options.topic, error)
            self._is_reachable = False

    def _report_start(self, run: HandlerRun) -> None:
        """Report the running offsets, including `run`, before it starts."""

        def send() -> None:
            # A closing consumer starts nothing and does not wait for an unreachable bus.
            if self._stopping.is_set():
                raise ConsumerClosing
            self._send_running(run)

        with self._heartbeat_lock:
            self._member.retry(send)

    def _send_running(self, beginning: HandlerRun | None = None) -> None:
        """Send a heartbeat with the running offsets. Callers hold `_heartbeat_lock`.

        The lock keeps the reports in order. Other runs that wait to be reported are left out:
        if the consumer died now, they would count as failed without having begun.
        """
        runs = [executor.queue.current for executor in self._executors]
        begun = [run for run in runs if run and (run.started_s < math.inf or run is beginning)]
        running: dict[str, list[int]] = {}
        for run in begun:
            if run.shard.is_held:
                running.setdefault(str(run.shard.number), []).extend(run.offsets)
        limited = {shard: offsets[:MAX_RUNNING] for shard, offsets in running.items()}
        response = self._member.call(GroupHeartbeat, running=limited)
        self._fetcher.release_shards(response["release"])

    def _ack_loop(self) -> None:
        try:
            self._acker.run(self._stopping)
            self._acker.drain(lambda: self._deadline_s)
            if self.error is None:
                self._acker.leave(lambda: self._deadline_s)
        except BaseException as error:
            self._fail(error)
        finally:
            # Ends threads that still wait for an unreachable bus.
            self._member.closing.set()
            for executor in self._executors:
                executor.stop()
            self.ended.set()
            self._on_end()

    def _on_lost(self) -> None:
        self._shards.drop_all()
        for executor in self._executors:
            executor.refresh()


class Consumer:
    """A connection to a bus, for any number of `consume` calls, each with its own threads."""

    def __init__(
        self,
        url: str | None = None,
        *,
        heartbeat_s: float = 2.0,
        dead_s: float = 5.0,
        options: ClientOptions | None = None,
    ) -> None:
        """Connect. The bus declares the consumer dead after `dead_s` without a heartbeat.

        The consumer sends a heartbeat at least every `heartbeat_s`.
        """
        self._pid = fork_guard.pid
        self._heartbeat_s = heartbeat_s
        self._dead_s = dead_s
        self._bus = buses.connect(url, options)
        self._lock = Lock()
        self._changed = Condition()  # notified when a subscription has ended
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
        """Run `handler(envelope)` on threads for messages of the topic. Returns at once.

        `name` must be unique in the group: a newer consumer of the same name ends this one
        (`Fenced`). `executors` handlers run concurrently; messages of one key go to the same
        one, in order. After `max_deliver` failed runs a message becomes a dead letter in the
        topic TOPIC.dlq. A run that exceeds `handler_timeout_s` has failed. With `batch=True`
        the handler gets Arrow batches of consecutive messages of one shard, and acks or fails
        all of them. `start` applies to a new group. Without `create` a missing topic raises
        `DoesNotExist`.
        """
        options = ConsumeOptions(
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
                raise UsageError("consumer is closed")
            if sys.getswitchinterval() == DEFAULT_SWITCH_S:
                sys.setswitchinterval(SWITCH_S)
            subscription = GroupSubscription(self._bus, options, self._on_end)
            subscription.start()
            self._subscriptions.append(subscription)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all subscriptions have ended. Returns False on a timeout.

        Raises the error of a subscription that has failed.
        """
        fork_guard.check_process(self._pid, "consumer")
        with self._changed:
            return self._changed.wait_for(self._has_ended, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Let active handlers finish, ack, and hand the shards over to other members.

        Messages that were fetched and not begun go to other members. Handlers that have not
        returned after `timeout_s` have failed. A handler may call this; the consumer then
        closes after the handler returns.
        """
        if self._pid != fork_guard.pid:  # the threads exist only in the parent of the fork
            return
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            subscriptions = list(self._subscriptions)
        self._bus.hurry(CLOSE_CONNECT_TIMEOUT_S)
        for subscription in subscriptions:
            subscription.request_close(deadline_s)
        if IN_HANDLER.get():
            return
        self._await_end(subscriptions, deadline_s + LEAVE_S)
        self._bus.close()
        # Closing the connection ends threads that still wait for the bus.
        self._await_end(subscriptions, deadline_s + 2 * LEAVE_S)
        _OPEN.discard(self)

    def _on_end(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        subscriptions = list(self._subscriptions)
        ended = [subscription for subscription in subscriptions if subscription.ended.is_set()]
        for subscription in ended:
            if subscription.error is not None:
                raise subscription.error
        return len(ended) == len(subscriptions)

    def _await_end(self, subscriptions: list[GroupSubscription], deadline_s: float) -> None:
        for subscription in subscriptions:
            left_s = max(0.0, deadline_s - time.monotonic())
            subscription.ended.wait(None if left_s == math.inf else left_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_OPEN: weakref.WeakSet[Consumer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Leave all groups at exit, so that other members need not wait for `dead_s`."""
    for consumer in list(_OPEN):
        consumer.close(AT_EXIT_S)
