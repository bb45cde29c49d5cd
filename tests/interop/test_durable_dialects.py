"""One durable topic and three dialects, each as writer and as reader, before and after a restart.

The table of writers and readers is in the bus's spec; each of its pairs is tested here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polybus.errors import WrongKind
from polybus.native import Client
from tests.rig import freud_client, rqueue_client
from tests.rig.native_bus import NativeBus

WAIT_S = 20  # only ever reached when something is wrong
COUNT = 50
WRITERS = READERS = ("rqueue", "freud", "native")


class Dialects:
    """A bus with all three, and one client of each."""

    def __init__(self, bus: NativeBus) -> None:
        self.bus = bus
        self.stack = ExitStack()
        self.connect()

    def connect(self) -> None:
        process = self.bus.process
        enter = self.stack.enter_context
        self.native: Client = enter(self.bus.client())
        self.freud = enter(freud_client.connect(process.address("freud")))
        self.rqueue = enter(rqueue_client.connect(process.address("rqueue")))
        self.reader = enter(rqueue_client.connect(process.address("rqueue")))

    def restart(self) -> None:
        self.stack.close()
        assert self.bus.stop() == 0
        self.bus.start()
        self.connect()

    def write(self, dialect: str, topic: str, bodies: list[bytes]) -> None:
        """Write the messages. Returns when they are durable; for rqueue, when they are sent."""
        if dialect == "rqueue":
            self.rqueue.send(*(rqueue_client.publish(topic.encode(), body) for body in bodies))
        elif dialect == "freud":
            self.freud.send(*(freud_client.produce(topic.encode(), body) for body in bodies))
            assert {one.code for one in self.freud.answers(len(bodies))} == {freud_client.OK}
        else:
            with self.native.producer() as producer:
                producer.produce(topic, bodies).result(WAIT_S)

    def subscribe_all(self, topic: str) -> bytes:
        """Start all readers that follow. Returns the id of Freud's subscription."""
        self.reader.send(rqueue_client.subscribe(topic.encode()))
        self.reader.settle()
        self.freud.send(freud_client.subscribe(topic.encode()))
        (answer,) = self.freud.answers(1)
        assert answer.code == freud_client.OK
        return answer.payload

    def read(self, dialect: str, topic: str, subscription: bytes, count: int) -> list[bytes]:
        if dialect == "rqueue":
            found = self.reader.messages(count)
            assert {name for name, _ in found} == {topic.encode()}
            return [body for _, body in found]
        if dialect == "freud":
            self.freud.send(*(freud_client.get(subscription, WAIT_S) for _ in range(count)))
            return [one.payload for one in self.freud.answers(count)]
        return self.log(topic, count)

    def log(self, topic: str, count: int, start: int | None = None) -> list[bytes]:
        found: list[bytes] = []
        for batch in self.native.read(topic, start=start, max_rows=count, wait_s=WAIT_S):
            found += batch.column("body").to_pylist()
        return found


@pytest.fixture(scope="module")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dialects]:
    path = tmp_path_factory.mktemp("freud") / "freud.sock"
    with NativeBus(listen=("rqueue=tcp://127.0.0.1:0", f"freud=unix:{path}")) as bus:
        both = Dialects(bus)
        with both.stack:
            yield both


@pytest.mark.parametrize("writer", WRITERS)
def test_all_dialects_read_the_messages_of_one_in_order(dialects: Dialects, writer: str):
    topic = f"from {writer}"
    dialects.native.create_topic(topic)
    subscription = dialects.subscribe_all(topic)
    bodies = [b"%d of %s" % (at, writer.encode()) for at in range(COUNT)]
    dialects.write(writer, topic, bodies)
    for reader in READERS:
        assert dialects.read(reader, topic, subscription, COUNT) == bodies, reader


def test_all_write_and_all_read_the_same_order(dialects: Dialects):
    topic = "from all"
    dialects.native.create_topic(topic)
    subscription = dialects.subscribe_all(topic)
    for turn in range(10):
        for writer in WRITERS:
            dialects.write(writer, topic, [b"%s %d" % (writer.encode(), turn)])
    found = [dialects.read(reader, topic, subscription, 30) for reader in READERS]
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == sorted(
        b"%s %d" % (w.encode(), t) for w in WRITERS for t in range(10)
    )


