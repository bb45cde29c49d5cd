"""GET: its answers, the stored LAST, and the message cache; bounds of PUT."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from polybus.dialects.pirate.codec import GET, HELLO, PUT, ClientRequest
from polybus.dialects.pirate.server import get_handler, subscriber_records
from polybus.dialects.pirate.server.subscriber_records import SubscriptionKey
from polybus.errors import DoesNotExist, Fenced, LimitReached, MalformedRequest, StoreFull
from polybus.model.commit import Commit, CommitResult
from polybus.testing.conformance.sample_blocks import block
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


def test_get_returns_the_first_message_above_last(world):
    client = world.client()
    client.sub("t")
    for body in (b"a", b"", b"c"):
        client.put("t", body)
    assert client.get("t", 0) == (1, client.get("t", 0).timestamp_ns, b"a")
    assert client.get("t", 1).body == b""
    assert client.get("t", 2).body == b"c"
    assert client.get("t", 3) is None


def test_get_returns_messages_newer_than_the_cache(world):
    client = world.client()
    client.sub("t")
    client.put("t", b"a")
    client.put("t", b"b")
    assert client.get("t", 0).body == b"a"  # both are cached now
    client.put("t", b"c")
    assert client.get("t", 2).body == b"c"


def test_sent_messages_are_not_read_and_last_never_goes_back(world):
    client = world.client()
    client.sub("t")
    for _ in range(3):
        client.put("t")
    assert [client.get("t", last).id for last in (0, 0, 2, 0, 1)] == [1, 1, 3, 3, 3]


def stored_last(world) -> int:
    number = world.durable.get("t").number
    key = subscriber_records.record_key(subscriber_records.LASTS, SubscriptionKey(number, b"c"))
    raw = world.store.get(key)
    return subscriber_records.read_last(raw.value)


def test_get_is_answered_before_last_is_on_disk(world):
    client = world.client()
    client.sub("t")
    for _ in range(3):
        client.put("t")
    assert client.get("t", 0).id == 1  # all three are cached now
    replies = world.send(ClientRequest(GET, b"c", 1, 0, "t", (), 2))
    assert replies[0].id == 3
    assert stored_last(world) == 0
    world.bus.on_turn_end()
    world.settle()
    assert stored_last(world) == 2
    assert world.again().ask(ClientRequest(GET, b"c", 1, 0, "t", (), 0)).id == 3


def test_positions_that_move_during_a_commit_share_the_next_one(world, monkeypatch):
    client = world.client()
    client.sub("t")
    for _ in range(20):
        client.put("t")
    commits: list[Commit] = []
    commit = world.store.commit
    monkeypatch.setattr(world.store, "commit", lambda one: commits.append(one) or commit(one))
    for last in range(20):
        world.send(ClientRequest(GET, b"c", 1, 0, "t", (), last))
        world.bus.on_turn_end()
    world.settle()
    assert stored_last(world) == 19
    assert len([one for one in commits if one.changes]) == 2


def test_a_position_that_was_not_stored_is_stored_by_the_next_get(world, monkeypatch):
    client = world.client()
    client.sub("t")
    client.put("t")
    full: Future[CommitResult] = Future()
    full.set_exception(StoreFull("no space left"))
    with monkeypatch.context() as failing:
        failing.setattr(world.store, "commit", lambda _: full)
        assert client.get("t", 1) is None
    assert stored_last(world) == 0
    assert client.get("t", 1) is None
    world.settle()
    assert stored_last(world) == 1


def test_parallel_reads_are_bounded(world, monkeypatch):
    """Each may have 64 MiB, and is in memory until the loop has taken it."""
    client = world.client()
    topics = [f"t{number}" for number in range(3 * get_handler.MAX_PARALLEL_READS)]
    for topic in topics:
        client.sub(topic)
        client.put(topic, topic.encode())
    again = world.again()
    epoch = again.client().epoch
    begun: list[object] = []
    read = again.store.read
    monkeypatch.setattr(again.store, "read", lambda *a, **k: (begun.append(a), read(*a, **k))[1])
    replies = [again.send(ClientRequest(GET, b"c", epoch, 0, topic, (), 0)) for topic in topics]
    assert len(begun) == get_handler.MAX_PARALLEL_READS
    again.settle()
    assert [one.body for (one,) in replies] == [topic.encode() for topic in topics]
    assert len(begun) == len(topics)


def test_get_that_waited_for_its_client_is_answered(world):
    client = world.client()
    client.sub("t")
    client.put("t")
    again = world.again()
    replies = again.send(ClientRequest(GET, b"c", 1, 0, "t", (), 1))  # its client is not loaded yet
    again.settle()
    assert replies == [None]
    put = again.again().send(ClientRequest(PUT, b"c", 1, 9, "t", (b"x",)))
    assert put == []


def test_not_subscribed_wins_over_invalid_last(world):
    client = world.client()
    assert isinstance(client.get("t", 99), DoesNotExist)
    client.sub("t")
    client.put("t")
    refused = client.get("t", 2)
    assert isinstance(refused, MalformedRequest)
    assert "restored from a backup" in str(refused)
    assert client.get("t", 0).id == 1, "nothing was stored"


def test_messages_of_many_shards_are_in_id_order(world):
    topic = world.store.create("t", 16, {})
    world = world.again()
    client = world.client()
    assert client.sub("t") == 0
    assert [client.put("t", b"%d" % n) for n in range(40)] == list(range(1, 41))
    rows = world.store.read(topic.number, "all", 0)
    assert len(set(memoryview(rows.shards).cast("B").cast("i"))) > 1
    found = [client.get("t", last) for last in range(40)]
    assert [(one.id, one.body) for one in found] == [(n + 1, b"%d" % n) for n in range(40)]


def test_trimmed_messages_are_skipped(world):
    client = world.client()
    client.sub("t")
    for _ in range(5):
        client.put("t")
    world.store.trim(world.durable.get("t").number, {0: 3})
    assert client.get("t", 0).id == 4


def test_large_message_is_complete_and_not_cached(world):
    client = world.client()
    client.sub("t")
    body = [bytes([n]) * (1 << 20) for n in range(3)]
    assert client.put("t", *body) == 1
    assert bytes(client.get("t", 0).body) == b"".join(body)
    assert world.bus.stats()["shelf_bytes"] == 0


def test_large_put_keeps_its_order(world):
    client = world.client()
    client.sub("t")
    large = (b"x" * (1 << 20),)
    replies = [
        world.send(ClientRequest(PUT, b"c", 1, 2, "t", (b"a",))),
        world.send(ClientRequest(PUT, b"c", 1, 3, "t", large)),
        world.send(ClientRequest(PUT, b"c", 1, 4, "t", (b"b",))),
        world.send(ClientRequest(PUT, b"c", 1, 4, "t", (b"b",))),
    ]
    world.bus.on_turn_end()
    world.settle()
    assert replies == [[1], [2], [3], [3]]
    assert world.bus.stats()["uncommitted_bytes"] == 0


def test_uncommitted_bytes_are_bounded():
    world = MemorySubscribers(max_uncommitted_bytes=1000)
    client = world.client()
    client.sub("t")
    replies = [world.send(ClientRequest(PUT, b"c", 1, n, "t", (bytes(400),))) for n in (2, 3, 4)]
    world.bus.on_turn_end()
    world.settle()
    refused = [one for (one,) in replies if isinstance(one, LimitReached)]
    assert refused
    assert refused[0].limit == "max_uncommitted_bytes"
    client.counter = 9
    assert isinstance(client.put("t", bytes(400)), int)
    assert isinstance(client.put("t", bytes(1 << 20)), LimitReached)


@pytest.mark.parametrize("size", [1 << 10, 1 << 20], ids=["small", "large"])
def test_bytes_of_waiting_puts_are_bounded(size):
    """They wait for a HELLO or for a large PUT in preparation, and are not submitted yet."""
    world = MemorySubscribers(max_uncommitted_bytes=2 * size + 1000)
    client = world.client()
    client.sub("t")
    replies = [world.send(ClientRequest(HELLO, b"c", 0, hash(b"c") & 0xFFFF))]
    replies += [
        world.send(ClientRequest(PUT, b"c", 1, n, "t", (bytes(size),))) for n in range(2, 12)
    ]
    assert all(isinstance(one, LimitReached) for (one,) in replies[3:])  # at once: none is queued
    world.bus.on_turn_end()
    world.settle()
    assert [one for (one,) in replies[1:3]] == [1, 2]
    assert world.bus.stats()["uncommitted_bytes"] == 0


def test_reserved_bytes_are_released_on_every_outcome():
    world = MemorySubscribers(max_uncommitted_bytes=4 << 20, max_client_requests=1)
    client = world.client()
    client.sub("t")
    large = (bytes(1 << 20),)
    fenced = ClientRequest(PUT, b"c", 7, 2, "t", large)
    replies = [world.send(fenced), world.send(ClientRequest(PUT, b"c", 1, 3, "t", large))]
    world.send(ClientRequest(HELLO, b"c", 0, 5))  # waits, and fills the queue
    replies += [world.send(ClientRequest(PUT, b"c", 1, 4, "t", large))]
    world.bus.on_turn_end()
    world.settle()
    assert isinstance(replies[0][0], Fenced)
    assert replies[1] == [1]
    assert isinstance(replies[2][0], LimitReached)
    assert world.bus.stats()["uncommitted_bytes"] == 0


def test_put_over_max_bytes_uses_no_counter(world):
    world.store.create("t", 1, {"max_bytes": 1000})
    world = world.again()
    client = world.client()
    client.sub("t")
    assert client.put("t", bytes(300)) == 1
    assert isinstance(client.put("t", bytes(900)), LimitReached)
    client.counter -= 1
    assert client.put("t", bytes(10)) == 2


def test_cache_is_bounded_and_correct_after_eviction(world, monkeypatch):
    monkeypatch.setattr(get_handler, "MAX_BYTES", 2000)
    monkeypatch.setattr(get_handler, "READ_ROWS", 4)
    client = world.client()
    topics = [f"t{n}" for n in range(6)]
    for topic in topics:
        client.sub(topic)
        for n in range(12):
            client.put(topic, b"%s-%d" % (topic.encode(), n + 1))
    for last in (0, 5, 3, 11, 0, 7):
        for number, topic in enumerate(topics):
            reader = world.client(b"r%d" % number)
            found = world.bus._cache
            answers: list[object] = []
            found.get(world.durable.get(topic), last, answers.append)
            world.settle()
            assert answers[0].body == b"%s-%d" % (topic.encode(), last + 1)  # type: ignore[attr-defined]
            assert found.size <= 2000
            assert reader.epoch == 1
    world.bus._cache.forget(world.durable.get("t0").number)
    assert all(place[0] != world.durable.get("t0").number for place in world.bus._cache._ranges)


def test_messages_of_other_producers_are_read(world):
    client = world.client()
    client.sub("t")
    topic = world.durable.get("t")
    world.durable.produce(topic, block(b"x", b"y")).result(20)
    assert client.get("t", 0).body == b"x"
    assert client.get("t", 1).body == b"y"
