"""Key-ordered queues and the progress of a shard, driven at random against invariants."""

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polybus.dialects.fdq.client.assigned_shards import COLLECT_EVERY, AssignedShard
from polybus.dialects.fdq.client.handler_run import (
    BatchRun,
    FetchedRows,
    QueuedBatches,
    QueuedMessages,
    split_runs,
)
from polybus.dialects.fdq.client.key_queue import KeyOrderedQueue
from polybus.model.arrow import READ_SCHEMA

QUEUES = 3
MAX_RANGES = COLLECT_EVERY + 2 * QUEUES + 2  # the shard is full with two gaps
MAX_BLOCKED = 3  # and with three blocked keys
MAX_DELIVER = 3


def rows(first, keys):
    count = len(keys)
    at = list(range(first, first + count))
    columns = [at, [0] * count, at, at, at, keys, [b"body"] * count, [None] * count]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, READ_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=READ_SCHEMA)


def given(low=0, **more):
    return {"shard": 0, "epoch": 1, "low": low, **more}


class Executors(RuleBasedStateMachine):
    """Several queues of one shard, and a model of the bus that counts failures."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(
            "polybus.dialects.fdq.client.assigned_shards.MAX_BLOCKED_KEYS", MAX_BLOCKED
        )
        self.shard = AssignedShard(given(), QUEUES, MAX_RANGES)
        self.queues = [KeyOrderedQueue() for _ in range(QUEUES)]
        self.keys: list[str | None] = []
        self.failed: dict[int, int] = {}
        self.done: set[int] = set()  # succeeded or dead-lettered
        self.acked: set[int] = set()
        self.dead: set[int] = set()
        self.pausing: list = []
        self.abandoned: list = []
        self.emitted = 0

    def queue_of(self, offset):
        key = self.keys[offset]
        return (offset if key is None else len(key)) % QUEUES

    @rule(keys=st.lists(st.sampled_from([None, "", "a", "bb", "cc"]), min_size=1, max_size=12))
    def fetch(self, keys):
        first = len(self.keys)
        self.keys += keys
        batch = FetchedRows(rows(first, keys))
        for number, queue in enumerate(self.queues):
            mine = [at for at in range(len(keys)) if self.queue_of(first + at) == number]
            queue.push([QueuedMessages(self.shard, batch, mine)])

    @rule(number=st.integers(0, QUEUES - 1))
    def begin(self, number):
        queue = self.queues[number]
        run = None if queue.current else queue.begin(0.0)
        if run is None:
            return
        at, key = run.offset, run.key
        assert at not in self.done, "it was done already"
        assert run.attempts == self.failed.get(at, 0)
        earlier = {n for n in range(at) if key is not None and self.keys[n] == key}
        assert earlier <= self.done, "an earlier one of its key is not done"

    @rule(number=st.integers(0, QUEUES - 1))
    def finish(self, number):
        queue = self.queues[number]
        run = queue.current
        if run is None:
            return
        assert queue.finish(run)
        assert not queue.finish(run)
        self.done.add(run.offset)
        self.emitted += 1

    @rule(number=st.integers(0, QUEUES - 1), is_late=st.booleans())
    def fail(self, number, is_late):
        queue = self.queues[number]
        run = queue.current
        if run is None:
            return
        assert queue.fail(run, "why")
        self.emitted += 1
        if is_late:
            self.abandoned.append((queue, run))

    @precondition(lambda self: self.abandoned)
    @rule()
    def end_late(self):
        queue, run = self.abandoned.pop()
        assert not queue.finish(run), "a run that was given up counted"

    @rule()
    def ack(self):
        """Model the bus: count failures and answer with dead letters."""
        self.shard.collect_finished()
        for start, end in self.shard.take_unsent_acks():
            assert set(range(start, end)) <= self.done - self.dead, "acked, but not run"
            assert not set(range(start, end)) & self.acked, "acked twice"
            self.acked |= set(range(start, end))
        assert ranges_in(self.acked | self.dead) <= MAX_RANGES
        while self.shard.failures:
            run = self.shard.failures.popleft().run
            count = self.failed[run.offset] = self.failed.get(run.offset, 0) + 1
            is_dead = count == MAX_DELIVER
            queue = self.queues[self.queue_of(run.offset)]
            if is_dead:
                self.dead.add(run.offset)
                self.done.add(run.offset)
                self.shard.mark_done([run.offset])
            following = queue.schedule_followers(
                run, run.retry_runs({run.offset: count}, {run.offset} if is_dead else set())
            )
            if following is not None:
                self.pausing.append((queue, following))

    @precondition(lambda self: self.pausing)
    @rule(data=st.data())
    def pause_is_over(self, data):
        queue, run = self.pausing.pop(data.draw(st.integers(0, len(self.pausing) - 1)))
        queue.retry(run)

    @invariant()
    def books(self):
        assert self.shard.waiting >= 0
        assert self.acked <= self.done

    def teardown(self):
        try:
            self.end()
        finally:
            self.patch.undo()

    def end(self):
        """Finish all messages without further failures; the acks must form one range."""
        everything = set(range(len(self.keys)))
        for _ in range(4 * len(self.keys) + 4):
            if self.acked | self.dead == everything:
                break
            for queue in self.queues:
                run = queue.current or queue.begin(0.0)
                if run is not None:
                    queue.finish(run)
                    self.done.add(run.offset)
                    self.emitted += 1
            self.ack()
            while self.pausing:
                queue, run = self.pausing.pop()
                queue.retry(run)
        assert self.done == everything, f"lost: {sorted(everything - self.done)}"
        assert self.acked | self.dead == everything
        assert (self.shard.done.low, len(self.shard.done)) == (len(self.keys), 0)
        assert self.shard.emitted == self.emitted
        assert all(queue.begin(0.0) is None for queue in self.queues)
        assert (self.shard.waiting, self.shard.waiting_bytes) == (0, 0)
        assert sum(queue.freed_rows for queue in self.queues) == len(self.keys)


def ranges_in(offsets):
    return sum(at - 1 not in offsets for at in offsets if at)


TestExecutors = Executors.TestCase
TestExecutors.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


# --- single messages


def queue_with(shard, keys, first=0):
    queue = KeyOrderedQueue()
    queue.push([QueuedMessages(shard, FetchedRows(rows(first, keys)), range(len(keys)))])
    return queue


def started(queue):
    run = queue.begin(0.0)
    return None if run is None else run.offset


def test_failed_key_is_blocked_and_others_continue():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a", "b", "a", "b"])
    queue.begin(0.0)
    queue.fail(queue.current, "no")
    order = []
    while (run := queue.begin(0.0)) is not None:
        order.append(run.offset)
        queue.finish(run)
    assert order == [1, 3]
    assert shard.waiting == 1
    failed = shard.failures.popleft().run
    queue.retry(queue.schedule_followers(failed, failed.retry_runs({0: 1}, set())))
    run = queue.begin(0.0)
    assert (run.offset, run.attempts, run.delivery) == (0, 1, 2)
    queue.finish(run)
    assert started(queue) == 2


def test_closed_shard_starts_no_run():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a", "b", "a"])
    queue.begin(0.0)
    queue.fail(queue.current, "no")
    shard.is_open = False
    assert queue.begin(0.0) is None
    queue.drop_closed()
    assert queue.freed_rows == 3
    failed = shard.failures.popleft().run
    queue.retry(failed)
    assert queue.begin(0.0) is None


def test_ready_run_of_a_closed_shard_is_not_started():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a"])
    queue.fail(queue.begin(0.0), "no")
    failed = shard.failures.popleft().run
    queue.retry(queue.schedule_followers(failed, failed.retry_runs({}, set())))
    shard.is_open = False
    assert queue.begin(0.0) is None


def test_blocked_key_is_free_in_the_next_assignment():
    old, new = AssignedShard(given()), AssignedShard(given() | {"epoch": 2})
    queue = queue_with(old, ["a"])
    queue.fail(queue.begin(0.0), "no")
    old.is_open = False
    queue.push([QueuedMessages(new, FetchedRows(rows(0, ["a"])), [0])])
    assert queue.begin(0.0).shard is new


def test_committed_run_is_done_even_if_it_fails_later():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a", "a"])
    run = queue.begin(0.0)
    run.is_committed = True
    assert queue.fail(run, "after the commit")
    assert not shard.failures
    shard.collect_finished()
    assert (shard.done.low, shard.take_unsent_acks()) == (1, []), "acked twice"
    assert started(queue) == 1


def test_deliveries_below_the_suspect_mark_are_redeliveries():
    shard = AssignedShard(given(suspect_to=1, attempts={"0": 2, "1": 1}))
    queue = queue_with(shard, ["a", "b", "c"])
    deliveries = []
    while (run := queue.begin(0.0)) is not None:
        deliveries.append(run.delivery)
        queue.finish(run)
    assert deliveries == [4, 2, 1]
    shard.collect_finished()
    assert (shard.emitted, shard.redelivered) == (3, 2)


def test_full_shard_starts_only_runs_that_add_no_range():
    gaps = [(at, at + 1) for at in range(1, 2 * MAX_RANGES, 2)]
    shard = AssignedShard(given(ranges=gaps), 1, MAX_RANGES)
    assert shard.is_full
    assert not shard.wants_rows
    end = gaps[-1][1]
    queue = queue_with(shard, ["a", "b"], first=end + 4)
    assert queue.begin(0.0) is None
    assert queue.wants_room
    queue.push([QueuedMessages(shard, FetchedRows(rows(0, ["c"])), [0])])
    assert queue.begin(0.0) is None, "later rows overtake parked ones"
    assert queue_with(shard, ["c"]).begin(0.0) is not None


def test_shard_is_full_until_its_gaps_are_closed():
    shard = AssignedShard(given(), 1, COLLECT_EVERY + 2 + 3)
    shard.finished.extend([1, 3])
    shard.collect_finished()
    assert not shard.is_full
    shard.finished.append(5)
    shard.collect_finished()
    assert shard.is_full
    assert not shard.wants_rows
    shard.finished.append(0)
    shard.collect_finished()
    assert not shard.is_full


def test_end_of_an_abandoned_run_does_not_count():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a"])
    run = queue.begin(0.0)
    assert queue.fail(run, "too long")
    assert not queue.finish(run)
    assert not queue.fail(run, "again")
    assert not shard.finished
    assert len(shard.failures) == 1


def test_key_is_unblocked_after_its_waiting_runs():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a", "a"])
    queue.fail(queue.begin(0.0), "no")
    assert queue.begin(0.0) is None
    failed = shard.failures.popleft().run
    queue.retry(queue.schedule_followers(failed, failed.retry_runs({}, set())))
    for _ in range(2):
        queue.finish(queue.begin(0.0))
    assert queue.begin(0.0) is None
    assert queue.freed_rows == 2
    queue.push([QueuedMessages(shard, FetchedRows(rows(2, ["a"])), [0])])
    assert started(queue) == 2


# --- batches


def batch_queue(shard, count, last_attempt=2):
    queue = KeyOrderedQueue()
    queue.push([QueuedBatches(shard, rows(0, ["k"] * count), 0, last_attempt)])
    return queue


def test_failed_batch_is_retried_whole_and_its_last_run_is_single():
    shard = AssignedShard(given())
    queue = batch_queue(shard, 4)
    runs = []
    for _ in range(2):
        run = queue.begin(0.0)
        runs.append(list(run.offsets))
        queue.fail(run, "no")
        failure = shard.failures.popleft()
        assert [failure.run.attempts_of(at) for at in failure.run.offsets] == [len(runs) - 1] * 4
        queue.retry(queue.schedule_followers(run, run.retry_runs({}, set())))
    while (run := queue.begin(0.0)) is not None:
        runs.append(list(run.offsets))
        queue.finish(run)
    assert runs == [[0, 1, 2, 3], [0, 1, 2, 3], [0], [1], [2], [3]]
    shard.collect_finished()
    assert shard.take_unsent_acks() == [(0, 4)]
    assert (shard.emitted, shard.redelivered) == (12, 8)
    assert shard.waiting == 0


def test_dead_letters_of_a_batch_are_not_retried():
    shard = AssignedShard(given())
    run = BatchRun(shard, rows(0, ["k"] * 5), 0, 5)
    assert [list(retry.offsets) for retry in run.retry_runs({}, {2})] == [[0, 1], [3, 4]]
    assert run.retry_runs({}, set(range(5))) == []


def test_suspect_batches_are_small_and_end_at_the_mark():
    shard = AssignedShard(given(suspect_to=3, attempts={"4": 2}))
    queue = batch_queue(shard, 7)
    runs = []
    while (run := queue.begin(0.0)) is not None:
        runs.append(list(run.offsets))
        queue.finish(run)
    assert runs == [[0, 1, 2], [3], [4], [5, 6]]
    shard.collect_finished()
    assert (shard.emitted, shard.redelivered) == (7, 4)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [([], []), ([3], [(3, 4)]), ([1, 2, 5, 6, 8], [(1, 3), (5, 7), (8, 9)])],
)
def test_offsets_are_split_into_consecutive_ranges(offsets, expected):
    assert list(split_runs(offsets, {}, 1)) == [(*bounds, False) for bounds in expected]


def test_split_runs_keeps_failed_messages_together():
    ranges = [(0, 2, False), (2, 4, False), (4, 6, False)]
    assert list(split_runs(range(6), {2: 1, 3: 2}, 4)) == ranges


def test_split_runs_isolates_last_attempts():
    ranges = [(0, 1, True), (1, 2, False), (2, 4, True), (4, 5, False)]
    assert list(split_runs(range(5), {0: 2, 2: 2, 3: 3}, 2)) == ranges


def test_shard_stops_reading_if_all_runs_fail(monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.client.assigned_shards.MAX_BLOCKED_KEYS", 3)
    shard = AssignedShard(given())
    queue = queue_with(shard, [f"k{n}" for n in range(9)])
    while (run := queue.begin(0.0)) is not None:
        queue.fail(run, "down")
    assert len(shard.failures) == 3
    assert not shard.wants_rows
    failed = shard.failures.popleft().run
    queue.retry(queue.schedule_followers(failed, failed.retry_runs({}, set())))
    run = queue.begin(0.0)
    assert run.offset == 0
    queue.finish(run)
    assert queue.begin(0.0).offset == 3


def test_full_shard_retries_failed_runs_and_starts_the_low_water_mark(monkeypatch):
    """Otherwise the shard would stop forever: every other message would add a range."""
    monkeypatch.setattr("polybus.dialects.fdq.client.assigned_shards.MAX_BLOCKED_KEYS", 3)
    shard = AssignedShard(given(), executors=2)
    first = queue_with(shard, ["a", "b", "c"])
    other = queue_with(shard, ["k1", "k2", "k3", "k4"], first=3)
    slow = first.begin(0.0)
    while (run := other.begin(0.0)) is not None:
        other.fail(run, "down")
    assert [failure.run.offset for failure in shard.failures] == [3, 4, 5]
    last = shard.failures.pop().run
    other.retry(other.schedule_followers(last, last.retry_runs({}, set())))
    assert started(other) == 5, "it touches nothing, but there is room"
    first.finish(slow)
    shard.collect_finished()
    assert started(first) == 1, "the low mark"
    first.fail(first.current, "down")
    assert started(first) is None, "a full shard starts no new run"


def test_rows_of_a_full_shard_free_the_fetch_buffer(monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.client.assigned_shards.MAX_BLOCKED_KEYS", 1)
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a", "b", "c"])
    queue.push([QueuedMessages(shard, FetchedRows(rows(3, ["d", "e"])), range(2))])
    failed = queue.begin(0.0)
    queue.fail(failed, "down")
    assert started(queue) is None
    assert (queue.freed_rows, shard.waiting, shard.waiting_bytes) == (5, 5, 5 * len(b"body"))
    queue.retry(queue.schedule_followers(failed, failed.retry_runs({}, set())))
    found = []
    while (run := queue.begin(0.0)) is not None:
        found.append(run.offset)
        queue.finish(run)
    assert found == [0, 1, 2, 3, 4]
    assert (queue.freed_rows, shard.waiting, shard.waiting_bytes) == (5, 0, 0)


def test_rows_behind_a_slow_run_free_the_fetch_buffer():
    shard = AssignedShard(given())
    queue = queue_with(shard, ["a", "b", "c"])
    slow = queue.begin(0.0)
    for _ in range(2):
        queue.park_pending()
        assert (queue.freed_rows, shard.waiting) == (3, 3)
    queue.finish(slow)
    while (run := queue.begin(0.0)) is not None:
        queue.finish(run)
    shard.collect_finished()
    assert (shard.done.low, queue.freed_rows, shard.waiting) == (3, 3, 0)
