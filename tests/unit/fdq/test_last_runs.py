"""Last runs of a failed batch: each message alone, many of them in one report."""

from types import SimpleNamespace
from typing import Any

import pytest

from polybus.dialects.fdq.client import handler_run
from polybus.dialects.fdq.client.acker import MAX_FAILED, MAX_SHARDS, AckBatch, split_calls
from polybus.dialects.fdq.client.assigned_shards import AssignedShard
from polybus.dialects.fdq.client.handler_run import BatchRun, LastRuns, QueuedBatches
from polybus.dialects.fdq.client.key_queue import KeyOrderedQueue
from tests.unit.fdq.test_key_queue import given, rows

MAX_DELIVER = 2


class FailedBatch:
    """A batch whose first run has failed, and a model of the bus that answers its reports."""

    def __init__(self, count, **assignment):
        self.shard = AssignedShard(given(**assignment))
        self.queue: Any = KeyOrderedQueue()
        batch = rows(0, ["k"] * count)
        self.queue.push([QueuedBatches(self.shard, batch, 0, MAX_DELIVER - 1)])
        self.ran = []  # offsets of last runs
        self.now_s = 0.0
        run: Any = self.queue.begin(0.0)
        self.queue.fail(run, "no")
        self.report()

    def run(self, bad=(), most=None):
        """Run the handler until no run can start, or `most` times."""
        while most != 0 and (run := self.queue.begin(self.now_s)) is not None:
            most = None if most is None else most - 1
            (offset,) = run.offsets
            assert run.build_argument("t", 0).column("offset").to_pylist() == [offset]
            self.ran.append(offset)
            if offset in bad:
                self.queue.fail(run, f"bad {offset}")
            else:
                self.queue.finish(run)

    def report(self, alive=()):
        """Report as the acker does. Messages in `alive` cannot become dead letters."""
        batch = AckBatch(self.shard)
        sent = batch.build_report()
        attempts = {
            str(one["offset"]): one["attempt"] + 1
            for one in sent["failed"]
            if one["attempt"] + 1 < MAX_DELIVER or one["offset"] in alive
        }
        response = {"attempts": attempts, "low": 0}
        for run, runs in batch.apply_response(response):
            follower = self.queue.schedule_followers(run, runs)
            if follower is not None:
                self.queue.retry(follower)
        return {
            "acked": sent["acked"],
            "failed": [(one["offset"], one["reason"]) for one in sent["failed"]],
        }


def test_failed_last_runs_are_one_report():
    batch = FailedBatch(100)
    batch.run(bad=range(100))
    assert batch.ran == list(range(100))
    assert batch.report()["failed"] == [(n, f"bad {n}") for n in range(100)]
    assert batch.shard.done.low == 100
    assert (batch.shard.emitted, batch.shard.redelivered) == (200, 100)
    assert (batch.shard.waiting, batch.queue.begin(0.0)) == (0, None)
    assert batch.report() == {"acked": [], "failed": []}


def test_good_messages_of_a_failed_batch_are_acked():
    batch = FailedBatch(6)
    batch.run(bad={3})
    assert batch.report() == {"acked": [(0, 3)], "failed": [(3, "bad 3")]}
    assert batch.report() == {"acked": [(4, 6)], "failed": []}
    assert batch.ran == [0, 1, 2, 3, 4, 5]
    assert (batch.shard.emitted, batch.shard.redelivered) == (12, 6)


def test_message_that_is_not_dead_runs_again_before_later_ones():
    """The bus could not write the dead letter of 1, so the success of 2 does not count."""
    batch = FailedBatch(5)
    batch.run(bad={1, 3})
    assert batch.report(alive={1}) == {"acked": [(0, 1)], "failed": [(1, "bad 1"), (3, "bad 3")]}
    assert batch.report()["acked"] == []
    batch.run()
    assert batch.ran == [0, 1, 2, 3, 4, 1, 2, 4]
    assert batch.report()["acked"] == [(1, 3), (4, 5)]
    assert (batch.shard.emitted, batch.shard.redelivered) == (5 + 8, 8)


def test_success_before_the_first_failure_is_acked_at_once():
    batch = FailedBatch(5)
    batch.run(most=3)
    assert batch.report() == {"acked": [(0, 3)], "failed": []}


