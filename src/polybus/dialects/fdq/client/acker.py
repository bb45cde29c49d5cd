"""The thread that settles what runs have come to: it acks, tries again, watches and closes.

Every some milliseconds, while anything ends: what has ended is one `group.ack` over all
shards. The bus answers how often a failed message has failed by now, or that it is a
dead letter; that decides what follows it. A shard that is to be given away is released
with the ack of its last run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from polybus.dialects.fdq.client.group_member import RETRYABLE, ConsumerClosing
from polybus.dialects.fdq.client.retry_schedule import RetrySchedule
from polybus.errors import Expired, LimitReached, PolybusError, error_from_code

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.assigned_shard import AssignedShard, RunFailure
    from polybus.dialects.fdq.client.assigned_shards import AssignedShards
    from polybus.dialects.fdq.client.consume_options import ConsumeOptions
    from polybus.dialects.fdq.client.executor import Executor, WakeSignal
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import HandlerRun
    from polybus.dialects.fdq.client.offset_ranges import Range

log = logging.getLogger("polybus.fdq")

# Nobody waits for an ack, and each is a commit of the bus: they shall take a tenth of the
# time. But somebody waits for a failed run's, which says what follows, and for a release.
FIRST_ACK_EVERY_S = 0.03
LAST_ACK_EVERY_S = 0.25
ACK_TIME_SHARE = 0.1
URGENT_S = 0.002
MAX_SHARDS = 256  # in one call
POLL_S = 0.1  # while a handler runs for long
SLOW_S = 1.0  # a handler that runs for longer shall not keep other executors from theirs
RETRY_PAUSE_S = 0.1  # after an ack for which there was no bus
LEAVE_TRIES_S = 5.0  # for a bus that starts again meanwhile
ABANDONED = "it was still running when its consumer left"


class AckBatch:
    """What one shard's books say at a moment, on its way to the bus."""

    def __init__(self, shard: AssignedShard, *, release: bool = False) -> None:
        shard.collect_finished()
        self.shard = shard
        self.release = release
        self._counts = shard.counts
        self._acked: list[Range] = shard.take_unsent_acks()
        self._failures: list[RunFailure] = [shard.failures.popleft() for _ in shard.failures.copy()]

    @property
    def is_empty(self) -> bool:
        return not (self._acked or self._failures or not self.shard.is_reported(self._counts))

    def build_report(self) -> dict[str, Any]:
        shard = self.shard
        return {
            "shard": shard.number,
            "epoch": shard.epoch,
            "acked": self._acked,
            "failed": [entry for failure in self._failures for entry in failure.entries()],
            "emitted": self._counts[0],
            "redelivered": self._counts[1],
            "release": self.release,
        }

    def restore(self) -> None:
        """It was not heard: it is to be told again, with the same words."""
        self.shard.restore_unsent_acks(self._acked)
        self.shard.failures.extendleft(reversed(self._failures))

    def retry_uncounted(self) -> list[tuple[HandlerRun, list[HandlerRun]]]:
        """The bus has no room to count more failures: they are tried again, uncounted."""
        self.shard.restore_unsent_acks(self._acked)
        return [(one.run, one.run.retry_runs({}, set())) for one in self._failures]

    def apply_response(self, answer: dict[str, Any]) -> list[tuple[HandlerRun, list[HandlerRun]]]:
        """Books the answer: for each failed run those that follow it."""
        shard = self.shard
        attempts = {int(at): int(n) for at, n in answer["attempts"].items()}
        following, gone = [], set()
        for failure in self._failures:
            # What has no count has come to its end: by this ack, or by one whose answer was lost.
            dead = {at for at in failure.run.offsets if at not in attempts}
            gone |= dead
            following.append((failure.run, failure.run.retry_runs(attempts, dead)))
        shard.mark_done(gone, int(answer["low"]))
        shard.mark_reported(self._counts)
        return following


