"""Pending and sent batches and their order, with a bus that responds on demand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest

from polybus.dialects.fdq.client.message_batcher import GRACE_S, LONG_LINGER_S, MessageBatcher
from polybus.dialects.fdq.limits import BatchOptions
from polybus.errors import ConnectionLost, Denied, UsageError
from polybus.model.delivery_time import DeliveryTime
from polybus.native import Produced
from polybus.native.client.produce_queue import build_batch
from tests.rig.observer import until

FOR_EVER_S = 1e6  # long: no test here sends by the linger timeout
DONE = Produced(1, 1, False)
PATIENCE_S = 30


class Slow:
    """A bus that takes batches and responds on demand."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, pa.RecordBatch]] = []
        self.deliveries: list[object] = []
        self.futures: list[Future[Produced]] = []
        self.open = Event()
        self.open.set()

    def send(self, topic: str, rows: pa.RecordBatch, delivery: object = None) -> Future[Produced]:
        assert self.open.wait(PATIENCE_S)
        future: Future[Produced] = Future()
        self.sent.append((topic, rows))
        self.deliveries.append(delivery)
        self.futures.append(future)
        return future

    def bodies(self) -> list[list[bytes]]:
        return [rows.column("body").to_pylist() for _, rows in self.sent]

    def answer(self, result: Produced | Exception = DONE) -> None:
        waiting, self.futures = self.futures, []
        for future in waiting:
            if future.cancelled():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


@pytest.fixture
def bus() -> Slow:
    return Slow()


@pytest.fixture
def merger(bus: Slow) -> Any:
    one = MessageBatcher(BatchOptions(linger_s=FOR_EVER_S), bus.send)
    yield one
    closing = Thread(target=one.close, args=(PATIENCE_S,), daemon=True)
    closing.start()
    until(lambda: bus.answer() or not closing.is_alive(), "the merger to end")


def add(merger: MessageBatcher, body: bytes, topic: str = "t") -> Future[Produced]:
    return merger.add(topic, "key", body, None)[0]


def started(merger: MessageBatcher, bus: Slow) -> None:
    """A batcher with one batch in flight."""
    add(merger, b"first")
    until(lambda: bus.sent, "the first")


def test_messages_of_different_delivery_times_are_not_merged(merger: MessageBatcher, bus: Slow):
    soon, late = DeliveryTime(delay_ms=1), DeliveryTime(delay_ms=2)
    add(merger, b"first")
    merger.send_if_free()
    for body, delivery in ((b"a", None), (b"b", soon), (b"c", None), (b"d", late), (b"e", soon)):
        merger.add("t", "key", body, None, delivery)
    merger.send_pending()
    assert bus.bodies() == [[b"first"], [b"a", b"c"], [b"b", b"e"], [b"d"]]
    assert bus.deliveries == [None, None, soon, late]


def test_first_message_is_sent_at_once(merger: MessageBatcher, bus: Slow) -> None:
    receipt = add(merger, b"x")
    until(lambda: bus.sent, "it to be sent")
    assert not receipt.done()
    bus.answer()
    assert receipt.result(PATIENCE_S) is DONE


def test_queued_message_cannot_be_cancelled(merger: MessageBatcher, bus: Slow) -> None:
    started(merger, bus)
    receipt = add(merger, b"x")
    assert (receipt.cancel(), receipt.running(), receipt.done()) == (False, True, False)


def test_pending_messages_are_sent_together_after_the_response(
    merger: MessageBatcher, bus: Slow
) -> None:
    started(merger, bus)
    receipts = [add(merger, b"%d" % n) for n in range(5)]
    assert bus.bodies() == [[b"first"]]
    bus.answer()
    until(lambda: len(bus.sent) == 2, "the rest")
    assert bus.bodies()[1] == [b"0", b"1", b"2", b"3", b"4"]
    bus.answer(Denied("no"))
    for receipt in receipts:
        with pytest.raises(Denied):
            receipt.result(PATIENCE_S)


def test_any_response_sends_pending_messages(merger: MessageBatcher, bus: Slow) -> None:
    """While other batches are still in flight."""
    started(merger, bus)
    merger.send_rows("t", build_batch(["k"], [b"second"], [0], None))
    add(merger, b"third")
    first = bus.futures.pop(0)
    first.set_result(DONE)
    until(lambda: len(bus.sent) == 3, "the third")
    assert bus.bodies()[2] == [b"third"]


def test_waiting_caller_sends_if_nothing_is_in_flight(merger: MessageBatcher, bus: Slow) -> None:
    started(merger, bus)
    add(merger, b"second")
    merger.send_if_free()
    assert len(bus.sent) == 1
    bus.answer()
    until(lambda: len(bus.sent) == 2, "the second, by the merger's own thread")
    bus.answer()
    add(merger, b"third")
    merger.send_if_free()
    assert bus.bodies()[2] == [b"third"]


def test_linger_timeout_sends_pending_messages(bus: Slow) -> None:
    now_s = [0.0]
    merger = MessageBatcher(BatchOptions(linger_s=0.001), bus.send, clock=lambda: now_s[0])
    started(merger, bus)
    add(merger, b"second")
    now_s[0] = 0.002
    until(lambda: len(bus.sent) == 2, "the second")
    bus.answer()
    assert merger.close(PATIENCE_S)


