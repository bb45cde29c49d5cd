"""The thread that appends delayed messages when they are due.

It knows the next due time alone, and sleeps until then. A topic whose messages cannot be
appended (the disk is full, the topic is damaged) is tried again with growing pauses, and has
the alarm `delayed_blocked` until it succeeds; other topics go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.durable.delayed_messages import NEVER_NS
from polybus.errors import Conflict, DoesNotExist, PolybusError, ShardSealed, StoreClosed

if TYPE_CHECKING:
    from polybus.bus.alarms import Alarms
    from polybus.durable.topic_registry import DurableTopics

ALARM: Final = "delayed_blocked"
# The wall clock may be set, so a sleep is never longer.
MAX_SLEEP_S: Final = 1.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0
NS_PER_S: Final = 1_000_000_000
# The shards or the topic have just changed: the next try sees the change.
TRANSIENT: Final = (Conflict, DoesNotExist, ShardSealed)

_log = logging.getLogger("polybus.durable")


class BlockedTopic(NamedTuple):
    name: str
    retry_s: float
    pause_s: float


class DelayScheduler:
    def __init__(
        self,
        topics: DurableTopics,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        alarms: Alarms,
    ) -> None:
        self._topics = topics
        self._delayed = topics.delayed
        self._clock = clock
        self._wall_ns = wall_ns
        self._alarms = alarms
        self._changed = Condition()
        self._is_earlier = False
        self._is_stopped = False
        self._blocked: dict[int, BlockedTopic] = {}
        self._thread = Thread(target=self._run, name="polybus-delays", daemon=True)

    def start(self) -> None:
        self._delayed.on_earlier = self._wake
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The messages stay in the store."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join()

    def run_once(self) -> None:
        """Make one commit for each topic with due messages, except for those that must wait."""
        now_s = self._clock()
        for number in self._delayed.due_topics(self._wall_ns()):
            blocked = self._blocked.get(number)
            if self._is_stopped or (blocked is not None and now_s < blocked.retry_s):
                continue
            try:
                self._delayed.append_due(number, self._wall_ns())
            except StoreClosed:
                raise
            except Exception as error:  # one topic must not stop the others
                self._block(number, error, FIRST_PAUSE_S if blocked is None else blocked.pause_s)
            else:
                if blocked is not None:
                    del self._blocked[number]
                    self._alarms.clear_alarm(ALARM, blocked.name)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_earlier or self._is_stopped, self._sleep_s()
                )
                if self._is_stopped:
                    return
                self._is_earlier = False
            try:
                self.run_once()
            except StoreClosed:
                return

    def _sleep_s(self) -> float | None:
        """Return the time until a topic is due or a blocked one is tried again; None: never."""
        now_ns, next_due_ns = self._wall_ns(), self._delayed.next_due_ns()
        if next_due_ns == NEVER_NS:
            return None
        due_s = max(0.0, (next_due_ns - now_ns) / NS_PER_S)
        due = self._delayed.due_topics(now_ns) if self._blocked and not due_s else ()
        if due and all(number in self._blocked for number in due):
            # Not of all blocked topics: after a step back of the clock one may not be due.
            retry_s = min(self._blocked[number].retry_s for number in due)
            due_s = max(0.0, retry_s - self._clock())
        return min(MAX_SLEEP_S, due_s)

    def _wake(self) -> None:
        with self._changed:
            self._is_earlier = True
            self._changed.notify()

    def _block(self, number: int, error: Exception, pause_s: float) -> None:
        topic, known = self._topics.find_by_number(number), self._blocked.get(number)
        name = topic.name if topic else f"number {number}"
        if known is not None:
            name = known.name  # its alarm has this name, also after the topic was dropped
        retry_s = self._clock() + pause_s
        self._blocked[number] = BlockedTopic(name, retry_s, min(2 * pause_s, MAX_PAUSE_S))
        if isinstance(error, TRANSIENT):
            return
        if not isinstance(error, PolybusError):
            _log.error("due messages of %s cannot be appended", name, exc_info=error)
        self._alarms.raise_alarm(ALARM, name, f"due messages cannot be appended: {error}")
