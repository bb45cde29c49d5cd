"""Joining and leaving, each way and in any order; and counters that are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.connection import Connection
from polybus.bus.counters import Counters
from polybus.model.identity import Identity
from polybus.model.limits import Limits
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.rqueue_client import frame, notification, publish, publish_part, subscribe

BAD = frame(99)


def party_of(bus: MemoryBus, pipe: MemoryPipe) -> Connection:
    return next(one for one in bus.broker._connections.values() if one.pipe is pipe)


def stuck_reader(bus: MemoryBus, *contents: bytes) -> MemoryPipe:
    """A reader that is owed messages and takes none."""
    pipe = bus.connect(appetite=0)
    pipe.deliver(subscribe(b"t"))
    writer = bus.connect()
    for content in contents:
        writer.deliver(publish(b"t", content))
    writer.hang_up()
    return pipe


def test_an_idle_bus_counts_nothing():
    bus = MemoryBus()
    node_id = bus.gsb.network.node_id
    assert bus.broker.stats() == {
        "uptime_s": 0.0,
        "messages": {"received": 0, "received_bytes": 0, "delivered": 0, "delivered_bytes": 0},
        "topics": 0,
        "subscriptions": 0,
        "connections": {
            "open": 0,
            "accepted": 0,
            "waiting": 0,
            "closed": {},
            "in_doubt": {},
            "unfinished_frames": {},
        },
        "dropped": {},
        "refused": {},
        "faults": {},
        "alarms": [],
        "freud": {"subscriptions": 0, "detached": 0, "evicted": 0, "expired": 0},
        "gsb": {
            "connections": 0,
            "services": 0,
            "calls": 0,
            "open_calls": 0,
            "serving": 0,
            "full": 0,
            "waiting": 0,
            "ended": {},
            "network": {"node": node_id, "links": 0, "nodes": 0, "callers": {}},
        },
    }


def test_received_bytes_count_bodies_and_delivered_bytes_count_frames():
    bus = MemoryBus()
    readers = [bus.connect() for _ in range(3)]
    for reader in readers:
        reader.deliver(subscribe(b"t"))
    writer = bus.connect()
    writer.deliver(publish(b"t", b"12345") + publish(b"t", b"") + publish(b"unread", b"1"))
    size = len(notification(b"t", b"12345") + notification(b"t", b""))
    assert bus.stats("messages") == {
        "received": 3,
        "received_bytes": 6,
        "delivered": 6,
        "delivered_bytes": 3 * size,
    }
    assert bus.stats("dropped") == {"no_subscriber": 1}


def test_parts_are_counted_as_messages():
    bus = MemoryBus()
    reader = bus.connect()
    reader.deliver(subscribe(b"t"))
    bus.connect().deliver(publish_part(b"t", bytes(16), 0, 2, b"chunk"))
    assert bus.stats("messages", "received") == 1
    assert bus.stats("messages", "delivered") == 1


def test_connections_lists_identity_and_traffic():
    bus = MemoryBus()
    reader, writer = bus.connect(), bus.connect()
    reader.identity = Identity(uid=7)
    reader.deliver(subscribe(b"t") + subscribe(b"u"))
    bus.now_s += 1.5
    writer.deliver(publish(b"t", b"12345"))
    size = len(notification(b"t", b"12345"))
    common = {"dialect": "rqueue", "age_s": 1.5, "outbox_bytes": 0, "state": "open"}
    assert bus.connections() == [
        {
            **common,
            "id": 1,
            "peer": "memory:1",
            "identity": "uid:7",
            "subscriptions": 2,
            "received_messages": 0,
            "received_bytes": 0,
            "sent_messages": 1,
            "sent_bytes": size,
        },
        {
            **common,
            "id": 2,
            "peer": "memory:2",
            "identity": "anonymous",
            "subscriptions": 0,
            "received_messages": 1,
            "received_bytes": 5,
            "sent_messages": 0,
            "sent_bytes": 0,
        },
    ]


def test_connections_shows_the_backlog_of_a_stuck_reader():
    bus = MemoryBus()
    stuck_reader(bus, b"1", b"2")
    assert bus.connections()[0]["outbox_bytes"] == 2 * len(notification(b"t", b"1"))


def test_bad_frame_closes_after_pending_output():
    bus = MemoryBus()
    reader = stuck_reader(bus, b"1", b"2")
    reader.deliver(BAD)
    assert reader.closed
    assert not reader.aborted
    reader.eat()
    assert reader.taken == notification(b"t", b"1") + notification(b"t", b"2")
    reader.hang_up()
    assert bus.stats("connections", "closed") == {"peer": 1, "unknown_type": 1}
    assert bus.stats("dropped") == {}


def test_bad_frame_is_logged_once_with_peer_and_reason():
    bus = MemoryBus()
    pipe = bus.connect()
    pipe.deliver(BAD + BAD)
    pipe.deliver(BAD)
    pipe.hang_up()
    fields = {"level": "warning", "dialect": "rqueue", "peer": pipe.peer, "reason": "unknown_type"}
    assert bus.log.warnings() == [("connection closed", fields)]
    assert bus.stats("connections") == {
        "open": 0,
        "accepted": 1,
        "waiting": 0,
        "closed": {"unknown_type": 1},
        "in_doubt": {},
        "unfinished_frames": {},
    }


def test_unsent_messages_of_a_closed_connection_are_counted():
    bus = MemoryBus()
    reader = stuck_reader(bus, b"1", b"2", b"3")
    reader.deliver(BAD)
    reader.eat(len(notification(b"t", b"1")))
    reader.hang_up()
    assert bus.stats("dropped") == {"disconnected": 2}


def test_unsent_messages_of_a_lost_connection_are_counted():
    bus = MemoryBus()
    reader = stuck_reader(bus, b"1", b"2", b"3")
    reader.hang_up()
    assert bus.stats("dropped") == {"disconnected": 3}
    assert bus.stats("connections", "closed") == {"peer": 2}
    assert bus.log.warnings() == []


def test_half_closed_peer_gets_its_pending_output():
    bus = MemoryBus()
    reader = stuck_reader(bus, b"1", b"2")
    reader.shut_down()
    assert reader.closed
    reader.eat()
    assert reader.taken == notification(b"t", b"1") + notification(b"t", b"2")
    bus.connect().deliver(publish(b"t", b"3"))
    bus.turn()
    assert reader.taken == notification(b"t", b"1") + notification(b"t", b"2")


def test_shutdown_closes_all_and_sends_pending_output():
    bus = MemoryBus()
    reader = stuck_reader(bus, b"1", b"2")
    idle = bus.connect()
    bus.broker.close_all("shutdown")
    assert reader.closed
    assert idle.closed
    assert bus.stats("connections", "closed") == {"peer": 1, "shutdown": 2}
    assert bus.stats("connections", "open") == 0
    reader.eat()
    assert reader.taken == notification(b"t", b"1") + notification(b"t", b"2")


def test_reused_subscriber_number_belongs_to_the_new_connection():
    bus = MemoryBus()
    for round_number in range(100):
        pipe = bus.connect()
        pipe.deliver(subscribe(b"t"))
        assert party_of(bus, pipe).number <= 1
        bus.connect().deliver(publish(b"t", b"%d" % round_number) + BAD)
        assert pipe.taken == notification(b"t", b"%d" % round_number)
        pipe.hang_up()
    assert bus.stats("connections", "open") == 0
    assert bus.stats("topics") == 0


WAYS = ("close", "cut", "leave", "finish")


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_connection_ends_once(first: str, second: str):
    bus = MemoryBus()
    reader = stuck_reader(bus, b"1")
    end(bus, first, party := party_of(bus, reader))
    closed = bus.stats("connections", "closed")
    end(bus, second, party)
    assert bus.stats("connections", "closed") == closed
    assert bus.stats("connections", "open") == 0
    assert bus.stats("subscriptions") == 0
    assert sum(bus.stats("dropped").values()) <= 1


def end(bus: MemoryBus, way: str, party: Connection) -> None:
    broker = bus.broker
    if way in ("close", "cut"):
        getattr(broker, way)(party, way)
    else:
        getattr(broker, way)(party)


def test_unknown_counter_family_raises():
    with pytest.raises(KeyError):
        Counters().count("lost", "somewhere")


def test_reasons_with_count_zero_are_not_listed():
    counters = Counters()
    counters.count("dropped", "nothing", 0)
    assert counters.family("dropped") == {}
    assert counters.get("dropped", "nothing") == 0


MARK = 300
STEPS = st.tuples(
    st.integers(0, 3),
    st.sampled_from(
        ["subscribe", "publish", "publish", "publish", "eat", "stop", "bad", "leave", "time"]
    ),
    st.sampled_from([b"a", b"b"]),
)


@given(st.lists(STEPS, max_size=80))
def test_every_message_is_delivered_pending_or_counted_as_lost(steps: list[tuple[int, str, bytes]]):
    """Each message that was handed out arrived, is pending, or is counted as dropped."""
    limits = Limits(
        outbox_high_water_bytes=MARK, outbox_max_bytes=50 * MARK, slow_consumer_timeout_s=1.0
    )
    bus = MemoryBus(limits)
    everyone = [bus.connect() for _ in range(4)]
    pipes = list(everyone)
    for number, (who, step, topic) in enumerate(steps):
        take(bus, pipes, who, step, topic, number)
        if pipes[who] not in everyone:
            everyone.append(pipes[who])
    for pipe in everyone:
        pipe.eat()
    bus.pass_time(5)
    for pipe in everyone:
        if not (pipe.closed or pipe.aborted):
            assert pipe.unread == 0, "a publisher is blocked by no reader"
    assert bus.stats("connections", "waiting") == 0
    arrived = sum(count_whole(bytes(pipe.taken)) for pipe in everyone)
    lost = sum(n for reason, n in bus.stats("dropped").items() if reason != "no_subscriber")
    assert bus.stats("messages", "delivered") == arrived + lost


def take(
    bus: MemoryBus, pipes: list[MemoryPipe], who: int, step: str, topic: bytes, number: int
) -> None:
    pipe = pipes[who]
    if step == "subscribe":
        pipe.deliver(subscribe(topic))
    elif step == "publish":
        pipe.deliver(publish(topic, b"%d" % number + bytes(100)))
    elif step == "eat":
        pipe.eat()
    elif step == "stop":
        pipe.appetite = pipe.appetite or 0
    elif step == "time":
        bus.pass_time(0.75)
    else:
        if step == "bad":
            pipe.deliver(BAD)
        if step == "leave" or pipe.closed or pipe.aborted:
            pipe.abort()
            pipe.hang_up()
            pipes[who] = bus.connect()


def count_whole(data: bytes) -> int:
    """Frames that arrived whole; a cut may leave a part of one at the end."""
    found = at = 0
    while at + 5 <= len(data):
        at += 5 + int.from_bytes(data[at : at + 4], "big")
        found += at <= len(data)
    return found