def test_caller_near_the_linger_deadline_sends(bus: Slow) -> None:
    now_s = [0.0]
    merger = MessageBatcher(BatchOptions(linger_s=60.0), bus.send, clock=lambda: now_s[0])
    started(merger, bus)
    due = []
    for moment_s in (1.0, 61.0 - 2 * GRACE_S, 61.0 - GRACE_S / 2):
        now_s[0] = moment_s
        add(merger, b"x")
        due.append(merger.is_due())
    assert due == [False, False, True]
    merger.send_pending()
    add(merger, b"y")
    assert not merger.is_due()
    bus.answer()
    until(lambda: bus.answer() or merger.flush(0), "the last")
    assert merger.close(PATIENCE_S)


def test_response_does_not_flush_early_without_a_waiter(bus: Slow) -> None:
    """Otherwise batches would be small, which costs the bus more."""
    now_s = [0.0]
    merger = MessageBatcher(
        BatchOptions(linger_s=LONG_LINGER_S / 2), bus.send, clock=lambda: now_s[0]
    )
    started(merger, bus)
    for _ in range(2):
        merger.send_rows("t", build_batch(["k"], [b"batch"], [0], None))
    add(merger, b"second")
    bus.futures.pop(0).set_result(DONE)
    assert len(bus.sent) == 3
    merger.send_if_free()  # a caller waits
    bus.futures.pop(0).set_result(DONE)
    until(lambda: len(bus.sent) == 4, "the second")
    bus.answer()
    assert merger.close(PATIENCE_S)