class Acker:
    def __init__(
        self,
        terms: ConsumeOptions,
        member: GroupMember,
        holdings: AssignedShards,
        executors: Sequence[Executor],
        alarm: WakeSignal,
    ) -> None:
        self._terms = terms
        self._member = member
        self._holdings = holdings
        self._executors = executors
        self._alarm = alarm
        self._retries: RetrySchedule[HandlerRun] = RetrySchedule()
        self._next_ack_s = 0.0  # after an ack that failed
        self._is_reachable = True  # or it was said that it is not
        self._who = terms.name, terms.topic
        self._ack_every_s = FIRST_ACK_EVERY_S
        self._stuck: dict[int, HandlerRun] = {}  # executors that hang for good

    # --- rounds

    def wait_for_work(self) -> None:
        """Until there is something to do, and then a little longer, for it to be more."""
        due_s = self._retries.next_s()
        is_running = any(one.queue.current for one in self._executors)
        timeout_s = POLL_S if is_running or due_s is not None else 1.0
        if due_s is not None:
            timeout_s = max(0.0, min(timeout_s, due_s - time.monotonic()))
        self._alarm.wait(timeout_s, unless=self._holdings.has_unreported)
        time.sleep(URGENT_S)
        if due_s is None or due_s > time.monotonic() + self._ack_every_s:
            self._alarm.wait_urgent(self._ack_every_s)

    def run_once(self) -> None:
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

    def is_idle(self, shards: Iterable[AssignedShard]) -> bool:
        """Does nothing of these closed shards run, for good? The lock makes it sure."""
        wanted = set(shards)
        for executor in self._executors:
            with executor.lock:
                run = executor.queue.current
                if run is not None and run.shard in wanted:
                    return False
        return True

    # --- acks

    def _ack(self) -> None:
        tellings, began_s = self._collect_batches(), time.monotonic()
        for at in range(0, len(tellings), MAX_SHARDS):
            self._send(tellings[at : at + MAX_SHARDS])
        wanted_s = (time.monotonic() - began_s) / ACK_TIME_SHARE
        self._ack_every_s = min(max(wanted_s, FIRST_ACK_EVERY_S), LAST_ACK_EVERY_S)

    def _send(self, tellings: list[AckBatch]) -> None:
        try:
            answer = self._member.act("group.ack", shards=[one.build_report() for one in tellings])
        except Expired:
            return  # its shards are others' by now, and so is what we know of them
        except RETRYABLE as error:
            for telling in tellings:
                telling.restore()
            self._next_ack_s = time.monotonic() + RETRY_PAUSE_S
            if self._is_reachable:
                log.warning("%s of %s has acks that wait: %s", *self._who, error)
            self._is_reachable = False
            return
        self._is_reachable = True
        for telling, told in zip(tellings, answer["shards"], strict=True):
            self._apply_response(telling, told)

    def _collect_batches(self) -> list[AckBatch]:
        found = []
        for shard in self._holdings.all():
            shard.collect_finished()
            is_drained = shard.is_releasing and self.is_idle([shard])
            if is_drained or shard.has_unreported:
                found.append(AckBatch(shard, release=is_drained))
        return found

    def _apply_response(self, telling: AckBatch, told: dict[str, Any]) -> None:
        shard = telling.shard
        if told.get("error"):
            self._on_refused(telling, told["error"])
            return
        for run, runs in telling.apply_response(told):
            self._schedule_followers(run, runs)
        if telling.release:
            log.info(
                "%s released shard %s of %s", self._terms.name, shard.number, self._terms.topic
            )
            self._drop_shard(shard)

    def _schedule_followers(self, run: HandlerRun, runs: list[HandlerRun]) -> None:
        assert run.blocked_key is not None
        following = self._executors[run.blocked_key.executor_index].schedule_followers(run, runs)
        if following is not None and following.shard.is_open:
            failures = following.attempts_of(following.offset)
            due_s = time.monotonic() + self._terms.backoff.pause_s(failures)
            self._retries.put(due_s, following)

    def _on_refused(self, telling: AckBatch, error: dict[str, Any]) -> None:
        """Of one shard alone. If it is another's now, what we did will be done again."""
        found = error_from_code(error.get("code", ""), error.get("text", ""))
        shard = telling.shard
        if isinstance(found, LimitReached):
            for run, runs in telling.retry_uncounted():
                self._schedule_followers(run, runs)
            self._next_ack_s = time.monotonic() + RETRY_PAUSE_S
        elif isinstance(found, RETRYABLE):
            telling.restore()
            self._next_ack_s = time.monotonic() + RETRY_PAUSE_S
        else:
            log.warning("%s lost shard %s: %s", self._terms.name, shard.number, found)
            self._drop_shard(shard)

    def _drop_shard(self, shard: AssignedShard) -> None:
        self._holdings.drop(shard)
        for executor in self._executors:
            executor.refresh()

    # --- handlers that do not come back

    def _check_timeouts(self, now_s: float) -> None:
        timeout_s = self._terms.handler_timeout_s
        for executor in self._executors:
            run = executor.queue.current
            if run is not None and now_s - run.started_s > SLOW_S:
                executor.refresh(is_slow=True)
            if run is None or now_s - run.started_s <= timeout_s:
                continue
            place = self._terms.topic, run.shard.number, run.offset
            if executor.give_up(run, f"it ran longer than {timeout_s:g} s"):
                log.error(
                    "%s: the handler hangs at shard %s, offset %s: a new thread goes on", *place
                )
            elif run is not self._stuck.get(executor.index):
                self._stuck[executor.index] = run
                log.error(
                    "%s: the handler hangs at shard %s, offset %s, and too many others do", *place
                )

    # --- the end

    def drain(self, deadline_s: Callable[[], float]) -> None:
        """Until what runs has ended, or the deadline has passed, which may come nearer.

        What still runs then has failed, as if the consumer had died: it comes again, and not
        for the first time.
        """
        shards = self._holdings.close()
        while not self.is_idle(shards) and time.monotonic() < deadline_s():
            self._check_timeouts(time.monotonic())
            self._ack()
            self._alarm.wait(POLL_S)
        for executor in self._executors:
            run = executor.abandon(ABANDONED)
            if run is not None:
                place = self._terms.topic, run.shard.number, run.offset
                log.warning("%s: shard %s, offset %s: %s", *place, ABANDONED)

    def leave(self, deadline_s: Callable[[], float]) -> None:
        """The last acks, and then the shards are others'. Past the deadline it is tried once."""
        last_s = time.monotonic() + LEAVE_TRIES_S
        if len(self._holdings.all()) > MAX_SHARDS:
            self._ack()
        tellings = [AckBatch(shard) for shard in self._holdings.all()]
        entries = [one.build_report() for one in tellings if not one.is_empty][:MAX_SHARDS]
        while True:
            try:
                self._member.act("group.leave", shards=entries)
                return
            except RETRYABLE as error:
                if time.monotonic() > min(last_s, deadline_s()):
                    log.warning("%s left without a word: %s", self._terms.name, error)
                    return
                time.sleep(RETRY_PAUSE_S)
            except (PolybusError, ConsumerClosing) as error:
                log.info("%s left, and was not asked to: %s", self._terms.name, error)
                return
