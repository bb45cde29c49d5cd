"""Requests and answers of the Freud spec, on a live server with plain sockets."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import begin, connect, serving
from tests.rig.byte_feeder import drip, one_by_one
from tests.rig.freud_client import (
    COUNT,
    CREATE,
    DELETE,
    DOESNT_EXIST,
    FOR_EVER,
    FORGED_SUBSCRIBER,
    GET,
    GET_RECORD,
    LIST,
    MALFORMED,
    NOTHING_HAPPENED,
    NOTICE,
    NOTICE_FLAG,
    OK,
    PRODUCE,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Answer,
    Client,
    count,
    create,
    delete,
    frame,
    get,
    get_record,
    list_topics,
    named,
    names,
    number,
    produce,
    record,
    subscribe,
    unsubscribe,
)
from tests.rig.observer import count as counter
from tests.rig.observer import log_lines, until

MAX_FRAME_BYTES = 1 << 20
LONGEST = b"n" * 255


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with serving(env={"POLYBUS_FREUD_MAX_FRAME_BYTES": str(MAX_FRAME_BYTES)}) as running:
        yield running


# --- each request, each code -------------------------------------------------


def test_topic_lifecycle_from_create_to_delete(client: Client):
    requests = [
        create(b"life"),
        create(b"life"),
        produce(b"life", b"unheard"),
        subscribe(b"life"),
    ]
    client.send(*requests)
    created, again, unheard, subscribed = client.answers(4)
    assert created == (OK, b"")
    assert again == (NOTHING_HAPPENED, b"")
    assert unheard == (NOTHING_HAPPENED, b"")
    assert subscribed.code == OK
    key = subscribed.payload
    assert len(key) == 16
    before = time.time_ns()
    ids = [client.ask(produce(b"life", body)) for body in (b"one", b"", b"three")]
    assert [one.payload for one in ids] == [struct.pack("<Q", at) for at in range(3)]
    assert client.ask(count(b"life")) == (OK, struct.pack("<I", 1))
    assert client.ask(get(key)) == (OK, b"one")
    second = record(client.ask(get_record(key)))
    assert (second.id, second.flags, second.body) == (1, 0, b"")
    assert before <= second.timestamp_ns <= time.time_ns()
    assert client.ask(delete(b"life")) == (OK, b"")
    assert client.ask(delete(b"life")) == (NOTHING_HAPPENED, b"")
    assert client.ask(get(key)) == (OK, b"three")
    notice = record(client.ask(get_record(key)))
    assert (notice.id, notice.flags, notice.body) == (3, NOTICE_FLAG, NOTICE + b"life")
    assert client.ask(get(key)) == (DOESNT_EXIST, b"")
    assert client.ask(unsubscribe(key)) == (DOESNT_EXIST, b"")
    assert b"life" not in names(client.ask(list_topics()))


def test_requests_for_missing_topics_and_subscribers_are_answered(client: Client):
    for request in (subscribe(b"no"), produce(b"no", b"x"), count(b"no")):
        assert client.ask(request) == (DOESNT_EXIST, b"")
    assert client.ask(delete(b"no")) == (NOTHING_HAPPENED, b"")
    for wanted in (get, get_record):
        assert client.ask(wanted(FORGED_SUBSCRIBER, 5)) == (DOESNT_EXIST, b"")
    assert client.ask(unsubscribe(FORGED_SUBSCRIBER)) == (DOESNT_EXIST, b"")


def test_recreated_topic_is_listed_once(client: Client, topic: bytes):
    client.subscribe(topic)
    client.ask(delete(topic))
    client.ask(create(topic))
    other = topic[:-1] + "\u00e9".encode()
    client.ask(create(other))
    assert sorted(names(client.ask(list_topics()))).count(topic) == 1
    assert other in names(client.ask(list_topics()))


def test_the_same_process_may_subscribe_twice(client: Client, topic: bytes):
    first, second = client.subscribe(topic), client.subscribe(topic)
    assert first != second
    client.send(produce(topic, b"x"), get(first), get(second), unsubscribe(first), get(first))
    assert client.answers(5)[1:] == [(OK, b"x"), (OK, b"x"), (OK, b""), (DOESNT_EXIST, b"")]
    assert number(client.ask(count(topic))) == 1


def test_a_subscription_starts_at_the_next_message(client: Client, topic: bytes):
    early = client.subscribe(topic)
    client.ask(produce(topic, b"1"))
    late = client.subscribe(topic)
    client.ask(produce(topic, b"2"))
    assert record(client.ask(get_record(late)))[0:4:3] == (1, b"2")
    assert client.ask(get(early)) == (OK, b"1")


def test_longest_name_and_largest_frame_are_accepted(client: Client):
    assert client.ask(create(LONGEST)).code == OK
    key = client.subscribe(LONGEST)
    body = bytes(MAX_FRAME_BYTES - 4 - 255)
    assert number(client.ask(produce(LONGEST, body))) == 0
    assert client.ask(get(key)) == (OK, body)
    client.ask(delete(LONGEST))
    assert client.ask(get(key)) == (OK, NOTICE + LONGEST)


def test_ids_and_timestamps_never_decrease(client: Client, topic: bytes):
    key = client.subscribe(topic)
    client.send(*(produce(topic, b"%d" % at) for at in range(500)))
    assert [number(one) for one in client.answers(500)] == list(range(500))
    client.send(*(get_record(key) for _ in range(500)))
    found = [record(one) for one in client.answers(500)]
    assert [one.id for one in found] == list(range(500))
    times = [one.timestamp_ns for one in found]
    assert times == sorted(times)


# --- pipelining --------------------------------------------------------------


def test_answers_come_in_the_order_of_the_requests(client: Client, topic: bytes):
    key = client.subscribe(topic)
    requests = [
        produce(topic, b"1"),
        get(key),
        list_topics(),
        get(key),
        frame(77),
        produce(topic, b"2"),
        produce(topic, b"3"),
        count(topic),
        get(key),
        get_record(key),
        unsubscribe(key),
        get(key, 10),
        produce(topic, b"4"),
    ]
    client.send(*requests)
    codes = [one.code for one in client.answers(len(requests))]
    expected = [OK, OK, OK, NOTHING_HAPPENED, MALFORMED, OK, OK, OK, OK, OK, OK]
    assert codes == [*expected, DOESNT_EXIST, NOTHING_HAPPENED]


def test_waiting_get_blocks_only_its_own_connection(bus: BusProcess, topic: bytes):
    with connect(bus) as waiting, connect(bus) as other:
        key = waiting.subscribe(topic)
        waiting.send(get(key, FOR_EVER), unsubscribe(key), get(key))
        assert other.ask(count(topic)) == (OK, struct.pack("<I", 1))
        assert not waiting.has_answer(within_s=0.1)
        assert other.ask(produce(topic, b"go on")).code == OK
        assert waiting.answers(3) == [(OK, b"go on"), (OK, b""), (DOESNT_EXIST, b"")]


def test_thousands_of_pipelined_requests_are_answered_in_order(client: Client, topic: bytes):
    key = client.subscribe(topic)
    rounds = 2000
    client.send(*(produce(topic, b"%d" % at) + get(key) for at in range(rounds)))
    found = client.answers(2 * rounds)
    assert [number(one) for one in found[::2]] == list(range(rounds))
    assert [one.payload for one in found[1::2]] == [b"%d" % at for at in range(rounds)]


# --- waiting -----------------------------------------------------------------


def test_get_with_timeout_zero_polls_and_with_one_waits_a_second(client: Client, topic: bytes):
    key = client.subscribe(topic)
    start = time.monotonic()
    assert client.ask(get(key, 0)) == (NOTHING_HAPPENED, b"")
    assert client.ask(get(key, 1)) == (NOTHING_HAPPENED, b"")
    assert time.monotonic() - start >= 1.0


@pytest.mark.parametrize("seconds", [1, 30, 2**31 - 1, -1, -(2**31)])
def test_produce_ends_a_waiting_get_of_any_timeout(
    bus: BusProcess, client: Client, topic: bytes, seconds: int
):
    with connect(bus) as waiting:
        key = waiting.subscribe(topic)
        begin(waiting, get_record(key, seconds))
        client.ask(produce(topic, b"here"))
        assert record(waiting.answers(1)[0]).body == b"here"


def test_unsubscribe_ends_a_waiting_get(bus: BusProcess, client: Client, topic: bytes):
    with connect(bus) as waiting:
        key = waiting.subscribe(topic)
        begin(waiting, get(key, FOR_EVER))
        assert client.ask(unsubscribe(key)) == (OK, b"")
        assert waiting.answers(1) == [(DOESNT_EXIST, b"")]


def test_delete_ends_a_waiting_get_with_the_notice(bus: BusProcess, client: Client, topic: bytes):
    with connect(bus) as waiting:
        key = waiting.subscribe(topic)
        begin(waiting, get(key, FOR_EVER), get(key, FOR_EVER))
        assert client.ask(delete(topic)) == (OK, b"")
        assert waiting.answers(2) == [(OK, NOTICE + topic), (DOESNT_EXIST, b"")]
        assert topic not in names(client.ask(list_topics()))


def test_gets_of_one_subscriber_are_served_in_order_of_arrival(
    bus: BusProcess, client: Client, topic: bytes
):
    """Two connections whose Gets arrive alternately, in either order."""
    key = client.subscribe(topic)
    with connect(bus) as first, connect(bus) as second:
        for at in range(10):
            ahead, behind = (first, second) if at % 2 else (second, first)
            begin(ahead, get(key, FOR_EVER))
            begin(behind, get(key, FOR_EVER))
            client.send(produce(topic, b"1"), produce(topic, b"2"))
            client.answers(2)
            assert ahead.answers(1) == [(OK, b"1")]
            assert behind.answers(1) == [(OK, b"2")]


# --- malformed ---------------------------------------------------------------

NAMED = {"create": CREATE, "delete": DELETE, "subscribe": SUBSCRIBE, "count": COUNT}
BAD_NAMES = {
    "empty": b"",
    "too long": b"n" * 256,
    "a control character": b"a\x1fb",
    "a control character of Latin-1": "a\x85b".encode(),
    "a comma": b"a,b",
    "a star": b"a*",
    "the bus's own": b"_a",
    "not UTF-8": b"\xff\xfe",
    "a surrogate": b"\xed\xa0\x80",
}
MALFORMED_REQUESTS = {
    **{
        f"{what}, {why}": ("bad_name", frame(kind, named(name)))
        for what, kind in NAMED.items()
        for why, name in BAD_NAMES.items()
    },
    **{
        f"produce, {why}": ("bad_name", frame(PRODUCE, named(name, b"body")))
        for why, name in BAD_NAMES.items()
    },
    **{f"{what}, nothing": ("truncated", frame(kind)) for what, kind in NAMED.items()},
    **{
        f"{what}, a name that does not fit": ("truncated", frame(kind, b"\5\0\0\0name"))
        for what, kind in (NAMED | {"produce": PRODUCE}).items()
    },
    **{
        f"{what}, a name of 4 GiB": ("truncated", frame(kind, b"\xff\xff\xff\xffname"))
        for what, kind in (NAMED | {"produce": PRODUCE}).items()
    },
    **{
        f"{what}, trailing bytes": ("trailing_bytes", frame(kind, named(b"name", b"!")))
        for what, kind in NAMED.items()
    },
    "unsubscribe, 15 bytes": ("truncated", frame(UNSUBSCRIBE, bytes(15))),
    "unsubscribe, 17 bytes": ("trailing_bytes", frame(UNSUBSCRIBE, bytes(17))),
    "get, 19 bytes": ("truncated", frame(GET, bytes(19))),
    "get, 21 bytes": ("trailing_bytes", frame(GET, bytes(21))),
    "get record, no time": ("truncated", frame(GET_RECORD, bytes(16))),
    "list with a payload": ("trailing_bytes", frame(LIST, b"\0")),
    "type 9": ("unknown_type", frame(9)),
    "type 2^32-1": ("unknown_type", frame(2**32 - 1, bytes(100))),
}


@pytest.mark.parametrize("way", ["whole", "byte by byte"])
@pytest.mark.parametrize("why", MALFORMED_REQUESTS)
def test_malformed_request_is_answered_and_the_connection_stays_open(
    bus: BusProcess, why: str, way: str
):
    reason, bad = MALFORMED_REQUESTS[why]
    refused = counter(bus, "refused", f"malformed_{reason}")
    with connect(bus) as client:
        stream = list_topics() + bad + bad + list_topics()
        if way == "whole":
            client.send(stream)
        else:
            assert drip(client.sock, one_by_one(stream)) == len(stream)
        before, first, second, after = client.answers(4)
        assert before.code == after.code == OK
        assert first == second
        assert first.code == MALFORMED
        assert first.payload.decode()  # UTF-8, and something to read
        assert client.ask(delete(b"never created")).code == NOTHING_HAPPENED
    assert counter(bus, "refused", f"malformed_{reason}") == refused + 2


def test_body_that_resembles_a_notice_is_accepted(client: Client, topic: bytes):
    key = client.subscribe(topic)
    for body in (NOTICE[:6], NOTICE[1:], b"x" + NOTICE):
        assert client.ask(produce(topic, body)).code == OK
        assert client.ask(get(key)) == (OK, body)


OVERSIZED = {
    "by one": struct.pack("<II", PRODUCE, MAX_FRAME_BYTES + 1),
    "as far as it goes": struct.pack("<II", CREATE, 2**32 - 1),
    "of an unknown type": struct.pack("<II", 99, 2**31),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("way", ["whole", "byte by byte"])
@pytest.mark.parametrize("why", OVERSIZED)
def test_oversized_request_is_answered_in_order_and_closes(
    bus: BusProcess, client: Client, topic: bytes, why: str, way: str
):
    closed = counter(bus, "connections", "closed", "too_large")
    key = client.subscribe(topic)
    with connect(bus) as offender:
        stream = list_topics() + get(key, FOR_EVER) + OVERSIZED[why]
        if way == "whole":
            offender.send(stream + create(b"after the end") * 1000)
        else:
            drip(offender.sock, one_by_one(stream))
        assert offender.answers(1)[0].code == OK
        assert not offender.has_answer(within_s=0.05)  # the waiting Get must be answered first
        client.ask(produce(topic, b"go on"))
        found = offender.to_the_end()
        assert [one.code for one in found] == [OK, MALFORMED]
        assert found[0].payload == b"go on"
        assert found[1].payload.decode()
        assert offender.rest == b""
    until(lambda: counter(bus, "connections", "closed", "too_large") == closed + 1, "counted")
    closing = {"event": "connection closed", "dialect": "freud", "reason": "too_large"}
    until(lambda: len(log_lines(bus, **closing)) == closed + 1, "and said")
    assert b"after the end" not in names(client.ask(list_topics()))


# --- little by little --------------------------------------------------------


def test_requests_sent_one_byte_at_a_time_are_answered(client: Client):
    stream = create(b"drip") + subscribe(b"drip") + produce(b"drip", bytes(range(256)))
    stream += count(b"drip") + delete(b"drip") + create(b"drip") + list_topics()
    assert drip(client.sock, one_by_one(stream)) == len(stream)
    found = client.answers(7)
    assert [one.code for one in found] == [OK] * 7
    drip(client.sock, one_by_one(get(found[1].payload) + get_record(found[1].payload)))
    body, notice = client.answers(2)
    assert body == (OK, bytes(range(256)))
    assert record(notice).body == NOTICE + b"drip"


@pytest.mark.parametrize("left", range(1, 20))
def test_incomplete_request_at_the_end_is_dropped_unanswered(bus: BusProcess, left: int):
    whole = produce(b"half", b"request")
    with connect(bus) as client:
        client.send(list_topics() + whole[:left])
        client.shut_down()
        found = client.to_the_end()
        assert [one.code for one in found] == [OK]
        assert client.rest == b""


def test_incomplete_request_does_not_affect_other_connections(
    bus: BusProcess, client: Client, topic: bytes
):
    key = client.subscribe(topic)
    whole = produce(topic, b"late")
    with connect(bus) as silent:
        silent.send(whole[:-1])
        assert client.ask(get(key)) == (NOTHING_HAPPENED, b"")
        silent.send(whole[-1:])
        assert silent.answers(1) == [Answer(OK, struct.pack("<Q", 0))]
        assert client.ask(get(key)) == (OK, b"late")


# --- recreation --------------------------------------------------------------


def test_topic_is_recreated_while_its_old_readers_still_read(
    bus: BusProcess, client: Client, topic: bytes
):
    old = client.subscribe(topic)
    client.ask(produce(topic, b"old"))
    client.ask(delete(topic))
    for request in (produce(topic, b"x"), subscribe(topic)):
        assert client.ask(request) == (DOESNT_EXIST, b"")
    assert number(client.ask(count(topic))) == 1
    assert client.ask(create(topic)) == (OK, b"")
    assert client.ask(create(topic)) == (NOTHING_HAPPENED, b"")
    assert [number(client.ask(produce(topic, b"%d" % at))) for at in range(2)] == [0, 1]
    assert number(client.ask(count(topic))) == 0
    with connect(bus) as waiting:
        new = waiting.subscribe(topic)
        assert waiting.ask(get(new)) == (NOTHING_HAPPENED, b"")
        waiting.send(get(new, FOR_EVER), get(new), get(new))
        assert not waiting.has_answer(within_s=0.05)
        assert client.ask(get(old)) == (OK, b"old")
        assert client.ask(get(old)) == (OK, NOTICE + topic)
        found = waiting.answers(3)
        assert found == [(OK, b"0"), (OK, b"1"), (NOTHING_HAPPENED, b"")]
        assert number(client.ask(produce(topic, b"2"))) == 2
        assert waiting.ask(get(new)) == (OK, b"2")


def test_buffered_messages_wait_for_the_first_reader(client: Client, topic: bytes):
    old = client.subscribe(topic)
    client.send(delete(topic), create(topic), produce(topic, b"kept"), get(old))
    assert [one.code for one in client.answers(4)] == [OK] * 4
    assert client.ask(produce(topic, b"joins")) == (OK, struct.pack("<Q", 1))
    first, second = client.subscribe(topic), client.subscribe(topic)
    client.send(get(first), get(first), get(first), get(second))
    expected = [(OK, b"kept"), (OK, b"joins"), (NOTHING_HAPPENED, b""), (NOTHING_HAPPENED, b"")]
    assert client.answers(4) == expected


def test_recreation_can_be_cancelled(bus: BusProcess, client: Client, topic: bytes):
    lost = counter(bus, "dropped", "topic_deleted")
    old = client.subscribe(topic)
    client.send(delete(topic), create(topic), produce(topic, b"1"), produce(topic, b"2"))
    client.answers(4)
    new = client.subscribe(topic)
    assert client.ask(delete(topic)) == (OK, b"")
    notice = record(client.ask(get_record(new)))
    assert (notice.id, notice.flags, notice.body) == (2, NOTICE_FLAG, NOTICE + topic)
    assert client.ask(get(new)) == (DOESNT_EXIST, b"")
    assert counter(bus, "dropped", "topic_deleted") == lost + 2
    assert client.ask(create(topic)) == (OK, b"")  # a third time, while the first is still read
    assert number(client.ask(produce(topic, b"3"))) == 0
    assert client.ask(get(old)) == (OK, NOTICE + topic)
    assert client.ask(get(client.subscribe(topic))) == (OK, b"3")
