"""One `consume(...)`: its threads, how they begin and how they end.

    heartbeat ─ fetch ─▶ executors (one lane each) ─▶ keeper: acks, retries, watch
                   ▲                                    │
                   └────────── holdings: shards ◀───────┘

It ends when it is closed, or by an error that no later try mends: `Fenced`, a topic that
is gone, a right that was taken. What then still runs is not waited for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from polybus.dialects.fdq.client.acker import Keeper
from polybus.dialects.fdq.client.assigned_shards import Holdings
from polybus.dialects.fdq.client.executor import Alarm, Executor
from polybus.dialects.fdq.client.fetcher import Buffer, Fetcher, window_for
from polybus.dialects.fdq.client.group_member import PASSING, Closing, Member
from polybus.dialects.fdq.client.poison_guard import Care
from polybus.dialects.fdq.client.transaction_commit import Commits
from polybus.errors import Expired

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.consume_options import Terms
    from polybus.dialects.fdq.client.handler_run import Run
    from polybus.native.bus_client import Bus

log = logging.getLogger("polybus.fdq")

MAX_RUNNING = 1024  # offsets of a shard that a heartbeat takes; a whole batch may be more


class Consumption:
    def __init__(self, bus: Bus, terms: Terms, on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.ended = Event()
        self._on_end = on_end
        self._terms = terms
        self._alarm = Alarm()
        self._holdings = Holdings()
        self._buffer = Buffer(window_for(terms))
        self._member = Member(bus, terms, self._on_lost, time.monotonic)
        self._stopping = Event()
        care = Care(self._announce, self._stopping)
        self._executors = [
            Executor(
                index,
                terms,
                self._member,
                alarm=self._alarm,
                care=care,
                on_free=self._buffer.free,
            )
            for index in range(terms.executors)
        ]
        parts = terms, self._member, self._holdings, self._executors
        self._keeper = Keeper(*parts, self._alarm)
        commits = Commits(bus, self._member)
        self._fetcher = Fetcher(*parts, commits, self._buffer, self._alarm.hurry)
        self._announcing = Lock()
        self._lock = Lock()
        self._deadline_s = math.inf
        self._is_heard = True  # or it was said that it is not

    def start(self) -> None:
        """Joins the group; what is wrong with that is raised here."""
        self._member.join()
        for executor in self._executors:
            executor.start()
        for name, main in (("fetch", self._fetch), ("beat", self._beat), ("keep", self._keep)):
            label = f"polybus-fdq-{self._terms.topic}-{name}"
            Thread(target=self._guarded, args=(main,), name=label, daemon=True).start()

    def request_close(self, deadline_s: float = math.inf) -> None:
        """Begins to end; `ended` says when that is done. By `deadline_s` it is, anyhow."""
        with self._lock:
            self._deadline_s = min(self._deadline_s, deadline_s)
        self._member.is_leaving = True
        self._holdings.close()
        self._stopping.set()
        self._buffer.close()
        self._alarm.hurry()

    # --- threads

    def _guarded(self, main: Callable[[], None]) -> None:
        try:
            main()
        except Closing:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        terms = self._terms
        with self._lock:
            if self.error is not None or self._stopping.is_set():
                log.info("%s, while it stops: %s", terms.name, error)
                return
            self.error = error
        log.error("%s stops consuming %s: %s", terms.name, terms.topic, error)
        log.debug("because of", exc_info=error)
        self.request_close(0.0)

    def _fetch(self) -> None:
        while not self._stopping.is_set():
            self._fetcher.round()

    def _beat(self) -> None:
        while not self._stopping.wait(self._terms.heartbeat_s):
            self._send_heartbeat()
        while not self.ended.wait(self._terms.heartbeat_s) and self.error is None:
            self._send_heartbeat()  # what still runs keeps its shard until it is done

    def _send_heartbeat(self) -> None:
        try:
            with self._announcing:
                self._tell_running()
            self._is_heard = True
        except Expired:
            pass
        except PASSING as error:
            if self._is_heard:
                log.warning("%s of %s waits: %s", self._terms.name, self._terms.topic, error)
            self._is_heard = False

    def _announce(self, run: Run) -> None:
        """Tells the bus what is running, this one among it."""
        with self._announcing:
            self._member.patiently(lambda: self._tell_beginning(run))

    def _tell_beginning(self, run: Run) -> None:
        """Whoever closes begins nothing more, and does not wait for a bus that is away."""
        if self._stopping.is_set():
            raise Closing
        self._tell_running(run)

    def _tell_running(self, beginning: Run | None = None) -> None:
        """One at a time: what is told later must be what is true later.

        Others that wait to be told of are not among it: what ends the consumer meanwhile would
        count as a failed run of theirs, which they have not begun.
        """
        runs = [executor.lane.current for executor in self._executors]
        begun = [run for run in runs if run and (run.started_s < math.inf or run is beginning)]
        ours = [run for run in begun if run.shard.is_held]
        running: dict[str, list[int]] = {}
        for run in ours:
            running.setdefault(str(run.shard.number), []).extend(run.offsets)
        some = {shard: offsets[:MAX_RUNNING] for shard, offsets in running.items()}
        told = self._member.act("group.heartbeat", running=some)
        self._fetcher.release(told["release"])

    def _keep(self) -> None:
        try:
            while not self._stopping.is_set():
                self._keeper.round()
                self._keeper.sleep()
            self._keeper.drain(lambda: self._deadline_s)
            if self.error is None:
                self._keeper.leave(lambda: self._deadline_s)
        except BaseException as error:
            self._fail(error)
        finally:
            self._member.closing.set()
            for executor in self._executors:
                executor.stop()
            self.ended.set()
            self._on_end()

    # --- what they ask

    def _on_lost(self) -> None:
        self._holdings.lose()
        for executor in self._executors:
            executor.look()
