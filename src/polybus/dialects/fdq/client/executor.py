"""Threads that run the handler, each on a lane of its own.

A thread takes the lane's lock once a message: to end the last one and to begin the next.
A run that takes too long is given up by the keeper: it has failed, another thread goes
on with the lane, and the old one finds when it comes back that it is not needed any more.
"""

from __future__ import annotations

import contextvars
import logging
import math
import time
from collections.abc import Callable, Iterable
from threading import Condition, Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from polybus.dialects.fdq.client.group_member import ConsumerClosing
from polybus.dialects.fdq.client.key_queue import KeyOrderedQueue
from polybus.errors import PolybusError

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.consume_options import ConsumeOptions
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import HandlerRun, QueuedRows
    from polybus.dialects.fdq.client.poison_guard import PoisonGuard

log = logging.getLogger("polybus.fdq")

FREE_EVERY = 32  # rows, until room for more is told
MAX_REASON = 500  # characters of a dead letter's header
LEASE_POLL_S = 0.05
# Threads of a lane that hang: each keeps its stack and whatever it holds. Then the lane waits.
MAX_HUNG = 16

# Is this a handler that is running? It must not wait for itself.
IN_HANDLER: contextvars.ContextVar[bool] = contextvars.ContextVar("in_handler", default=False)
NOT_RUN = object()


class WakeSignal:
    """Wakes one thread that sleeps between its rounds, and lingers for more to do in one."""

    def __init__(self) -> None:
        self.is_waiting = False  # a look at it is cheap enough for every message
        self._event = Event()
        self._urgent = Event()

    def wake(self) -> None:
        self._event.set()

    def wake_urgently(self) -> None:
        """Somebody waits for it."""
        self._urgent.set()
        self._event.set()

    def wait(self, timeout_s: float, unless: Callable[[], bool] = lambda: False) -> None:
        """What happens between the last look and this one must not be slept over: `unless`
        is asked after whoever sees to it would ring."""
        self.is_waiting = True
        if not unless():
            self._event.wait(timeout_s)
        self._event.clear()
        self.is_waiting = False

    def wait_urgent(self, timeout_s: float) -> None:
        self._urgent.wait(timeout_s)
        self._urgent.clear()


class Executor:
    def __init__(
        self,
        index: int,
        terms: ConsumeOptions,
        member: GroupMember,
        *,
        alarm: WakeSignal,
        care: PoisonGuard,
        on_free: Callable[[int], None],
    ) -> None:
        self.index = index
        self.queue = KeyOrderedQueue(index)
        self.lock = Lock()
        self.changed = Condition(self.lock)
        self.is_stopping = False
        self.hung = 0
        self._terms = terms
        self._member = member
        self._alarm = alarm
        self._care = care
        self._on_free = on_free

    # --- from other threads

    def start(self) -> None:
        name = f"polybus-fdq-{self._terms.topic}-{self.index}"
        Thread(target=self._main, name=name, daemon=True).start()

    def push(self, pieces: Iterable[QueuedRows]) -> None:
        with self.lock:
            for piece in pieces:
                self.queue.push(piece)
            self.changed.notify()

    def retry(self, run: HandlerRun) -> None:
        with self.lock:
            self.queue.retry(run)
            self.changed.notify()

    def schedule_followers(self, run: HandlerRun, runs: list[HandlerRun]) -> HandlerRun | None:
        with self.lock:
            following = self.queue.schedule_followers(run, runs)
            self.changed.notify()
            return following

    def refresh(self, *, is_slow: bool = False) -> None:
        """Something may have become possible, or is no longer wanted; or what runs takes long."""
        with self.lock:
            self.queue.drop_closed()
            if is_slow:
                self.queue.park_pending()
            self.changed.notify()
            freed, self.queue.freed_rows = self.queue.freed_rows, 0
        if freed:
            self._on_free(freed)

    def give_up(self, run: HandlerRun, reason: str) -> bool:
        """The run has taken too long: it has failed, and a new thread goes on."""
        with self.lock:
            may_start = self.hung < MAX_HUNG
            # Whoever leaves begins nothing more, and needs no other thread.
            if not (may_start or self._member.is_leaving) or not self.queue.fail(run, reason):
                return False
            self.hung += 1
        self._care.end(run)
        if may_start:
            self.start()
        return True

    def abandon(self, reason: str) -> HandlerRun | None:
        """The consumer leaves, and does not wait for what runs: that has failed."""
        with self.lock:
            run = self.queue.current
            has_begun = run is not None and run.started_s < math.inf
            if run is None or not has_begun or not self.queue.fail(run, reason):
                return None
            self.hung += 1
            return run

    def stop(self) -> None:
        with self.lock:
            self.is_stopping = True
            self.changed.notify_all()

    # --- the thread

    def _main(self) -> None:
        IN_HANDLER.set(True)
        lane, topic, index, handler = self.queue, self._terms.topic, self.index, self._terms.handler
        run: HandlerRun | None = None
        reason: Any = None
        while True:
            with self.lock:
                if run is not None and not self._end(run, reason):
                    self.hung -= 1
                    return
                run = self._begin() or self._wait_for_run()
                if lane.freed_rows >= FREE_EVERY:
                    self._report_freed()
            if run is None:
                return
            reason = None
            if run.offset < run.shard.suspect_to and not self._report_start(run):
                reason = NOT_RUN
                continue
            try:
                handler(run.build_argument(topic, index))
            except BaseException as error:  # SystemExit, too: it ends a run, not the consumer
                place = topic, run.shard.number, run.offset
                log.warning("%s: the handler failed at shard %s, offset %s", *place, exc_info=True)
                reason = format_reason(error)

    def _begin(self) -> HandlerRun | None:
        now_s = time.monotonic()
        if now_s > self._member.lease_until_s or self.is_stopping:
            return None
        return self.queue.begin(now_s)

    def _end(self, run: HandlerRun, reason: Any) -> bool:
        self._care.end(run)
        if reason is None:
            if self._alarm.is_waiting:
                self._alarm.wake()
            return self.queue.finish(run)
        if reason is NOT_RUN:
            return self.queue.cancel(run)
        self._alarm.wake_urgently()
        return self.queue.fail(run, reason)

    def _wait_for_run(self) -> HandlerRun | None:
        run = None
        while run is None and not self.is_stopping:
            self._report_freed()
            self._alarm.wake()
            has_lease = time.monotonic() <= self._member.lease_until_s
            self.changed.wait(None if has_lease else LEASE_POLL_S)
            run = self._begin()
        return run

    def _report_freed(self) -> None:
        if self.queue.freed_rows:
            self._on_free(self.queue.freed_rows)
            self.queue.freed_rows = 0

    def _report_start(self, run: HandlerRun) -> bool:
        """Told to the bus before it begins: if it ends us, the bus knows by what."""
        try:
            self._care.begin(run)
        except (PolybusError, ConsumerClosing):
            # The shard is not ours any more: what follows must not be begun before this one.
            run.shard.is_open = False
            return False
        run.started_s = time.monotonic()
        return run.shard.is_open


def format_reason(error: BaseException) -> str:
    """The reason of a failed run, in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "an error that cannot be shown"
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_REASON] if text else name
