"""Parts of a consumer in isolation: fetch window and buffer, dispatchers, acks, shards."""

import threading
from itertools import accumulate
from typing import Any, cast

import pyarrow as pa
import pytest
import xxhash

from polybus.dialects.fdq.client.acker import AckBatch
from polybus.dialects.fdq.client.assigned_shards import AssignedShard, AssignedShards
from polybus.dialects.fdq.client.consumer import ConsumeOptions
from polybus.dialects.fdq.client.executor import WakeSignal, format_reason
from polybus.dialects.fdq.client.fetcher import (
    FOLLOW_S,
    HORIZON_S,
    BatchDispatcher,
    FetchBuffer,
    Fetcher,
    FetchWindow,
    MessageDispatcher,
    choose_executors,
)
from polybus.dialects.fdq.client.handler_run import FetchedRows, QueuedMessages
from polybus.dialects.fdq.client.key_queue import KeyOrderedQueue
from polybus.errors import InvalidTopic, UsageError
from polybus.model.arrow import READ_SCHEMA


def batch(keys, first=0):
    count = len(keys)
    at = list(range(first, first + count))
    columns = [at, [0] * count, at, at, at, keys, [b"body"] * count, [None] * count]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, READ_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=READ_SCHEMA)


def rows(keys, first=0):
    return FetchedRows(batch(keys, first))


def shard(number=0, epoch=1, **more):
    return AssignedShard({"shard": number, "epoch": epoch, "low": 0, **more})


# --- fetching


def test_window_adapts_within_its_bounds():
    window = FetchWindow(10, 1000)
    assert window.rows == 10
    window.adjust(500, HORIZON_S, left_rows=500)
    assert window.rows == 500
    window.adjust(10**9, 0.0, left_rows=0)
    assert window.rows == 1000
    window.adjust(1, 100.0, left_rows=0)
    assert window.rows == 10
    window.adjust(10, 100.0, left_rows=0)
    assert window.rows == 40, "all was used up: fetches are slow"


class RespondingMember:
    """A member that gets one assignment response."""

    def __init__(self, **changes):
        self._response = {"assigned": [], "release": [], "lost": [], **changes}

    def retry(self, step):
        step()

    def follow(self, **asked):
        yield self._response, None


@pytest.mark.parametrize("is_releasing", [True, False])
def test_lost_shard_is_logged_as_warning_unless_released(caplog, is_releasing):
    held, options = AssignedShards(), ConsumeOptions("t", "one", print)
    held.put(shard(3), 0)
    if is_releasing:
        held.start_release(3)
    member, committer = cast(Any, RespondingMember(lost=[3])), cast(Any, None)
    Fetcher(
        options, member, held, [], committer, FetchBuffer(FetchWindow(10, 10)), print
    ).fetch_once()
    assert held.all() == []
    assert ("one lost shard 3 of t" in caplog.messages) is not is_releasing


def test_window_covers_follow_time_if_executors_keep_up():
    window = FetchWindow(1, 1000)
    window.adjust(80, FOLLOW_S, left_rows=10)
    assert window.rows == 80
    window.adjust(80, FOLLOW_S, left_rows=11)
    assert window.rows == 80 * HORIZON_S / FOLLOW_S, "it does not keep up"


def test_buffer_has_room_when_half_of_it_has_begun():
    buffer = FetchBuffer(FetchWindow(10, 10))
    assert buffer.wait_for_room(0) == 10
    buffer.add(10, 1000)
    assert buffer.wait_for_room(0) == 0
    buffer.free(4)
    assert buffer.wait_for_room(0) == 0
    buffer.free(1)
    assert buffer.wait_for_room(0) == 5
    buffer.close()
    assert buffer.wait_for_room(10) == 0


def test_buffer_counts_bytes():
    buffer = FetchBuffer(FetchWindow(10, 10))
    buffer.add(2, 1 << 40)
    assert buffer.wait_for_room(0) == 0
    buffer.free(2)
    assert buffer.wait_for_room(0) == 10


