"""A put stream without gRPC: answers in order, bounded, and a client that has gone."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from polybus.errors import MalformedRequest, OutOfSequence, StoreClosed
from polybus.testing.watch import until
from polybus.transports.flight.calls import Calls
from polybus.transports.flight.putting import Answering, Window, read_json


class Writer:
    """gRPC's: takes answers, until the client has gone."""

    def __init__(self) -> None:
        self.answers: list[dict[str, object]] = []
        self.is_gone = False

    def write(self, raw: bytes) -> None:
        if self.is_gone:
            raise OSError("gone")
        self.answers.append(json.loads(raw))


def answering(writer: Writer, calls: Calls, max_batches: int = 8, max_bytes: int = 100):
    errors: list[BaseException] = []
    made = Answering(
        writer,
        Window(max_batches, max_bytes, calls),
        lambda counter, done: {"counter": counter, "done": done},
        contextlib.nullcontext,
        errors.append,
    )
    return made, errors


def test_answers_come_in_order_whatever_ends_first():
    writer, calls = Writer(), Calls(10)
    stream, errors = answering(writer, calls)
    first, second = Future(), Future()
    stream.add(lambda: first, 1, 10)
    stream.add(lambda: second, 2, 10)
    stream.refuse(OutOfSequence("a gap"), 4)
    second.set_result("b")
    first.set_result("a")
    stream.close()
    assert writer.answers == [
        {"counter": 1, "done": "a"},
        {"counter": 2, "done": "b"},
        {"counter": 4, "error": {"code": "out_of_sequence", "text": "a gap"}},
    ]
    assert [type(one) for one in errors] == [OutOfSequence]  # it is counted
    assert calls.wait_settled(0)


def test_a_fault_of_ours_is_told_as_such_and_logged():
    writer = Writer()
    stream, errors = answering(writer, Calls(10))
    stream.add(lambda: 1 // 0, None, 1)
    stream.close()
    assert writer.answers[0]["error"]["code"] == "internal"  # type: ignore[index]
    assert [type(one) for one in errors] == [ZeroDivisionError]


@pytest.mark.parametrize(("max_batches", "max_bytes"), [(1, 1000), (100, 15)])
def test_what_is_under_way_is_bounded(max_batches, max_bytes):
    stream, _ = answering(Writer(), Calls(10), max_batches, max_bytes)
    first = Future()
    stream.add(lambda: first, 1, 10)
    with ThreadPoolExecutor(1) as pool:
        handed: list[int] = []
        second = pool.submit(stream.add, lambda: handed.append(2) or done(), 2, 10)
        assert not second.done()
        assert handed == []
        first.set_result(None)
        second.result(10)
    assert handed == [2]
    stream.add(done, 3, 10_000)  # larger than all of it: alone
    stream.close()


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_a_client_that_has_gone_holds_nothing_up():
    writer, calls = Writer(), Calls(10)
    stream, errors = answering(writer, calls, max_batches=1)
    writer.is_gone = True
    handed = []
    for number in range(5):
        stream.add(lambda number=number: handed.append(number) or done(), number, 1)
    stream.close()
    assert handed == [0, 1, 2, 3, 4]
    assert (writer.answers, errors) == ([], [])
    assert calls.wait_settled(0)


def test_a_port_that_stops_takes_no_more():
    writer, calls = Writer(), Calls(10)
    stream, _ = answering(writer, calls)
    first = Future()
    stream.add(lambda: first, 1, 1)
    calls.stop()
    with pytest.raises(StoreClosed):
        stream.add(done, 2, 1)
    assert not calls.wait_settled(0)
    first.set_result(None)
    stream.close()
    assert [one["counter"] for one in writer.answers] == [1]
    until(lambda: calls.wait_settled(0), "all is answered")


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b"[" * 10**5, b"1" * 5000, b" " * 200])
def test_what_is_no_json_object(raw):
    with pytest.raises(MalformedRequest, match=r"^it "):
        read_json(raw, 10**6 if len(raw) != 200 else 100, "it")


def test_json():
    assert read_json(b"", 10, "it") == {}
    assert read_json('{"ä": 1}'.encode(), 10, "it") == {"ä": 1}
