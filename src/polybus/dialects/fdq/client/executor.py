"""Executors: threads that run the handler, each with its own key-ordered queue.

A thread takes the queue's lock once per message, to end one run and begin the next. The acker
gives up a run that exceeds its timeout: the run has failed, another thread continues with the
queue, and the old thread ends when its handler returns.

`PoisonGuard` protects against messages that kill their consumer. The messages that a dead
consumer had fetched are suspect: any of them may have killed it. Suspect messages run one at a
time, and the consumer reports each to the bus before it starts. The bus counts a failure for
each message that was running when a consumer dies. With two at a time, a deadly message would
take another one with it on every death, until that one becomes a dead letter, too.
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
    from polybus.dialects.fdq.client.consumer import ConsumeOptions
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import HandlerRun, QueuedRows

log = logging.getLogger("polybus.fdq")

FREE_EVERY = 32  # rows, between two reports of free room to the fetcher
MAX_REASON = 500  # characters in a header of the dead letter
LEASE_POLL_S = 0.05
GUARD_POLL_S = 0.05  # how often a waiting run checks whether the consumer is closing
# Hung threads of one executor. Each keeps its stack and its locks. At the limit the queue waits.
MAX_HUNG = 16

# True inside a handler, which must not wait for its own end.
IN_HANDLER: contextvars.ContextVar[bool] = contextvars.ContextVar("in_handler", default=False)
NOT_RUN = object()


class WakeSignal:
    """Wakes the acker, at the end of its delay or, if urgent, at once."""

    def __init__(self) -> None:
        self.is_waiting = False  # cheap enough to read for every message
        self._event = Event()
        self._urgent = Event()

    def wake(self) -> None:
        self._event.set()

    def wake_urgently(self) -> None:
        """Wake the waiting thread and skip its delay, because another thread waits for it."""
        self._urgent.set()
        self._event.set()

    def wait(self, timeout_s: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait for a wake-up unless there is work already.

        `unless` is called after `is_waiting` is set, so that no event in between is missed.
        """
        self.is_waiting = True
        if not unless():
            self._event.wait(timeout_s)
        self._event.clear()
        self.is_waiting = False

    def wait_urgent(self, timeout_s: float) -> None:
        self._urgent.wait(timeout_s)
        self._urgent.clear()


class PoisonGuard:
    """Runs suspect messages one at a time, each after `report_start`."""

    def __init__(self, report_start: Callable[[HandlerRun], None], stopping: Event) -> None:
        self._report_start = report_start
        self._stopping = stopping
        self._changed = Condition()
        self._run: HandlerRun | None = None

    def begin(self, run: HandlerRun) -> None:
        """Wait for the previous suspect run, then report this one.

        Raises `ConsumerClosing` if the consumer closes before.
        """
        with self._changed:
            while self._run is not None:
                self._check_running()
                self._changed.wait(GUARD_POLL_S)
            self._check_running()
            self._run = run
        self._report_start(run)

    def end(self, run: HandlerRun) -> None:
        """Let the next suspect run begin. Does nothing if `run` is not the current one."""
        if self._run is run:
            with self._changed:
                self._run = None
                self._changed.notify()

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise ConsumerClosing