def test_key_has_one_executor_by_bits_that_did_not_choose_its_shard():
    keys = [f"key-{n}" for n in range(400)]
    # Keys of one shard, whose hashes have equal low bits.
    same = [key for key in keys if xxhash.xxh64_intdigest(key.encode()) % 16 == 3]
    executors = choose_executors(rows(same), range(len(same)), 4)
    assert executors == choose_executors(rows(same), range(len(same)), 4)
    assert set(executors) == set(range(4))


def test_messages_without_a_key_are_spread_over_executors():
    assert choose_executors(rows([None] * 6, first=2), range(6), 3) == [2, 0, 1, 2, 0, 1]
    assert choose_executors(rows(["é", ""]), range(2), 1) == [0, 0]


def joined(*parts):
    """One fetched batch, with the slice of each shard."""
    table = pa.Table.from_batches([part for _, part in parts])
    starts = accumulate((part.num_rows for _, part in parts), initial=0)
    places = [(held, at, part.num_rows) for (held, part), at in zip(parts, starts, strict=False)]
    return table.combine_chunks().to_batches()[0], places


def taken(pieces):
    """Return the offsets of queued rows, run by run."""
    runs_taken = []
    for piece in pieces:
        while (run := piece.take()) is not None:
            runs_taken.append((run.shard.number, list(run.offsets)))
    return runs_taken


def test_messages_are_dispatched_by_key_without_done_ones():
    one, two = shard(1), shard(2, ranges=[[5, 7]])
    dispatched, count, size = MessageDispatcher(1).dispatch(
        *joined((one, batch(["a", "b"])), (two, batch("cdef", 4)))
    )
    assert taken(dispatched[0]) == [(1, [0]), (1, [1]), (2, [4]), (2, [7])]
    assert count == 4
    assert size > 6 * len(b"body")
    dispatched, count, _ = MessageDispatcher(3).dispatch(*joined((one, batch([None] * 4))))
    assert {queue: taken(pieces) for queue, pieces in dispatched.items()} == {
        0: [(1, [0]), (1, [3])],
        1: [(1, [1])],
        2: [(1, [2])],
    }


def test_batches_are_dispatched_by_shard_and_split_at_done_rows():
    one, two = shard(1), shard(2, ranges=[[5, 7]])
    dispatched, count, _ = BatchDispatcher(2, 4).dispatch(
        *joined((one, batch("ab")), (two, batch("cdefgh", 3)))
    )
    assert taken(dispatched[1]) == [(1, [0, 1])]
    assert taken(dispatched[0]) == [(2, [3, 4]), (2, [7, 8])]
    assert count == 6


def test_waiting_message_does_not_keep_its_fetch_alive():
    held = shard()
    queue = queue_of(held, ["a", "b"])
    run = ended(queue, well=False)
    assert len(run._rows.bodies) == 1
    assert run.build_argument("t", 0).shard_key == "a"


# --- reports


def ended(queue, *, well):
    run = queue.begin(0.0)
    if well:
        queue.finish(run)
    else:
        queue.fail(run, "why")
    return run


def queue_of(held, keys):
    queue = KeyOrderedQueue()
    queue.push([QueuedMessages(held, rows(keys), range(len(keys)))])
    return queue


def test_unsent_report_is_repeated_unchanged():
    held = shard()
    queue = queue_of(held, ["a", "b", "c"])
    for well in (True, False, True):
        ended(queue, well=well)
    first = AckBatch(held)
    entry = first.build_report()
    assert entry == {
        "shard": 0,
        "epoch": 1,
        "acked": [(0, 1), (2, 3)],
        "failed": [{"offset": 1, "reason": "why", "attempt": 0}],
        "emitted": 3,
        "redelivered": 0,
        "release": False,
    }
    assert not held.failures
    first.restore()
    assert held.has_unreported()
    assert AckBatch(held).build_report() == entry