def test_freud_tells_the_ids_that_the_native_port_tells(dialects: Dialects):
    topic = "ids"
    dialects.native.create_topic(topic)
    subscription = dialects.subscribe_all(topic)
    with dialects.native.producer() as producer:
        assert producer.produce(topic, [b"a", b"b"]).result(WAIT_S).last_id == 2
    dialects.freud.send(freud_client.produce(topic.encode(), b"c"))
    assert freud_client.number(dialects.freud.answers(1)[0]) == 3
    dialects.freud.send(*(freud_client.get_record(subscription, WAIT_S) for _ in range(3)))
    records = [freud_client.record(one) for one in dialects.freud.answers(3)]
    batch = next(dialects.native.read(topic))
    assert [one.id for one in records] == batch.column("id").to_pylist() == [1, 2, 3]
    assert [one.timestamp_ns for one in records] == batch.column("timestamp_ns").to_pylist()


def test_large_messages_come_as_parts_and_are_whole_in_the_log(dialects: Dialects):
    topic = "large"
    dialects.native.create_topic(topic)
    subscription = dialects.subscribe_all(topic)
    body = bytes(range(256)) * 40  # over rqueue's cap
    halves = body[:2000], body[2000:4000]
    name = topic.encode()
    parts = [
        rqueue_client.publish_part(name, bytes(16), at, 2, half) for at, half in enumerate(halves)
    ]
    dialects.rqueue.send(*parts)
    assert dialects.log(topic, 1) == [b"".join(halves)]
    dialects.write("native", topic, [body])
    assert dialects.read("freud", topic, subscription, 2) == [b"".join(halves), body]
    kinds = {kind for kind, _ in dialects.reader.frames(3)}
    assert kinds == {rqueue_client.PART}


def test_a_name_is_of_one_kind(dialects: Dialects):
    dialects.native.create_topic("durable")
    dialects.freud.send(
        freud_client.create(b"durable"),
        freud_client.delete(b"durable"),
        freud_client.create(b"ephemeral"),
    )
    codes = [one.code for one in dialects.freud.answers(3)]
    assert codes == [freud_client.NOTHING_HAPPENED, freud_client.NO, freud_client.OK]
    with pytest.raises(WrongKind):
        dialects.native.create_topic("ephemeral")
    dialects.freud.send(freud_client.list_topics(), freud_client.count(b"durable"))
    listed, counted = dialects.freud.answers(2)
    assert {b"durable", b"ephemeral"} <= set(freud_client.names(listed))
    assert freud_client.number(counted) == 0


def test_a_dropped_topic_is_silence_here_and_a_notice_there(dialects: Dialects):
    topic = "dropped"
    dialects.native.create_topic(topic)
    subscription = dialects.subscribe_all(topic)
    dialects.native.drop_topic(topic)
    dialects.freud.send(freud_client.get(subscription, WAIT_S))
    assert dialects.freud.answers(1)[0].payload == freud_client.NOTICE + topic.encode()
    dialects.rqueue.send(rqueue_client.publish(topic.encode(), b"without a log"))
    assert dialects.reader.messages(1) == [(topic.encode(), b"without a log")]


def test_after_a_restart_the_topic_is_there_and_its_ids_go_on(dialects: Dialects):
    topic = "restarted"
    dialects.native.create_topic(topic)
    dialects.write("freud", topic, [b"1", b"2"])
    dialects.restart()
    subscription = dialects.subscribe_all(topic)
    dialects.freud.send(
        freud_client.create(topic.encode()), freud_client.produce(topic.encode(), b"3")
    )
    created, kept = dialects.freud.answers(2)
    assert created.code == freud_client.NOTHING_HAPPENED
    assert freud_client.number(kept) == 3
    dialects.write("rqueue", topic, [b"4"])
    assert dialects.read("rqueue", topic, b"", 2) == [b"3", b"4"]
    assert dialects.read("freud", topic, subscription, 2) == [b"3", b"4"]
    assert dialects.log(topic, 4) == [b"1", b"2", b"3", b"4"]