def test_linger_timeout_sends_messages_after_a_submitted_batch(
    bus: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the batch did not wake the thread, which waits without a deadline."""
    merger, waits_s = MessageBatcher(BatchOptions(linger_s=0.001), bus.send), []
    wait = merger._wait

    def note_wait(timeout_s: float | None) -> None:
        waits_s.append(timeout_s)
        wait(timeout_s)

    monkeypatch.setattr(merger, "_wait", note_wait)
    started(merger, bus)
    bus.answer()
    assert merger.flush(PATIENCE_S)
    until(lambda: waits_s and waits_s[-1] is None, "the thread waits without a deadline")
    merger.send_rows("t", build_batch(["k"], [b"batch"], [0], None))
    add(merger, b"second")
    until(lambda: len(bus.sent) == 3, "the second, before the batch is answered")
    bus.answer()
    assert merger.close(PATIENCE_S)


@pytest.mark.parametrize(
    "merging",
    [BatchOptions(FOR_EVER_S, max_batch_rows=3), BatchOptions(FOR_EVER_S, max_batch_bytes=342)],
)
def test_caller_that_fills_a_batch_must_send(bus: Slow, merging: BatchOptions) -> None:
    merger = MessageBatcher(merging, bus.send)
    started(merger, bus)
    must_send = [merger.add("t", None, b"x" * 50, None)[1] for _ in range(3)]
    assert must_send == [False, False, True]
    merger.send_pending()
    assert [len(one) for one in bus.bodies()] == [1, 3]
    bus.answer()
    assert merger.close(PATIENCE_S)


def test_batches_are_bounded_except_for_one_large_message(bus: Slow) -> None:
    """Many threads may add before one of them sends."""
    merger = MessageBatcher(BatchOptions(FOR_EVER_S, max_batch_bytes=1000), bus.send)
    started(merger, bus)
    sizes = [400, 400, 400, 5000, 100, 100]
    for size in sizes:
        merger.add("t", None, b"x" * size, None)
    merger.send_pending()
    assert [list(map(len, one)) for one in bus.bodies()[1:]] == [
        [400, 400],
        [400],
        [5000],
        [100, 100],
    ]
    bus.answer()
    assert merger.close(PATIENCE_S)


def test_keys_and_headers_count_as_bytes(bus: Slow) -> None:
    merger = MessageBatcher(BatchOptions(FOR_EVER_S, max_batch_bytes=1000), bus.send)
    started(merger, bus)
    assert not merger.add("t", "k" * 400, b"", None)[1]
    assert merger.add("t", None, b"", [("n" * 300, b"v" * 300)])[1]
    merger.send_pending()
    assert len(bus.sent) == 3
    bus.answer()
    assert merger.close(PATIENCE_S)


def test_submitted_batch_follows_pending_messages(merger: MessageBatcher, bus: Slow) -> None:
    started(merger, bus)
    add(merger, b"a")
    add(merger, b"elsewhere", "other")
    future = merger.send_rows("t", build_batch(["k"], [b"b"], [0], None))
    add(merger, b"c")
    merger.send_pending()
    assert bus.bodies() == [[b"first"], [b"a"], [b"elsewhere"], [b"b"], [b"c"]]
    assert [topic for topic, _ in bus.sent] == ["t", "t", "other", "t", "t"]
    bus.answer()
    assert future.result(PATIENCE_S) is DONE


def test_topic_with_headers_keeps_the_column(merger: MessageBatcher, bus: Slow) -> None:
    """Otherwise each change of columns would open a new stream."""
    started(merger, bus)
    add(merger, b"a")
    merger.add("t", None, b"b", [("name", b"value")])
    merger.send_pending()
    add(merger, b"c")
    add(merger, b"d", "other")
    merger.send_pending()
    headers = [rows.column("headers").to_pylist() for topic, rows in bus.sent[1:3]]
    assert headers == [[None, [("name", b"value")]], [None]]
    assert [rows.num_columns for _, rows in bus.sent] == [3, 4, 4, 3]
    assert merger.topics_with_headers == {"t"}


def test_failed_send_fails_its_futures() -> None:
    def refuse(topic: str, rows: pa.RecordBatch, delivery: object) -> Future[Produced]:
        raise Denied("no")

    merger = MessageBatcher(BatchOptions(), refuse)
    receipt = add(merger, b"x")
    with pytest.raises(Denied):
        receipt.result(PATIENCE_S)
    with pytest.raises(Denied):
        merger.send_rows("t", build_batch([None], [b"x"], [0], None)).result(PATIENCE_S)
    assert merger.close(PATIENCE_S)


def test_interrupted_sender_resolves_all_futures(merger: MessageBatcher, bus: Slow) -> None:
    started(merger, bus)
    receipts = [add(merger, b"x", topic) for topic in ("a", "b")]

    def interrupted(topic: str, rows: pa.RecordBatch, delivery: object) -> Future[Produced]:
        raise KeyboardInterrupt

    merger._send = interrupted
    with pytest.raises(KeyboardInterrupt):
        merger.send_pending()
    for receipt in receipts:
        with pytest.raises(ConnectionLost, match="interrupted"):
            receipt.result(PATIENCE_S)
    bus.answer()
    assert merger.flush(PATIENCE_S)


def test_cancelled_batch_is_not_waited_for(merger: MessageBatcher, bus: Slow) -> None:
    future = merger.send_rows("t", build_batch([None], [b"x"], [0], None))
    assert future.cancel()
    assert merger.flush(PATIENCE_S)


def test_flush_waits_for_results(merger: MessageBatcher, bus: Slow) -> None:
    assert merger.flush(0)
    started(merger, bus)
    receipt = add(merger, b"x")
    assert not merger.flush(0)
    until(lambda: len(bus.sent) == 2, "the flush to send pending messages")
    answering = Thread(target=bus.answer)
    answering.start()
    assert merger.flush(PATIENCE_S)
    assert receipt.done()
    answering.join()


def test_flush_times_out_while_send_blocks(merger: MessageBatcher, bus: Slow) -> None:
    bus.open.clear()
    add(merger, b"x")
    assert not merger.flush(0.01)
    bus.open.set()


def test_futures_resolve_while_a_sender_blocks(merger: MessageBatcher, bus: Slow) -> None:
    """A full bus takes no more batches until the first one is resolved."""
    started(merger, bus)
    bus.open.clear()
    add(merger, b"x")
    sending = Thread(target=merger.send_pending)
    sending.start()
    answered = Thread(target=bus.answer)
    answered.start()
    answered.join(PATIENCE_S)
    assert not answered.is_alive()
    bus.open.set()
    sending.join(PATIENCE_S)
    assert bus.bodies() == [[b"first"], [b"x"]]


def test_closed_batcher_takes_no_messages(merger: MessageBatcher, bus: Slow) -> None:
    receipt = add(merger, b"x")
    closing = Thread(target=merger.close)
    closing.start()
    until(lambda: bus.answer() or receipt.done(), "the last to be answered")
    closing.join(PATIENCE_S)
    refused: list[Callable[[], object]] = [
        lambda: add(merger, b"y"),
        lambda: merger.send_rows("t", build_batch([None], [b"x"], [0], None)),
    ]
    for call in refused:
        with pytest.raises(ConnectionLost, match="closed"):
            call()
    assert merger.close(PATIENCE_S)


def test_many_threads_lose_no_message_and_keep_their_order(bus: Slow) -> None:
    merger = MessageBatcher(BatchOptions(linger_s=0, max_batch_rows=7), bus.send)
    receipts: list[Future[Produced]] = []

    def work(number: int) -> None:
        for n in range(100):
            receipt, is_full = merger.add("t", None, b"%d %d" % (number, n), None)
            receipts.append(receipt)
            if is_full:
                merger.send_pending()

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: bus.answer() or not any(one.is_alive() for one in threads), "the threads")
    closing = Thread(target=merger.close)
    closing.start()
    until(lambda: bus.answer() or not closing.is_alive(), "the end")
    assert all(receipt.result(0) is DONE for receipt in receipts)
    found = [body.split() for bodies in bus.bodies() for body in bodies]
    for number in range(4):
        mine = [int(n) for who, n in found if int(who) == number]
        assert mine == list(range(100))


@pytest.mark.parametrize(
    "bad",
    [{"linger_s": -1}, {"linger_s": float("nan")}, {"max_batch_rows": 0}, {"max_batch_bytes": 0}],
)
def test_invalid_batch_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BatchOptions(**bad)