def test_response_decides_the_followers_of_a_failed_run():
    held = shard()
    queue = queue_of(held, ["a", "b", "c"])
    runs = [ended(queue, well=False) for _ in range(3)]
    answer = {"low": 0, "attempts": {"0": 1, "2": 1}, "dead": [1], "error": None}
    following = AckBatch(held).apply_response(answer)
    assert [run for run, _ in following] == runs
    assert [[run.offset for run in after] for _, after in following] == [[0], [], [2]]
    assert list(held.done) == [(1, 2)]
    assert not held.has_unreported()


def test_failed_message_that_is_done_is_not_retried():
    """The response with its dead letter was lost."""
    held = shard()
    queue = queue_of(held, ["a"])
    ended(queue, well=False)
    following = AckBatch(held).apply_response({"low": 1, "attempts": {}, "dead": [], "error": None})
    assert [after for _, after in following] == [[]]
    assert held.done.low == 1


def test_failures_over_the_limit_are_retried_uncounted():
    held = shard()
    queue = queue_of(held, ["a", "b"])
    ended(queue, well=True)
    ended(queue, well=False)
    following = AckBatch(held).retry_uncounted()
    assert [[run.offset for run in after] for _, after in following] == [[1]]
    assert AckBatch(held).build_report()["acked"] == [(0, 1)]


# --- assigned shards


def test_assignment_of_an_earlier_generation_is_ignored():
    assigned = AssignedShards()
    generation = assigned.generation
    first = shard()
    assert assigned.put(first, generation)
    assigned.drop_all()
    assert not first.is_open
    assert not first.is_held
    assert not assigned.put(shard(), generation)
    assert assigned.all() == []


def test_newer_assignment_replaces_the_older():
    assigned = AssignedShards()
    old, new = shard(epoch=1), shard(epoch=2)
    assigned.put(old, 0)
    assigned.put(new, 0)
    assert not old.is_open
    assert assigned.get(0, 1) is None
    assert assigned.get(0, 2) is new
    assigned.drop(old)
    assert assigned.all() == [new]


def test_release_starts_once_and_close_applies_to_later_shards():
    assigned = AssignedShards()
    first = shard()
    assigned.put(first, 0)
    assert assigned.start_release(0)
    assert not assigned.start_release(0)
    assert not assigned.start_release(7)
    assert not first.is_open
    assert first.is_held
    assert [(held["paused"], held["releasing"]) for held in assigned.describe_held()] == [
        (True, True)
    ]
    assigned.close()
    late = shard(1)
    assigned.put(late, 0)
    assert not late.is_open


# --- other parts


def test_wake_signal_does_not_miss_earlier_work():
    signal = WakeSignal()
    signal.wait(60, unless=lambda: True)
    waker = threading.Thread(target=signal.wake_urgently)
    waker.start()
    signal.wait(60)
    signal.wait_urgent(60)
    waker.join()


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\n  b"), "ValueError: a b"),
        (SystemExit(), "SystemExit"),
        (Unspeakable(), "Unspeakable: the error has no text"),
    ],
)
def test_reason_of_a_failure_is_one_line(error, text):
    assert format_reason(error) == text
    assert len(format_reason(ValueError("x" * 10_000))) == 500


def test_consume_options_are_checked():
    ConsumeOptions("t", "n", print)
    with pytest.raises(InvalidTopic):
        ConsumeOptions("", "n", print)
    wrongs: list[dict[str, Any]] = [
        {"name": ""},
        {"group": "g" * 129},
        {"dead_s": 1.0},
        {"heartbeat_s": 0},
        {"dead_s": float("inf")},
        {"topic": None},
        {"name": None},
        {"name": "\udcff"},
        {"group": 3},
        {"executors": 1.5},
        {"executors": "2"},
        {"max_deliver": 2.5},
    ]
    for wrong in wrongs:
        given: dict[str, Any] = {"topic": "t", "name": "n", "handler": print, **wrong}
        with pytest.raises(UsageError):
            ConsumeOptions(**given)
