"""A producer on an in-process bus: keys, batches, names, limits and close."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from polybus import errors, fdq
from polybus.dialects.fdq.client import fork_guard
from polybus.dialects.fdq.client.producer import MAX_PRODUCERS
from polybus.dialects.fdq.limits import MAX_MESSAGE_BYTES
from polybus.native import Client
from polybus.native.inprocess import open_bus
from tests.rig.observer import until

PATIENCE_S = 30
LONE = "\ud800"


@pytest.fixture(params=["memory", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path / 'store'}"


@pytest.fixture
def bus(url: str) -> Iterator[Client]:
    with open_bus(url) as opened:
        yield opened


def messages(url: str, topic: str = "t") -> list[bytes]:
    return [envelope.message for envelope in fdq.replay(url, topic)]


# --- single messages


def test_message_is_readable_when_produce_returns(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        produced = producer.produce("t", "customer-7", b"hello")
        (envelope,) = fdq.replay(url, "t")
    assert (produced.first_id, produced.last_id, produced.duplicate) == (1, 1, False)
    assert (envelope.shard_key, envelope.message, envelope.headers) == ("customer-7", b"hello", {})
    assert (envelope.topic, envelope.id, envelope.offset, envelope.delivery) == ("t", 1, 0, 1)
    assert envelope.shard == envelope.shard_index < 16
    assert 0 <= envelope.timestamp_ns // 1_000_000 - envelope.insertion_time < 60_000


def test_none_is_no_key_and_an_empty_string_is_a_key(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        for key in (None, "", None):
            producer.produce("t", key, b"x")
        found = [(one.shard_key, one.shard) for one in fdq.replay(url, "t")]
    assert [key for key, _ in found] == [None, "", None]
    assert found[0] != found[2], "those without a key take turns"


def test_headers_arrive(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        producer.produce("t", "k", b"1")
        producer.produce("t", "k", b"2", {"source": b"shell", "é": b"\xff"})
        producer.produce("t", "k", b"3", {})
        producer.produce_batch("t", [fdq.MessageRequest("k", b"4", {"a": b""})])
        producer.produce_batch("t", [fdq.MessageRequest("k", b"5")])
        found = [one.headers for one in fdq.replay(url, "t")]
    assert found == [{}, {"source": b"shell", "é": b"\xff"}, {}, {"a": b""}, {}]


def test_produce_without_waiting_keeps_the_order_per_key(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        futures = [producer.produce_nowait("t", f"key-{n % 7}", b"%d" % n) for n in range(3000)]
        assert all(isinstance(one, Future) for one in futures)
        assert producer.flush(PATIENCE_S)
        assert all(one.done() for one in futures)
        batches = {one.result() for one in futures}
        found = [(one.shard_key, int(one.message)) for one in fdq.replay(url, "t")]
    assert len(batches) < 300, "they travel together"
    assert len(found) == 3000
    for key in range(7):
        mine = [n for name, n in found if name == f"key-{key}"]
        assert mine == list(range(key, 3000, 7))


def test_produce_without_wait_returns_a_future(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        single: Any = producer.produce("t", "k", b"1", wait=False)
        batch: Any = producer.produce_batch("t", [("k", b"2")], wait=False)
        assert isinstance(single, Future)
        assert single.result(PATIENCE_S).first_id == 1
        assert batch.result(PATIENCE_S).first_id == 2


def test_pending_messages_precede_a_waiting_produce(bus: Client, url: str) -> None:
    with fdq.Producer(url, linger_s=PATIENCE_S) as producer:
        for n in range(9):
            if n % 3 == 0:
                producer.produce_nowait("t", "k", b"%d" % n)
            elif n % 3 == 1:
                producer.produce_batch_nowait("t", [("k", b"%d" % n)])
            else:
                producer.produce("t", "k", b"%d" % n)
        assert messages(url) == [b"%d" % n for n in range(9)]


def test_named_producer_is_fenced_for_every_topic(bus: Client, url: str) -> None:
    """All its topics use the one producer of the bus that has the name."""
    topics = ("t", "u", "v")
    with fdq.Producer(url, "importer") as older:
        for topic in topics:
            older.produce(topic, "k", b"older")
        with fdq.Producer(url, "importer") as newer:
            for topic in topics:
                newer.produce(topic, "k", b"newer")
            for topic in topics:
                with pytest.raises(errors.Fenced):
                    older.produce(topic, "k", b"late")
    for topic in topics:
        assert messages(url, topic) == [b"older", b"newer"]


def test_many_topics_share_a_few_streams(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        for n in range(60):
            producer.produce_nowait(f"topic-{n % 20}", "k", b"%d" % n)
        producer.flush()
        assert len(producer._pool._all) == MAX_PRODUCERS
        for topic in range(20):
            expected = [b"%d" % n for n in range(topic, 60, 20)]
            assert messages(url, f"topic-{topic}") == expected


def test_many_threads_share_a_producer(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer, ThreadPoolExecutor(8) as pool:

        def work(number: int) -> None:
            for n in range(50):
                producer.produce("t", f"k{number}", b"%d" % n, wait=n % 10 == 0)

        list(pool.map(work, range(8)))
        producer.flush()
        found = [(one.shard_key, int(one.message)) for one in fdq.replay(url, "t")]
    for number in range(8):
        assert [n for key, n in found if key == f"k{number}"] == list(range(50))


# --- batches


def test_batch_is_atomic_over_all_shards(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        produced = producer.produce_batch(
            "t", (fdq.MessageRequest(f"k{n}", b"%d" % n) for n in range(100))
        )
        found = list(fdq.replay(url, "t"))
    assert (produced.first_id, produced.last_id) == (1, 100)
    assert len({one.shard for one in found}) == 16
    assert len({one.timestamp_ns for one in found}) == 1
    assert [one.shard for one in found] == sorted(one.shard for one in found)


def test_batch_with_an_invalid_message_is_refused(bus: Client, url: str) -> None:
    good = [("k", b"fine")] * 3
    with fdq.Producer(url) as producer:
        producer.produce("t", "k", b"before")
        bad: list[tuple[Any, type[Exception]]] = [
            (("k" * 1025, b"x"), errors.TooLarge),
            ((LONE, b"x"), errors.MalformedRequest),
            (("k", "text"), errors.MalformedRequest),
            (("k", b"x", {"a": "text"}), errors.MalformedRequest),
            (b"bytes", errors.MalformedRequest),
        ]
        for one, kind in bad:
            with pytest.raises(kind):
                producer.produce_batch("t", [*good, one])
        assert messages(url) == [b"before"]


def test_batch_over_the_topic_quota_is_refused(bus: Client, url: str) -> None:
    bus.act("topic.create", topic="t", settings={"max_bytes": 20_000})
    with fdq.Producer(url) as producer:
        with pytest.raises(errors.LimitReached):
            producer.produce_batch("t", [(f"k{n}", b"x" * 1000) for n in range(100)])
        producer.produce_batch("t", [("k", b"small")])
        assert messages(url) == [b"small"]


def test_arrow_batches(bus: Client, url: str) -> None:
    rows = pa.RecordBatch.from_pydict(
        {"shard_key": pa.array(["a", None]), "body": pa.array([b"x", b"y"])}
    )
    with fdq.Producer(url) as producer:
        producer.produce_batch("t", rows)
        assert sorted(messages(url)) == [b"x", b"y"]
        with pytest.raises(errors.MalformedRequest, match="empty"):
            producer.produce_batch("t", rows.slice(0, 0))


@pytest.mark.parametrize("nothing", [[], (), iter(())])
def test_an_empty_batch_is_refused(bus: Client, url: str, nothing: Any) -> None:
    with fdq.Producer(url) as producer:
        with pytest.raises(errors.MalformedRequest, match="empty batch"):
            producer.produce_batch("t", nothing)
        assert bus.act("topic.list")["topics"] == []


@pytest.mark.parametrize("mistake", [b"bytes", "text", {"k": b"x"}])
def test_invalid_batches_are_refused(bus: Client, url: str, mistake: Any) -> None:
    with fdq.Producer(url) as producer, pytest.raises(errors.MalformedRequest):
        producer.produce_batch("t", mistake)


# --- invalid input


@pytest.mark.parametrize(
    ("key", "message", "kind"),
    [
        ("k" * 1025, b"x", errors.TooLarge),
        (LONE, b"x", errors.MalformedRequest),
        (b"bytes", b"x", errors.MalformedRequest),
        (7, b"x", errors.MalformedRequest),
        ("k", "text", errors.MalformedRequest),
        ("k", None, errors.MalformedRequest),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_invalid_message_fails_only_its_caller(
    bus: Client, url: str, key: Any, message: Any, kind: type[Exception], wait: bool
) -> None:
    with fdq.Producer(url, linger_s=PATIENCE_S) as producer:
        others = [producer.produce_nowait("t", "k", b"%d" % n) for n in range(2)]
        with pytest.raises(kind):
            producer.produce("t", key, message, wait=wait)
        producer.flush()
        assert all(one.exception() is None for one in others)
        assert messages(url) == [b"0", b"1"]


def test_the_largest_message_passes_and_a_larger_one_does_not(url: str) -> None:
    with fdq.Producer(url) as producer:
        producer.produce("t", "k" * 1024, b"x" * MAX_MESSAGE_BYTES)
        with pytest.raises(errors.TooLarge, match="at most 67108864"):
            producer.produce("t", "k", b"x" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("topic", ["", "a,b", "a*", "_own", "x" * 256, "a\nb", LONE, 7, None, b"t"])
def test_invalid_topics_are_refused(url: str, topic: Any) -> None:
    with fdq.Producer(url) as producer:
        with pytest.raises(errors.InvalidTopic):
            producer.produce(topic, "k", b"x")
        with pytest.raises(errors.InvalidTopic):
            producer.produce_batch_nowait(topic, [("k", b"x")])


@pytest.mark.parametrize("bad", ["orders", "http://x", "polybus://nowhere", "lmdb:"])
def test_invalid_urls_are_refused(bad: str) -> None:
    with pytest.raises(errors.AddressError):
        fdq.Producer(bad)


@pytest.mark.parametrize("name", ["", "x" * 256, LONE, 7])
def test_invalid_names_are_refused(url: str, name: Any) -> None:
    with pytest.raises(errors.UsageError):
        fdq.Producer(url, name)


def test_unreachable_bus_fails_to_connect() -> None:
    from polybus.native import ClientOptions

    with pytest.raises(errors.NotConnected):
        fdq.Producer("polybus://127.0.0.1:1", options=ClientOptions(connect_timeout_s=0))


# --- topics


def test_missing_topics_are_created_with_sixteen_shards(bus: Client, url: str) -> None:
    with fdq.Producer(url) as producer:
        producer.produce("new", "k", b"x")
    assert bus.act("topic.info", topic="new")["shards"] == 16


def test_missing_topics_are_not_created_without_create(bus: Client, url: str) -> None:
    bus.act("topic.create", topic="there", shards=2)
    with fdq.Producer(url, create=False) as producer:
        producer.produce("there", "k", b"x")
        for _ in range(2):
            with pytest.raises(errors.DoesNotExist, match="nowhere"):
                producer.produce_nowait("nowhere", "k", b"x")
            with pytest.raises(errors.DoesNotExist, match="nowhere"):
                producer.produce_batch("nowhere", [("k", b"x")])
        assert [one["topic"] for one in bus.act("topic.list")["topics"]] == ["there"]
        bus.act("topic.create", topic="nowhere")
        producer.produce("nowhere", "k", b"x")  # it exists now
        bus.act("topic.drop", topic="nowhere")
        with pytest.raises(errors.DoesNotExist, match="nowhere"):
            producer.produce("nowhere", "k", b"x")
        with pytest.raises(errors.MalformedRequest, match="batch must be a list of messages"):
            producer.produce_batch("there", None)


# --- names and close


def test_a_newer_one_of_the_same_name_fences_the_older(bus: Client, url: str) -> None:
    older = fdq.Producer(url, "importer")
    older.produce("t", "k", b"1")
    newer = fdq.Producer(url, "importer")
    assert (older.name, newer.name) == ("importer", "importer")
    assert newer.epoch == older.epoch + 1
    newer.produce("t", "k", b"2")
    futures = [older.produce_nowait("t", "k", b"%d" % n) for n in (3, 4)]
    for future in futures:
        with pytest.raises(errors.Fenced):
            future.result(PATIENCE_S)
    with pytest.raises(errors.Fenced):
        older.produce("t", "k", b"5")
    newer.produce("other", "k", b"6")
    assert messages(url) == [b"1", b"2"]
    older.close()
    newer.close()


def test_named_producer_continues_its_sequence(url: str) -> None:
    for n in range(3):
        with fdq.Producer(url, "importer") as producer:
            assert producer.epoch == n + 1 or url.startswith("memory")
            producer.produce("t", "k", b"%d" % n)


def test_unnamed_producers_are_independent(bus: Client, url: str) -> None:
    with fdq.Producer(url) as one, fdq.Producer(url) as other:
        assert one.name != other.name
        one.produce("t", "k", b"1")
        other.produce("t", "k", b"2")
        one.produce("t", "k", b"3")
    assert messages(url) == [b"1", b"2", b"3"]


def test_close_sends_pending_messages(bus: Client, url: str) -> None:
    producer = fdq.Producer(url, linger_s=PATIENCE_S)
    futures = [producer.produce_nowait("t", "k", b"%d" % n) for n in range(10)]
    producer.close()
    producer.close()
    assert all(one.done() and one.exception() is None for one in futures)
    assert len(messages(url)) == 10
    for call in (
        lambda: producer.produce("t", "k", b"late"),
        lambda: producer.produce_batch("t", [("k", b"late")]),
    ):
        with pytest.raises(errors.ConnectionLost, match="closed"):
            call()


def test_failing_program_still_sends_pending_messages(bus: Client, url: str) -> None:
    def program() -> None:
        with fdq.Producer(url, linger_s=PATIENCE_S) as producer:
            producer.produce_nowait("t", "k", b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert messages(url) == [b"x"]


def test_use_in_a_forked_child_is_refused(
    bus: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fdq.Producer(url) as producer:
        producer.produce("t", "k", b"x")
        with monkeypatch.context() as child:
            child.setattr(fork_guard, "pid", os.getpid() + 1)
            for call in (
                lambda: producer.produce("t", "k", b"y"),
                lambda: producer.produce_batch("t", [("k", b"y")]),
                producer.flush,
            ):
                with pytest.raises(errors.StoreClosed, match=f"process {os.getpid()}"):
                    call()
            producer.close()  # does not affect the parent's producer
        producer.produce("t", "k", b"z")
    assert messages(url) == [b"x", b"z"]


def test_fork_guard_knows_the_child_process() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, b"%d" % fork_guard.pid)
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 100)) == pid
    os.close(read)
    os.close(write)


def test_callback_may_produce(bus: Client, url: str) -> None:
    """A callback may produce, but must not wait for the result."""
    with fdq.Producer(url) as producer:
        first = producer.produce_nowait("t", "k", b"1")
        first.add_done_callback(lambda _: producer.produce_nowait("t", "k", b"2"))
        first.result(PATIENCE_S)
        until(lambda: len(messages(url)) == 2, "the second")
    assert messages(url) == [b"1", b"2"]