class Executor:
    def __init__(
        self,
        index: int,
        options: ConsumeOptions,
        member: GroupMember,
        *,
        wake_signal: WakeSignal,
        guard: PoisonGuard,
        on_free: Callable[[int], None],
    ) -> None:
        self.index = index
        self.queue = KeyOrderedQueue(index)
        self.lock = Lock()
        self.changed = Condition(self.lock)
        self.is_stopping = False
        self.hung = 0
        self._options = options
        self._member = member
        self._wake_signal = wake_signal
        self._guard = guard
        self._on_free = on_free

    # --- called by other threads

    def start(self) -> None:
        name = f"polybus-fdq-{self._options.topic}-{self.index}"
        Thread(target=self._main, name=name, daemon=True).start()

    def push(self, queued: Iterable[QueuedRows]) -> None:
        with self.lock:
            self.queue.push(queued)
            self.changed.notify()

    def retry(self, run: HandlerRun) -> None:
        with self.lock:
            self.queue.retry(run)
            self.changed.notify()

    def schedule_followers(self, run: HandlerRun, runs: list[HandlerRun]) -> HandlerRun | None:
        with self.lock:
            follower = self.queue.schedule_followers(run, runs)
            self.changed.notify()
            return follower

    def refresh(self, *, is_slow: bool = False) -> None:
        """Drop runs of closed shards and look for a run that can start now.

        `is_slow` parks the queued rows, because the current run takes long.
        """
        with self.lock:
            self.queue.drop_closed()
            if is_slow:
                self.queue.park_pending()
            self.changed.notify()
            freed, self.queue.freed_rows = self.queue.freed_rows, 0
        if freed:
            self._on_free(freed)

    def give_up(self, run: HandlerRun, reason: str) -> bool:
        """Fail a run that has exceeded its timeout and start another thread.

        Returns False if the run has ended, or if `MAX_HUNG` threads hang already.
        """
        with self.lock:
            may_start = self.hung < MAX_HUNG
            # Last runs may have gone on to their next message since the caller looked.
            if time.monotonic() - run.started_s <= self._options.handler_timeout_s:
                return False
            # A consumer that is leaving starts no more runs, so it needs no other thread.
            if not (may_start or self._member.is_leaving):
                return False
            if not self.queue.fail(run, reason, is_given_up=True):
                return False
            self.hung += 1
        self._guard.end(run)
        if may_start:
            self.start()
        return True

    def abandon(self, reason: str) -> HandlerRun | None:
        """Fail the current run of a consumer that is leaving. Returns the run, if any."""
        with self.lock:
            run = self.queue.current
            has_begun = run is not None and run.started_s < math.inf
            if run is None or not has_begun:
                return None
            if not self.queue.fail(run, reason, is_given_up=True):
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
        topic, handler, index = self._options.topic, self._options.handler, self.index
        run: HandlerRun | None = None
        reason: Any = None
        while True:
            # One lock per message: it ends the last run and begins the next.
            with self.lock:
                run = self._next_run(run, reason)
            if run is None:
                return
            reason = None
            if run.offset < run.shard.suspect_to:
                try:
                    self._guard.begin(run)
                    run.started_s = time.monotonic()
                except (PolybusError, ConsumerClosing):
                    # The shard is lost. Close it, or later messages of the key would overtake
                    # this one.
                    run.shard.is_open = False
                if not run.shard.is_open:
                    reason = NOT_RUN
                    continue
            try:
                handler(run.build_argument(topic, index))
            except BaseException as error:  # also SystemExit: it ends the run, not the consumer
                place = topic, run.shard.number, run.offset
                log.warning("%s: handler failed at shard %s, offset %s", *place, exc_info=True)
                reason = format_reason(error)

    def _next_run(self, ended: HandlerRun | None, reason: Any) -> HandlerRun | None:
        """End a run, then wait for the next and begin it. The caller holds the lock.

        `reason` is None for a success. Returns None if the thread must end.
        """
        queue = self.queue
        if ended is not None and not self._end_run(ended, reason):
            self.hung -= 1  # it was given up, and another thread has taken over
            return None
        while not self.is_stopping:
            now_s = time.monotonic()
            has_lease = now_s <= self._member.lease_until_s
            run = queue.begin(now_s) if has_lease else None
            # A busy thread reports free room only now and then.
            if queue.freed_rows >= (1 if run is None else FREE_EVERY):
                freed, queue.freed_rows = queue.freed_rows, 0
                self._on_free(freed)
            if run is not None:
                return run
            self._wake_signal.wake()
            self.changed.wait(None if has_lease else LEASE_POLL_S)
        return None

    def _end_run(self, ended: HandlerRun, reason: Any) -> bool:
        """End a run. Returns False if it was given up."""
        queue = self.queue
        if ended.offset < ended.shard.suspect_to:
            self._guard.end(ended)
        if reason is None:
            if self._wake_signal.is_waiting:
                self._wake_signal.wake()
            is_current = queue.finish(ended)
        elif reason is NOT_RUN:
            is_current = queue.cancel(ended)
        else:
            is_current = queue.fail(ended, reason)
        # A run that keeps its blocked key has failed. Last runs are reported together.
        if ended.blocked_key is not None and queue.current is None:
            self._wake_signal.wake_urgently()
        return is_current


def format_reason(error: BaseException) -> str:
    """Return the reason of a failed run in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "the error has no text"
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_REASON] if text else name
