"""Ephemeral topics: how messages are kept, which account is charged, which events are logged.

States and verbs are tested against a model in tests/property/bus. The tests here check the
effects that no answer shows.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.ephemeral_delivery import find_fitting
from polybus.dialects.freud.server.pull_reader import PullReader
from polybus.dialects.freud.server.topic_lifecycle import Incarnation
from polybus.dialects.freud.server.unread_queue import (
    GATHERED_BYTES,
    GATHERED_MESSAGES,
    WORTH_A_CHUNK,
    Chunk,
    ChunkWriter,
    Range,
)
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from polybus.model.limits import Limits, QuotaLimits
from tests.rig import freud_client, rqueue_client
from tests.rig.freud_client import OK, SERVER_ERROR, create, delete, get, produce, subscribe
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe

ALICE = Identity(1, groups=frozenset(), service="a")
BOB = Identity(2, groups=frozenset(), service="b")
LIMITS = FreudLimits(max_frame_bytes=1 << 20, max_unread_messages=100)


def offsets(bodies: list[bytes]) -> bytes:
    ends = [0]
    for body in bodies:
        ends.append(ends[-1] + len(body))
    return array("i", ends).tobytes()


def write(writer: ChunkWriter, first_id: int, bodies: list[bytes], now_ns: int = 0) -> Range:
    return writer.write(first_id, offsets(bodies), b"".join(bodies), now_ns)


def bodies_of(found: Range) -> list[bytes]:
    chunk = found.chunk
    return [
        bytes(chunk.bodies[chunk.offsets[at] : chunk.offsets[at + 1]])
        for at in range(found.start, found.end)
    ]


def reader() -> PullReader:
    return PullReader(bytes(16), ALICE, Incarnation(b"t", ALICE))


# --- chunks ------------------------------------------------------------------


def test_single_messages_share_a_chunk_and_batches_have_their_own():
    writer = ChunkWriter()
    first, second = write(writer, 0, [b"a"]), write(writer, 1, [b"b", b"c"])
    assert first.chunk is second.chunk
    assert bodies_of(second) == [b"b", b"c"]
    assert (first.first_id, second.first_id) == (0, 1)
    batch = write(writer, 3, [b"x"] * WORTH_A_CHUNK)
    assert batch.chunk is not first.chunk
    assert len(batch) == WORTH_A_CHUNK
    large = write(writer, 3 + WORTH_A_CHUNK, [bytes(GATHERED_BYTES)])
    assert large.chunk is not first.chunk
    after = write(writer, 4 + WORTH_A_CHUNK, [b"d"])  # ids are not consecutive
    assert after.chunk is not first.chunk


def test_chunk_is_bounded_in_bytes_and_messages():
    writer = ChunkWriter()
    first = write(writer, 0, [bytes(GATHERED_BYTES - 1)])
    assert write(writer, 1, [b"x"]).chunk is first.chunk
    assert write(writer, 2, [b"x"]).chunk is not first.chunk
    writer = ChunkWriter()
    chunks = {id(write(writer, at, [b""]).chunk) for at in range(GATHERED_MESSAGES + 1)}
    assert len(chunks) == 2


def test_timestamps_never_decrease():
    writer = ChunkWriter()
    times = [5, 3, 9, 0]
    found = [write(writer, at, [b"x"], now_ns) for at, now_ns in enumerate(times)]
    assert list(found[0].chunk.times) == [5, 5, 9, 9]
    assert writer.time(1) == 9


SIZES = st.lists(st.integers(0, 8), max_size=12)


@given(SIZES, st.integers(-2, 40), st.integers(-1, 14), st.integers(0, 3))
def test_batch_fits_as_its_messages_would_one_by_one(sizes, room_bytes, room_messages, start):
    bodies = [bytes(size) for size in sizes]
    whole = Range(Chunk.of_batch(0, offsets(bodies), b"".join(bodies), 0), 0, len(bodies))
    start = min(start, len(bodies))
    found = Range(whole.chunk, start, len(bodies))
    kept: list[int] = []
    large = many = 0
    left = room_bytes
    for place in range(start, len(bodies)):
        if len(kept) >= room_messages:
            many += 1
        elif sizes[place] > left:
            large += 1
        else:
            left -= sizes[place]
            kept.append(place)
    fit = find_fitting(found, room_bytes, room_messages)
    assert [place for run in fit.runs for place in range(run.start, run.end)] == kept
    assert (fit.too_large, fit.too_many) == (large, many)
    assert all(a.end < b.start for a, b in zip(fit.runs, fit.runs[1:], strict=False))


# --- readers -----------------------------------------------------------------


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=70), max_size=6),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 200)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_a_reader_reads_each_message_once_and_in_order(batches, takes, chance):
    """Messages returned meanwhile, in any order, are read again in their place."""
    one, writer = reader(), ChunkWriter()
    ids = 0
    for batch in batches:
        one.put(write(writer, ids, batch))
        ids += len(batch)
    expected = [body for batch in batches for body in batch]
    unread = list(range(ids))
    out: list[Range] = []
    for count, max_bytes in takes:
        if out and chance.random() < 0.3:
            back = out.pop(chance.randrange(len(out)))
            one.give_back(back)
            unread = sorted([*unread, *range(back.first_id, back.first_id + len(back))])
            continue
        taken = one.take(count, max_bytes)
        if taken is None:
            assert unread == []
            continue
        assert 1 <= len(taken) <= count
        assert len(taken) == 1 or taken.size <= max_bytes
        assert unread[: len(taken)] == list(range(taken.first_id, taken.first_id + len(taken)))
        assert bodies_of(taken) == expected[taken.first_id :][: len(taken)]
        unread = unread[len(taken) :]
        out.append(taken)
    assert one.held_messages == ids


def test_small_remainder_releases_its_large_chunk():
    """The memory that a reader holds is in proportion to its charged bytes."""
    one = reader()
    bodies = [b"%06d" % at + bytes(1000) for at in range(1000)]
    batch = write(ChunkWriter(), 0, bodies)
    one.put(batch)
    one.take(700, 1 << 20)
    rest = one.take(1, 1 << 20)
    assert rest is not None
    assert rest.chunk is batch.chunk  # still a good part of it
    one.take(200, 1 << 20)
    last = one.take(1000, 1 << 20)
    assert last is not None
    assert last.chunk is not batch.chunk
    assert len(last.chunk.bodies) < len(batch.chunk.bodies) / 4
    assert (last.first_id, bodies_of(last)) == (901, bodies[901:])


def test_waiters_are_served_in_order_while_messages_remain():
    one, writer = reader(), ChunkWriter()
    heard: list[str] = []

    def waiter(name: str) -> None:
        def wake() -> None:
            heard.append(name)
            one.take(1, 100)

        one.wait(wake)

    for name in "abc":
        waiter(name)
    one.put(write(writer, 0, [b"1", b"2"]))
    one.wake()
    assert heard == ["a", "b"]
    one.end()
    one.wake()
    assert heard == ["a", "b", "c"]


# --- buffers -----------------------------------------------------------------


class Bench:
    """A bus with a speaker for each of two users."""

    def __init__(
        self,
        quota_bytes: int = 1000,
        policy: Policy | None = None,
        limits: Limits | None = None,
    ) -> None:
        quotas = QuotaLimits(quota_bytes=quota_bytes)
        self.bus = MemoryBus(limits, freud=LIMITS, quotas=quotas, policy=policy)
        self.alice = self.bus.connect_freud(identity=ALICE)
        self.bob = self.bus.connect_freud(identity=BOB)

    def ask(self, pipe: MemoryPipe, *requests: bytes) -> list[freud_client.Answer]:
        before = len(pipe.taken)
        pipe.deliver(b"".join(requests))
        self.bus.turn()
        return freud_client.answers_in(pipe.taken[before:])[0]

    def used(self, identity: Identity) -> int:
        return self.bus.broker.quotas.used(identity.account, "quota_bytes")

    def warnings(self, event: str) -> list[dict[str, object]]:
        return [fields for said, fields in self.bus.log.warnings() if said == event]


def recreating(bench: Bench) -> bytes:
    """Make a topic t that buffers. Returns the id of the old reader it waits for."""
    old = bench.ask(bench.alice, create(b"t"), subscribe(b"t"))[1].payload
    bench.ask(bench.alice, delete(b"t"), create(b"t"))
    return old


@pytest.mark.needs(dialect="rqueue")
def test_a_buffer_of_empty_messages_is_bounded():
    bench = Bench()
    recreating(bench)
    found = bench.ask(bench.bob, *(produce(b"t") for _ in range(103)))
    assert [one.code for one in found] == [OK] * 100 + [SERVER_ERROR] * 3
    assert found[-1].payload == b"max_unread_messages"
    pusher = bench.bus.connect()
    pusher.deliver(rqueue_client.publish(b"t") * 2)
    assert bench.bus.stats("dropped") == {"max_unread_messages": 2}


def test_small_messages_in_a_buffer_share_a_chunk():
    bench = Bench()
    recreating(bench)
    for _ in range(50):
        bench.ask(bench.bob, produce(b"t", b"x"))
    current = bench.bus.topics._topics[b"t"].current
    assert current is not None
    assert len(current.buffer) == 1


def test_buffer_is_charged_to_the_creator_then_to_the_reader():
    bench = Bench()
    old = recreating(bench)
    bench.ask(bench.bob, *(produce(b"t", bytes(100)) for _ in range(5)))
    assert (bench.used(ALICE), bench.used(BOB)) == (500, 0)
    new = bench.ask(bench.bob, subscribe(b"t"))[0].payload
    assert (bench.used(ALICE), bench.used(BOB)) == (500, 0)
    bench.ask(bench.alice, get(old))
    assert (bench.used(ALICE), bench.used(BOB)) == (0, 500)
    bench.ask(bench.bob, get(new), get(new))
    assert bench.used(BOB) == 300
    bench.bob.hang_up()
    bench.bus.pass_time(LIMITS.detached_subscription_s)
    assert bench.used(BOB) == 0
    assert bench.bus.stats("dropped") == {"abandoned": 3}


def test_topic_goes_live_when_all_its_earlier_generations_ended():
    bench = Bench()
    first = recreating(bench)
    second = bench.ask(bench.alice, subscribe(b"t"))[0].payload
    bench.ask(bench.alice, delete(b"t"), create(b"t"), produce(b"t", b"third"))
    third = bench.ask(bench.bob, subscribe(b"t"))[0].payload
    for old in (second, first):
        assert bench.ask(bench.bob, get(third)) == [(freud_client.NOTHING_HAPPENED, b"")]
        assert bench.ask(bench.alice, get(old)) == [(OK, freud_client.NOTICE + b"t")]
    assert bench.ask(bench.bob, get(third)) == [(OK, b"third")]


@pytest.mark.needs(dialect="rqueue")
def test_subscribed_push_reader_gets_the_buffer_when_the_topic_goes_live():
    bench = Bench()
    old = recreating(bench)
    pusher = bench.bus.connect()
    pusher.deliver(rqueue_client.subscribe(b"t"))
    bench.ask(bench.bob, produce(b"t", b"buffered"))
    assert bytes(pusher.taken) == b""
    bench.ask(bench.alice, get(old))
    assert bytes(pusher.taken) == rqueue_client.notification(b"t", b"buffered")
    assert bench.used(ALICE) == 0


@pytest.mark.needs(dialect="rqueue")
def test_new_push_reader_gets_the_buffered_messages():
    bench = Bench()
    old = recreating(bench)
    bench.ask(bench.bob, produce(b"t", b"buffered"))
    bench.ask(bench.alice, get(old))
    pusher = bench.bus.connect()
    pusher.deliver(rqueue_client.subscribe(b"t"))
    bench.bus.turn()
    assert bytes(pusher.taken) == rqueue_client.notification(b"t", b"buffered")
    assert bench.ask(bench.bob, produce(b"t", b"live")) == [(OK, (1).to_bytes(8, "little"))]


@pytest.mark.needs(dialect="rqueue")
def test_full_push_reader_loses_the_buffer_and_a_pull_reader_does_not():
    """When the topic goes live, there is no producer that could wait."""
    bench = Bench(limits=Limits(outbox_high_water_bytes=1000))
    old = recreating(bench)
    stuck = bench.bus.connect(appetite=0)
    stuck.deliver(rqueue_client.subscribe(b"t") + rqueue_client.subscribe(b"u"))
    bench.bus.connect().deliver(rqueue_client.publish(b"u", bytes(1500)) * 2)
    new = bench.ask(bench.bob, subscribe(b"t"))[0].payload
    bench.ask(bench.bob, produce(b"t", b"1"), produce(b"t", b"2"))
    bench.ask(bench.alice, get(old))
    assert bench.bus.stats("dropped") == {"slow_consumer": 2}
    assert bench.ask(bench.bob, get(new), get(new)) == [(OK, b"1"), (OK, b"2")]


@pytest.mark.needs(dialect="rqueue")
def test_full_push_reader_is_skipped_and_gets_the_next_message():
    """No producer can wait: the client is disconnected, or the message is from a buffer."""
    bench = Bench(limits=Limits(outbox_high_water_bytes=1000))
    bench.ask(bench.alice, create(b"t"), create(b"u"))
    stuck, roomy = bench.bus.connect(appetite=0), bench.bus.connect()
    stuck.deliver(rqueue_client.subscribe(b"t") + rqueue_client.subscribe(b"u"))
    roomy.deliver(rqueue_client.subscribe(b"t"))
    bench.bus.connect().deliver(rqueue_client.publish(b"u", bytes(1500)) * 2)
    bench.bus.turn()
    bench.bob.deliver(produce(b"t", b"1") + produce(b"t", b"2"))
    bench.bob.hang_up()
    bench.bus.turn()
    assert bench.bus.stats("dropped") == {"slow_consumer": 2}
    assert bytes(roomy.taken) == rqueue_client.notification(
        b"t", b"1"
    ) + rqueue_client.notification(b"t", b"2")
    stuck.eat()
    bench.ask(bench.alice, produce(b"t", b"3"))
    before, next_one = (
        rqueue_client.notification(b"u", bytes(1500)),
        rqueue_client.notification(b"t", b"3"),
    )
    assert stuck.taken.endswith(before + next_one)


@pytest.mark.needs(dialect="rqueue")
@pytest.mark.parametrize("buffering", [False, True])
def test_accepted_part_of_a_batch_does_not_hold_the_rest_in_memory(buffering: bool):
    bench = Bench(quota_bytes=10)
    old = recreating(bench) if buffering else b""
    if not buffering:
        bench.ask(bench.alice, create(b"t"))
        key = bench.ask(bench.alice, subscribe(b"t"))[0].payload
    bench.bus.connect().deliver(
        rqueue_client.publish(b"t") + rqueue_client.publish(b"t", bytes(2000)) * 100
    )
    if buffering:
        key = bench.ask(bench.alice, get(old), subscribe(b"t"))[1].payload
    reader = bench.bus.topics.readers.by_id[key]
    assert reader is not None
    assert [len(one.chunk) for one in reader.ranges] == [1]


# --- logged refusals ----------------------------------------------------------


def test_each_rejected_message_of_a_batch_is_logged_once():
    """The halves of a split batch are not logged one by one."""
    bench = Bench(quota_bytes=10)
    bench.ask(bench.alice, create(b"t"), subscribe(b"t"))
    found = bench.ask(bench.bob, *(produce(b"t", bytes(size)) for size in (4, 5, 9, 1, 9)))
    assert [one.code for one in found] == [OK, OK, SERVER_ERROR, OK, SERVER_ERROR]
    told = bench.warnings("quota reached")
    assert [(one["user"], one["quota"], one["asked"]) for one in told] == [
        ("uid:1", "quota_bytes", 9),
        ("uid:1", "quota_bytes", 9),
    ]
    assert bench.bus.stats("refused") == {"quota_bytes": 2}


@pytest.mark.needs(dialect="rqueue")
def test_full_reader_is_logged_once_per_received_buffer():
    bench = Bench(quota_bytes=10)
    bench.ask(bench.alice, create(b"t"), subscribe(b"t"))
    bench.bus.connect().deliver(rqueue_client.publish(b"t", b"1234") * 50)
    assert bench.bus.stats("dropped") == {"quota_bytes": 48}
    assert len(bench.warnings("quota reached")) == 1


@pytest.mark.parametrize("verb", ["create", "produce", "subscribe", "delete"])
def test_refusals_are_counted_and_logged(verb: str):
    policy = Policy()
    rule = Rule.parse(f"deny user:2 {verb} t")
    bench = Bench(policy=policy)
    bench.ask(bench.alice, create(b"u"))
    policy.replace([PlacedRule(rule, "test", rule.who.number)])
    if verb != "create":
        bench.ask(bench.alice, create(b"t"))
    request = {"create": create, "delete": delete, "subscribe": subscribe, "produce": produce}
    assert bench.ask(bench.bob, request[verb](b"t")) == [(freud_client.NO, b"")]
    assert bench.bus.stats("refused") == {f"{verb}_denied": 1}
    (said,) = bench.warnings("refused")
    assert (said["user"], said["topic"], said["reason"]) == ("uid:2", "t", f"{verb}_denied")


def test_new_rules_end_subscriptions_that_they_deny():
    policy = Policy()
    bench = Bench(policy=policy)
    bench.ask(bench.alice, create(b"t"), create(b"u"))
    keys = [one.payload for one in bench.ask(bench.bob, subscribe(b"t"), subscribe(b"u"))]
    bench.bob.deliver(get(keys[0], -1))
    rule = Rule.parse("deny user:2 subscribe t")
    policy.replace([PlacedRule(rule, "test", rule.who.number)])
    bench.bus.turn()
    assert freud_client.answers_in(bench.bob.taken)[0][-1] == (freud_client.DOESNT_EXIST, b"")
    assert bench.ask(bench.bob, get(keys[1])) == [(freud_client.NOTHING_HAPPENED, b"")]
    assert bench.bus.broker.quotas.used(2, "quota_subscriptions") == 1


# --- messages in pieces ------------------------------------------------------


@pytest.mark.needs(dialect="rqueue")
def test_parts_completed_after_their_reader_left_are_counted():
    bench = Bench()
    key = bench.ask(bench.alice, create(b"t"), subscribe(b"t"))[1].payload
    pusher = bench.bus.connect()
    pusher.deliver(rqueue_client.publish_part(b"t", bytes(16), 0, 2, b"half"))
    other = bench.ask(bench.alice, subscribe(b"t"))[0].payload
    bench.ask(bench.alice, freud_client.unsubscribe(key))
    pusher.deliver(rqueue_client.publish_part(b"t", bytes(16), 1, 2, b" and half"))
    assert bench.ask(bench.alice, get(other)) == [(OK, b"half and half")]
    pusher.deliver(rqueue_client.publish_part(b"t", b"1" * 16, 0, 2, b"half"))
    topics = bench.bus.topics
    topics.unsubscribe(topics.readers.by_id[other])
    topics.on_assembled(b"t", b"no reader")
    assert bench.bus.stats("dropped") == {"no_subscriber": 1}
    assert (
        freud_client.number(bench.ask(bench.alice, subscribe(b"t"), freud_client.count(b"t"))[1])
        == 1
    )
