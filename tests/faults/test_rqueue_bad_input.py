"""Every line of the spec's "Bad input", on a live server, whole and byte by byte.

The bus closes the offender with a logged and counted reason. Frames before the bad frame are
delivered, also to the offender itself; later frames are not. A bystander on the same topic is
not affected.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess, rqueue
from tests.rig.byte_feeder import drip, one_by_one
from tests.rig.observer import check_unharmed, count, log_lines, rss_bytes, stats, until
from tests.rig.rqueue_client import (
    DEREGISTER,
    NOTIFICATION,
    PART,
    PUBLISH,
    REMOVE,
    SUBSCRIBE,
    connect,
    frame,
    notification,
    part,
    publish,
    remove,
    subscribe,
    with_topic,
)

CAP = 2048
ID = bytes(range(16))
# Every closed connection gets its line here; the flood gate of the log has tests of its own.
EVERY_LINE = {"POLYBUS_LOG_FORMAT": "json", "POLYBUS_LOG_MAX_REPEATS_PER_S": "10000"}


def header(length: int, kind: int) -> bytes:
    return struct.pack(">IB", length, kind)


def publish_of(kind: int, payload: bytes, inner_length: int | None = None) -> bytes:
    """PUBLISH around any inner frame, with any inner length."""
    length = len(payload) if inner_length is None else inner_length
    return frame(PUBLISH, header(length, kind) + payload)


GOOD = with_topic(b"topic", b"content")
PART_FIELDS = ID + struct.pack(">HH", 0, 1)

BAD_INPUT = {
    # payload over the cap
    "over the cap": ("payload_too_large", publish(b"t", bytes(CAP + 1 - 7))),
    "over the cap, header only": ("payload_too_large", header(CAP + 1, PUBLISH)),
    "over the cap, as far as it goes": ("payload_too_large", header(2**32 - 1, PUBLISH)),
    "over the cap, SUBSCRIBE": ("payload_too_large", header(CAP + 1, SUBSCRIBE)),
    "over the cap, unknown type": ("payload_too_large", header(CAP + 1, 200)),
    # unknown type
    "type 3": ("unknown_type", frame(3, GOOD)),
    "type 4": ("unknown_type", frame(4, GOOD)),
    "type 6": ("unknown_type", frame(6, GOOD)),
    "type 9": ("unknown_type", frame(9, GOOD)),
    "type 255": ("unknown_type", frame(255)),
    "an HTTP request": ("payload_too_large", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    # NOTIFICATION or PART sent bare
    "bare NOTIFICATION": ("not_for_server", notification(b"topic", b"content")),
    "bare PART": ("not_for_server", part(b"topic", ID, 0, 1, b"chunk")),
    # an inner length other than payload_length - 5
    "inner length too small": ("inner_length", publish_of(NOTIFICATION, GOOD, len(GOOD) - 1)),
    "inner length too large": ("inner_length", publish_of(NOTIFICATION, GOOD, len(GOOD) + 1)),
    "inner length huge": ("inner_length", publish_of(NOTIFICATION, GOOD, 2**32 - 1)),
    "two inner frames": (
        "inner_length",
        frame(PUBLISH, notification(b"t", b"1") + notification(b"t", b"2")),
    ),
    "PUBLISH of nothing": ("inner_length", frame(PUBLISH)),
    "PUBLISH of four bytes": ("inner_length", frame(PUBLISH, bytes(4))),
    # an inner type other than 7 or 8
    "inner PUBLISH": ("inner_type", publish_of(PUBLISH, GOOD)),
    "inner SUBSCRIBE": ("inner_type", publish_of(SUBSCRIBE, GOOD)),
    "inner DEREGISTER": ("inner_type", publish_of(DEREGISTER, GOOD)),
    "inner type 6": ("inner_type", publish_of(6, GOOD)),
    "inner type 9": ("inner_type", publish_of(9, GOOD)),
    # topic_len 0 or past the payload
    "NOTIFICATION without a topic": ("topic_length", publish_of(NOTIFICATION, b"\0content")),
    "NOTIFICATION of nothing": ("topic_length", publish_of(NOTIFICATION, b"")),
    "NOTIFICATION of one byte": ("topic_length", publish_of(NOTIFICATION, b"\1")),
    "topic past the NOTIFICATION": ("topic_length", publish_of(NOTIFICATION, b"\6topic")),
    "topic far past it": ("topic_length", publish_of(NOTIFICATION, b"\xfftopic")),
    "PART without a topic": ("topic_length", publish_of(PART, b"\0" + PART_FIELDS)),
    "topic past the PART": ("topic_length", publish_of(PART, b"\xff" + PART_FIELDS)),
    "SUBSCRIBE without a topic": ("topic_length", frame(SUBSCRIBE, b"\0")),
    "SUBSCRIBE of nothing": ("topic_length", frame(SUBSCRIBE)),
    "topic past the SUBSCRIBE": ("topic_length", frame(SUBSCRIBE, b"\6topic")),
    "REMOVE without a topic": ("topic_length", frame(REMOVE, b"\0")),
    "topic past the REMOVE": ("topic_length", frame(REMOVE, b"\6topic")),
    # bytes after the topic
    "bytes after SUBSCRIBE's topic": ("trailing_bytes", frame(SUBSCRIBE, GOOD)),
    "bytes after REMOVE's topic": ("trailing_bytes", frame(REMOVE, b"\5topic!")),
    # a DEREGISTER that is not empty
    "DEREGISTER with a byte": ("deregister_not_empty", frame(DEREGISTER, b"\0")),
    "DEREGISTER with a topic": ("deregister_not_empty", frame(DEREGISTER, GOOD)),
    # a PART with count 0 or index >= count
    "PART 0 of 0": (
        "part_index",
        publish_of(PART, with_topic(b"t", ID + struct.pack(">HH", 0, 0))),
    ),
    "PART 1 of 1": (
        "part_index",
        publish_of(PART, with_topic(b"t", ID + struct.pack(">HH", 1, 1))),
    ),
    "PART 65535 of 2": (
        "part_index",
        publish_of(PART, with_topic(b"t", ID + struct.pack(">HH", 65535, 2))),
    ),
    "PART cut short": ("part_length", publish_of(PART, with_topic(b"t", PART_FIELDS[:-1]))),
}


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with rqueue("--admin", env=EVERY_LINE) as running:
        yield running
        check_unharmed(running)


@pytest.mark.parametrize("way", ["whole", "byte by byte"])
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_closes_only_its_own_connection(bus: BusProcess, name: str, way: str):
    reason, bad = BAD_INPUT[name]
    counted = count(bus, "connections", "closed", reason)
    topic = name.encode()
    since = len(bus.log())
    with connect(bus.address()) as bystander, connect(bus.address()) as offender:
        bystander.send(subscribe(topic))
        bystander.settle()
        offender.send(subscribe(topic))
        offender.settle()
        # Two runs in one read: the second is still with us when the bad frame comes.
        stream = publish(topic, b"before") + remove(b"-") + publish(topic, b"too") + bad
        if way == "whole":
            offender.send(stream + publish(topic, b"after"))
        else:
            # It may be closed before the last byte: a bad header is bad by itself.
            drip(offender.sock, one_by_one(stream))
        owed = [(NOTIFICATION, with_topic(topic, content)) for content in (b"before", b"too")]
        assert offender.to_the_end() == owed
        assert offender.rest == b""
        bystander.send(publish(topic, b"still here"))
        heard = bystander.messages(3)
        assert heard == [(topic, b"before"), (topic, b"too"), (topic, b"still here")]
        assert bystander.settle() == []
        closed = {"event": "connection closed", "dialect": "rqueue", "level": "warning"}
        until(
            lambda: log_lines(bus, since, **closed, peer=offender.name, reason=reason),
            f"a line with the peer and {reason}",
        )
        assert len(log_lines(bus, since, peer=offender.name)) == 1
        assert count(bus, "connections", "closed", reason) == counted + 1
        assert log_lines(bus, since, peer=bystander.name) == []


def test_stats_command_shows_the_counters(bus: BusProcess):
    with connect(bus.address()) as offender:
        offender.send(frame(99))
        assert offender.to_the_end() == []
    shown = bus.run("stats", "--json")
    assert shown.returncode == 0
    answer, now = json.loads(shown.stdout), stats(bus)
    for name in ("connections", "messages", "dropped"):
        assert answer[name] == now[name]
    assert answer["connections"]["closed"]["unknown_type"] >= 1


def test_closed_connection_leaves_no_state_behind(bus: BusProcess):
    """Thousands of closed connections leave no subscription and no memory."""
    before = stats(bus)
    frames = [bad for _, bad in BAD_INPUT.values()]

    def offend(times: int) -> None:
        for at in range(times):
            with connect(bus.address()) as offender:
                topic = b"%d" % at
                offender.send(subscribe(topic), publish(topic, b"x"), frames[at % len(frames)])
                offender.to_the_end()

    offend(500)  # caches and free lists find their size
    settled = rss_bytes(bus.pid)
    offend(1500)
    until(lambda: count(bus, "connections", "open") == 0, "all are gone")
    assert rss_bytes(bus.pid) - settled < 2_000_000
    after = stats(bus)
    assert after["topics"] == before["topics"] == 0
    assert after["subscriptions"] == 0
    closed = sum(after["connections"]["closed"].values())
    assert closed - sum(before["connections"]["closed"].values()) == 2000