@pytest.mark.parametrize("limit", ["MAX_LAST_FAILURES", "MAX_LAST_BYTES"])
def test_number_and_bytes_of_failures_in_a_report_are_limited(monkeypatch, limit):
    monkeypatch.setattr(handler_run, limit, 3 if limit == "MAX_LAST_FAILURES" else 1)
    count = 3 if limit == "MAX_LAST_FAILURES" else 1
    batch = FailedBatch(7)
    reports = []
    for _ in range(9):
        batch.run(bad=range(7))
        reports.append(len(batch.report()["failed"]))
    assert batch.ran == list(range(7))
    assert (sum(reports), max(reports)) == (7, count)
    assert (batch.shard.done.low, batch.shard.waiting) == (7, 0)


def test_failure_is_reported_before_slow_followers_end():
    batch = FailedBatch(5)
    batch.run(bad={0}, most=1)
    batch.now_s += 1.0  # of the handler's time
    batch.run()
    assert batch.ran == [0, 1]
    assert batch.report()["failed"] == [(0, "bad 0")]
    batch.run()
    assert batch.ran == [0, 1, 2, 3, 4]
    batch.shard.collect_finished()
    assert batch.shard.done.low == 5


def test_message_that_was_given_up_is_the_only_one_that_fails():
    batch = FailedBatch(4)
    batch.run(most=1)
    run = batch.queue.begin(0.0)
    assert list(run.offsets) == [1]
    assert batch.queue.fail(run, "too long", is_given_up=True)
    assert not batch.queue.finish(run), "its thread returns later"
    assert batch.report()["failed"] == [(1, "too long")]
    batch.run()
    assert batch.ran == [0, 2, 3]


def test_last_runs_end_when_their_shard_is_closed():
    batch = FailedBatch(9)
    batch.run(bad={1}, most=2)
    batch.shard.is_open = False
    assert batch.queue.begin(0.0) is None
    assert batch.queue.current is None
    assert batch.report() == {"acked": [(0, 1)], "failed": [(1, "bad 1")]}


def test_shard_that_is_closed_during_a_run_starts_no_other():
    batch = FailedBatch(9)
    run = batch.queue.begin(0.0)
    batch.shard.is_open = False
    batch.queue.finish(run)
    assert batch.queue.current is None
    batch.shard.collect_finished()
    assert batch.shard.done.low == 1


def test_waiting_last_run_has_not_begun():
    """It neither times out nor counts as running, for example while the lease is lost."""
    batch = FailedBatch(3)
    run = batch.queue.begin(5.0)
    batch.queue.finish(run)
    assert batch.queue.current is run
    assert run.started_s == float("inf")


def test_messages_with_failed_runs_are_fetched_as_last_runs():
    shard = AssignedShard(given(attempts={"1": 1, "2": 1, "3": 1}, suspect_to=2))
    queued = QueuedBatches(shard, rows(0, ["k"] * 5), 0, MAX_DELIVER - 1)
    runs = []
    while (run := queued.take()) is not None:
        runs.append((type(run), run.offset, run.batch.num_rows))
    # A suspect message is reported to the bus before its run, so it runs alone.
    assert runs == [(BatchRun, 0, 1), (BatchRun, 1, 1), (LastRuns, 2, 2), (BatchRun, 4, 1)]


def test_suspect_messages_have_runs_of_their_own():
    shard = AssignedShard(given(suspect_to=3))
    run = BatchRun(shard, rows(0, ["k"] * 3), 0, MAX_DELIVER - 1)
    retries = run.retry_runs({}, set())
    assert [(type(one), list(one.offsets)) for one in retries] == [
        (BatchRun, [0]),
        (BatchRun, [1]),
        (BatchRun, [2]),
    ]


def test_calls_have_a_limited_number_of_shards_and_failures():
    def split(counts):
        reports: Any = [SimpleNamespace(failed_count=count) for count in counts]
        return [[report.failed_count for report in call] for call in split_calls(reports)]

    assert split([]) == []
    assert split([512, 512, 512, 1, 4096, 1]) == [[512, 512], [512, 1], [4096], [1]]
    assert list(map(len, split([0] * (MAX_SHARDS + 1)))) == [MAX_SHARDS, 1]
    assert split([MAX_FAILED, 0]) == [[MAX_FAILED, 0]]
