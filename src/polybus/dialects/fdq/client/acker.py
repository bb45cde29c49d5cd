"""The acker: one thread that reports acks, schedules retries, detects timeouts and leaves.

While runs end, it sends one `group.ack` over all shards every few milliseconds. The response
says how often each failed message has failed, or that it is a dead letter, and so which runs
follow. A shard that the bus wants back is released together with the ack of its last run.
"""

from __future__ import annotations

import heapq
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from polybus.dialects.fdq.client.group_member import RETRYABLE, ConsumerClosing
from polybus.dialects.fdq.client.handler_run import LastRuns
from polybus.errors import Expired, LimitReached, PolybusError, UsageError, error_from_code
from polybus.native.protocol.requests import GroupAck, GroupLeave

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.assigned_shards import (
        AssignedShard,
        AssignedShards,
        RunFailure,
    )
    from polybus.dialects.fdq.client.consumer import ConsumeOptions
    from polybus.dialects.fdq.client.executor import Executor, WakeSignal
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import HandlerRun
    from polybus.model.offset_ranges import Range

T = TypeVar("T")
log = logging.getLogger("polybus.fdq")

# Each ack is a commit of the bus, and nothing waits for it, so acks take a tenth of the time.
# A failed run and a release are urgent: the next run of the key, or another consumer, waits.
FIRST_ACK_EVERY_S = 0.03
LAST_ACK_EVERY_S = 0.25
ACK_TIME_SHARE = 0.1
URGENT_S = 0.002
MAX_SHARDS = 256  # per call
MAX_FAILED = 1024  # failed runs per call, of several shards: the dead letters of one commit
POLL_S = 0.1  # while a handler runs long
SLOW_S = 1.0  # a longer run must not keep other executors from fetching
RETRY_PAUSE_S = 0.1  # after an ack that did not reach the bus
LEAVE_TRIES_S = 5.0  # for a bus that is restarting
ABANDONED = "the run had not ended when its consumer left"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before a retry: `first_s`, doubled per failure up to `last_s`.

    A random share of up to half is subtracted, so that consumers that failed together do not
    retry together.
    """

    first_s: float = 0.1
    last_s: float = 30.0
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.last_s:
            raise UsageError(
                "backoff must satisfy 0 <= first <= last seconds,"
                f" got first {self.first_s} and last {self.last_s}"
            )

    def pause_s(self, failures: int) -> float:
        """Return the pause before the run that follows this many failed ones."""
        doublings = min(max(failures, 1) - 1, 64)
        return min(self.first_s * 2.0**doublings, self.last_s) * (0.5 + self.random() / 2)


class RetrySchedule(Generic[T]):
    """Items by their due time. It has no clock; callers pass the time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._serial = count()  # keeps the order of items that are due at the same time

    def put(self, due_s: float, item: T) -> None:
        heapq.heappush(self._heap, (due_s, next(self._serial), item))

    def take(self, now_s: float) -> list[T]:
        """Take the items that are due, the earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def next_s(self) -> float | None:
        """Return the earliest due time, or None if the schedule is empty."""
        return self._heap[0][0] if self._heap else None


class AckBatch:
    """The unreported progress of one shard, taken for one report."""

    def __init__(self, shard: AssignedShard, *, release: bool = False) -> None:
        self.shard = shard
        self.release = release
        shard.collect_finished()
        self._counts = shard.emitted, shard.redelivered
        self._acked: list[Range] = shard.take_unsent_acks()
        self._failures: list[RunFailure] = [shard.failures.popleft() for _ in shard.failures.copy()]

    @property
    def failed_count(self) -> int:
        return sum(len(list(run.failed_rows(""))) for run, _ in self._failures)

    def build_report(self) -> dict[str, Any]:
        shard = self.shard
        return {
            "shard": shard.number,
            "epoch": shard.epoch,
            "acked": self._acked,
            "failed": [
                {"offset": offset, "reason": reason, "attempt": run.attempts_of(offset)}
                for run, run_reason in self._failures
                for offset, reason in run.failed_rows(run_reason)
            ],
            "emitted": self._counts[0],
            "redelivered": self._counts[1],
            "release": self.release,
        }

    def restore(self) -> None:
        """Return the progress to the shard after a failed call, to report it again."""
        self.shard.restore_unsent_acks(self._acked)
        self.shard.failures.extendleft(reversed(self._failures))

    def retry_uncounted(self) -> list[tuple[HandlerRun, list[HandlerRun]]]:
        """Retry failed runs uncounted, because the bus is at its limit of failed messages."""
        self.shard.restore_unsent_acks(self._acked)
        return [(failure.run, failure.run.retry_runs({}, set())) for failure in self._failures]

    def apply_response(self, response: dict[str, Any]) -> list[tuple[HandlerRun, list[HandlerRun]]]:
        """Apply the response. Returns each failed run with the runs that follow it."""
        shard = self.shard
        attempts = {int(at): int(n) for at, n in response["attempts"].items()}
        followers, gone = [], set()
        for failure in self._failures:
            # A message without a count is done: by this ack, or by one whose response was lost.
            dead = {at for at, _ in failure.run.failed_rows("") if at not in attempts}
            gone |= dead
            followers.append((failure.run, failure.run.retry_runs(attempts, dead)))
        shard.mark_done(gone, int(response["low"]))
        shard.reported = self._counts
        return followers


def has_held_acks(shard: AssignedShard) -> bool:
    """Return whether successes of the shard wait for the answer to failed last runs."""
    return any(isinstance(failure.run, LastRuns) for failure in shard.failures.copy())


def split_calls(batches: Iterable[AckBatch]) -> Iterator[list[AckBatch]]:
    """Split reports over calls, whose dead letters the bus can write in one commit."""
    call: list[AckBatch] = []
    failed = 0
    for batch in batches:
        failed += batch.failed_count
        if call and (len(call) == MAX_SHARDS or failed > MAX_FAILED):
            yield call
            call, failed = [], batch.failed_count
        call.append(batch)
    if call:
        yield call


class Acker:
    def __init__(
        self,
        options: ConsumeOptions,
        member: GroupMember,
        shards: AssignedShards,
        executors: Sequence[Executor],
        wake_signal: WakeSignal,
    ) -> None:
        self._options = options
        self._member = member
        self._shards = shards
        self._executors = executors
        self._wake_signal = wake_signal
        self._retries: RetrySchedule[HandlerRun] = RetrySchedule()
        self._next_ack_s = 0.0  # later than now after an ack that failed
        self._is_reachable = True  # False once the warning was logged
        self._ack_every_s = FIRST_ACK_EVERY_S
        self._stuck: dict[int, HandlerRun] = {}  # by executor: hung runs that were logged

    # --- rounds

    def run(self, stopping: Event) -> None:
        """Report progress and start retries until `stopping` is set."""
        while not stopping.is_set():
            now_s = time.monotonic()
            self._check_timeouts(now_s)
            if now_s >= self._next_ack_s:
                self._ack()
            for run in self._retries.take(time.monotonic()):
                assert run.blocked_key is not None
                self._executors[run.blocked_key.executor_index].retry(run)
            for executor in self._executors:
                if executor.queue.wants_room:
                    executor.refresh()
            self._wait_for_work()

    def _wait_for_work(self) -> None:
        """Wait until there is progress to report, then linger to collect more of it."""
        due_s = self._retries.next_s()
        is_running = any(executor.queue.current for executor in self._executors)
        timeout_s = POLL_S if is_running or due_s is not None else 1.0
        if due_s is not None:
            timeout_s = max(0.0, min(timeout_s, due_s - time.monotonic()))
        self._wake_signal.wait(timeout_s, unless=self._shards.has_unreported)
        time.sleep(URGENT_S)
        if due_s is None or due_s > time.monotonic() + self._ack_every_s:
            self._wake_signal.wait_urgent(self._ack_every_s)

    def is_idle(self, shards: Iterable[AssignedShard]) -> bool:
        """Return whether no run of these closed shards is current.

        The lock makes the answer final: an executor cannot be between taking and starting.
        """
        closed = set(shards)
        for executor in self._executors:
            with executor.lock:
                run = executor.queue.current
                if run is not None and run.shard in closed:
                    return False
        return True

    # --- acks

    def _ack(self) -> None:
        """Report the progress of all shards. Releases shards that are drained."""
        batches, began_s = [], time.monotonic()
        for shard in self._shards.all():
            is_drained = shard.is_releasing and self.is_idle([shard])
            if is_drained and has_held_acks(shard):  # the next ack has them, and the release
                is_drained = False
                self._wake_signal.wake_urgently()
            if is_drained or shard.has_unreported():
                batches.append(AckBatch(shard, release=is_drained))
        for group in split_calls(batches):
            self._send(group)
        wanted_s = (time.monotonic() - began_s) / ACK_TIME_SHARE
        # A group reads no new shard before it has acked the sealed ones.
        has_sealed = any(shard.is_sealed for shard in self._shards.all())
        longest_s = FIRST_ACK_EVERY_S if has_sealed else LAST_ACK_EVERY_S
        self._ack_every_s = min(max(wanted_s, FIRST_ACK_EVERY_S), longest_s)

    def _send(self, batches: list[AckBatch]) -> None:
        options, reports = self._options, [batch.build_report() for batch in batches]
        try:
            response = self._member.call(GroupAck, shards=reports)
        except Expired:
            return  # the shards belong to other members, so this progress is void
        except RETRYABLE as error:
            for batch in batches:
                batch.restore()
            self._next_ack_s = time.monotonic() + RETRY_PAUSE_S
            if self._is_reachable:
                log.warning("%s of %s: acks are delayed: %s", options.name, options.topic, error)
            self._is_reachable = False
            return
        self._is_reachable = True
        for batch, shard_response in zip(batches, response["shards"], strict=True):
            if shard_response.get("error"):
                self._on_refused(batch, shard_response["error"])
                continue
            for run, runs in batch.apply_response(shard_response):
                self._schedule_followers(run, runs)
            if batch.release:
                log.info(
                    "%s released shard %s of %s", options.name, batch.shard.number, options.topic
                )
                self._drop_shard(batch.shard)

    def _schedule_followers(self, run: HandlerRun, runs: list[HandlerRun]) -> None:
        assert run.blocked_key is not None
        follower = self._executors[run.blocked_key.executor_index].schedule_followers(run, runs)
        if follower is not None and follower.shard.is_open:
            failures = follower.attempts_of(follower.offset)
            due_s = time.monotonic() + self._options.backoff.pause_s(failures)
            self._retries.put(due_s, follower)

    def _on_refused(self, batch: AckBatch, fields: dict[str, Any]) -> None:
        """Handle the error of one shard. If the shard is lost, its next owner repeats the runs."""
        error = error_from_code(fields.get("code", ""), fields.get("text", ""))
        shard = batch.shard
        if isinstance(error, LimitReached):
            for run, runs in batch.retry_uncounted():
                self._schedule_followers(run, runs)
            self._next_ack_s = time.monotonic() + RETRY_PAUSE_S
        elif isinstance(error, RETRYABLE):
            batch.restore()
            self._next_ack_s = time.monotonic() + RETRY_PAUSE_S
        else:
            log.warning("%s lost shard %s: %s", self._options.name, shard.number, error)
            self._drop_shard(shard)

    def _drop_shard(self, shard: AssignedShard) -> None:
        self._shards.drop(shard)
        for executor in self._executors:
            executor.refresh()

    # --- timeouts

    def _check_timeouts(self, now_s: float) -> None:
        timeout_s = self._options.handler_timeout_s
        for executor in self._executors:
            run = executor.queue.current
            if run is not None and now_s - run.started_s > SLOW_S:
                executor.refresh(is_slow=True)
            if run is None or now_s - run.started_s <= timeout_s:
                continue
            place = self._options.topic, run.shard.number, run.offset
            if executor.give_up(run, f"handler ran longer than {timeout_s:g} s"):
                log.error(
                    "%s: handler timed out at shard %s, offset %s; starting another thread", *place
                )
            elif run is not self._stuck.get(executor.index):
                self._stuck[executor.index] = run
                log.error(
                    "%s: handler timed out at shard %s, offset %s; too many threads hang", *place
                )

    # --- the end

    def drain(self, get_deadline_s: Callable[[], float]) -> None:
        """Wait until all runs have ended, or until the deadline, which may move closer.

        Runs that have not ended then have failed, as if the consumer had died. They are
        delivered again, as redeliveries.
        """
        shards = self._shards.close()
        while not self.is_idle(shards) and time.monotonic() < get_deadline_s():
            self._check_timeouts(time.monotonic())
            self._ack()
            self._wake_signal.wait(POLL_S)
        for executor in self._executors:
            run = executor.abandon(ABANDONED)
            if run is not None:
                place = self._options.topic, run.shard.number, run.offset
                log.warning("%s: shard %s, offset %s: %s", *place, ABANDONED)

    def leave(self, get_deadline_s: Callable[[], float]) -> None:
        """Send the last acks and leave the group. Tries once if the deadline has passed."""
        last_s = time.monotonic() + LEAVE_TRIES_S
        # `group.leave` carries at most MAX_SHARDS reports; the others go before it.
        shards = self._shards.all()
        if len(shards) > MAX_SHARDS or any(map(has_held_acks, shards)):
            self._ack()
        unreported = [shard for shard in self._shards.all() if shard.has_unreported()]
        reports = [AckBatch(shard).build_report() for shard in unreported[:MAX_SHARDS]]
        while True:
            try:
                self._member.call(GroupLeave, shards=reports)
                return
            except RETRYABLE as error:
                if time.monotonic() > min(last_s, get_deadline_s()):
                    log.warning("%s could not leave its group: %s", self._options.name, error)
                    return
                time.sleep(RETRY_PAUSE_S)
            except (PolybusError, ConsumerClosing) as error:
                log.info("%s is no longer a member of its group: %s", self._options.name, error)
                return
