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

from polybus.dialects.fdq.client.acker import Acker
from polybus.dialects.fdq.client.assigned_shards import AssignedShards
from polybus.dialects.fdq.client.executor import Executor, WakeSignal
from polybus.dialects.fdq.client.fetcher import FetchBuffer, Fetcher, create_window
from polybus.dialects.fdq.client.group_member import RETRYABLE, ConsumerClosing, GroupMember
from polybus.dialects.fdq.client.poison_guard import PoisonGuard
from polybus.dialects.fdq.client.transaction_commit import TransactionCommitter
from polybus.errors import Expired

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.consume_options import ConsumeOptions
    from polybus.dialects.fdq.client.handler_run import HandlerRun
    from polybus.native.bus_client import BusClient

log = logging.getLogger("polybus.fdq")

MAX_RUNNING = 1024  # offsets of a shard that a heartbeat takes; a whole batch may be more


class GroupSubscription:
    def __init__(self, bus: BusClient, terms: ConsumeOptions, on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.ended = Event()
        self._on_end = on_end
        self._options = terms
        self._alarm = WakeSignal()
        self._holdings = AssignedShards()
        self._buffer = FetchBuffer(create_window(terms))
        self._member = GroupMember(bus, terms, self._on_lost, time.monotonic)
        self._stopping = Event()
        care = PoisonGuard(self._report_start, self._stopping)
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
        self._keeper = Acker(*parts, self._alarm)
        commits = TransactionCommitter(bus, self._member)
        self._fetcher = Fetcher(*parts, commits, self._buffer, self._alarm.wake_urgently)
        self._announcing = Lock()
        self._lock = Lock()
        self._deadline_s = math.inf
        self._is_reachable = True  # or it was said that it is not

    def start(self) -> None:
        """Joins the group; what is wrong with that is raised here."""
        self._member.join()
        for executor in self._executors:
            executor.start()
        for name, main in (
            ("fetch", self._fetch_loop),
            ("beat", self._heartbeat_loop),
            ("keep", self._ack_loop),
        ):
            label = f"polybus-fdq-{self._options.topic}-{name}"
            Thread(target=self._run_thread, args=(main,), name=label, daemon=True).start()

    def request_close(self, deadline_s: float = math.inf) -> None:
        """Begins to end; `ended` says when that is done. By `deadline_s` it is, anyhow."""
        with self._lock:
            self._deadline_s = min(self._deadline_s, deadline_s)
        self._member.is_leaving = True
        self._holdings.close()
        self._stopping.set()
        self._buffer.close()
        self._alarm.wake_urgently()

    # --- threads

    def _run_thread(self, main: Callable[[], None]) -> None:
        try:
            main()
        except ConsumerClosing:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        terms = self._options
        with self._lock:
            if self.error is not None or self._stopping.is_set():
                log.info("%s, while it stops: %s", terms.name, error)
                return
            self.error = error
        log.error("%s stops consuming %s: %s", terms.name, terms.topic, error)
        log.debug("because of", exc_info=error)
        self.request_close(0.0)

    def _fetch_loop(self) -> None:
        while not self._stopping.is_set():
            self._fetcher.fetch_once()

    def _heartbeat_loop(self) -> None:
        while not self._stopping.wait(self._options.heartbeat_s):
            self._send_heartbeat()
        while not self.ended.wait(self._options.heartbeat_s) and self.error is None:
            self._send_heartbeat()  # what still runs keeps its shard until it is done

    def _send_heartbeat(self) -> None:
        try:
            with self._announcing:
                self._send_running()
            self._is_reachable = True
        except Expired:
            pass
        except RETRYABLE as error:
            if self._is_reachable:
                log.warning("%s of %s waits: %s", self._options.name, self._options.topic, error)
            self._is_reachable = False

    def _report_start(self, run: HandlerRun) -> None:
        """Tells the bus what is running, this one among it."""
        with self._announcing:
            self._member.retry(lambda: self._send_start(run))

    def _send_start(self, run: HandlerRun) -> None:
        """Whoever closes begins nothing more, and does not wait for a bus that is away."""
        if self._stopping.is_set():
            raise ConsumerClosing
        self._send_running(run)

    def _send_running(self, beginning: HandlerRun | None = None) -> None:
        """One at a time: what is told later must be what is true later.

        Others that wait to be told of are not among it: what ends the consumer meanwhile would
        count as a failed run of theirs, which they have not begun.
        """
        runs = [executor.queue.current for executor in self._executors]
        begun = [run for run in runs if run and (run.started_s < math.inf or run is beginning)]
        ours = [run for run in begun if run.shard.is_held]
        running: dict[str, list[int]] = {}
        for run in ours:
            running.setdefault(str(run.shard.number), []).extend(run.offsets)
        some = {shard: offsets[:MAX_RUNNING] for shard, offsets in running.items()}
        told = self._member.act("group.heartbeat", running=some)
        self._fetcher.release_shards(told["release"])

    def _ack_loop(self) -> None:
        try:
            while not self._stopping.is_set():
                self._keeper.run_once()
                self._keeper.wait_for_work()
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
        self._holdings.drop_all()
        for executor in self._executors:
            executor.refresh()
