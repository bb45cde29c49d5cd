"""One connection that pipelines costly requests delays no other, nor the stop of the bus.

The tests compare the order of events instead of times. A second client waits for the first
of the costly requests, and then asks whether the bus has executed the last one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.freud_live import begin, connect, serving, started
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    NOTHING_HAPPENED,
    OK,
    Client,
    count,
    create,
    get,
    list_topics,
    produce,
    subscribe,
)
from tests.rig.observer import connections, log_lines, until

TOPICS = 1000
READERS = 500


def lists(client: Client) -> bytes:
    """Lists whose answers take a millisecond each; the bus receives them all at once."""
    client.send(*(create(b"topic-%d" % at) for at in range(TOPICS)))
    client.answers(TOPICS)
    return list_topics() * 400


def fan_outs(client: Client, pairs: int = 200) -> bytes:
    """Produces to many readers; two topics alternate, so that they are not one group."""
    client.send(create(b"a"), create(b"b"), *[subscribe(b"a"), subscribe(b"b")] * READERS)
    client.answers(2 + 2 * READERS)
    return (produce(b"a") + produce(b"b")) * pairs


WORK = pytest.mark.parametrize("work", [lists, fan_outs])


@WORK
def test_expensive_requests_do_not_block_other_connections(work):
    with serving() as bus, connect(bus) as client, connect(bus) as hog, connect(bus) as other:
        wanted = work(client)
        client.ask(create(b"begin"))
        key = other.subscribe(b"begin")
        begin(other, get(key, FOR_EVER), count(b"end"))
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(hog.to_the_end)  # at once: a stall would be a pause, too
            hog.send(produce(b"begin") + wanted + create(b"end"))
            hog.shut_down()
            assert [one.code for one in other.answers(2)] == [OK, DOESNT_EXIST]
            assert {one.code for one in reading.result()} == {OK}


@WORK
def test_expensive_requests_of_a_disconnected_client_run_without_blocking_others(work):
    with serving() as bus, connect(bus) as client, connect(bus) as other:
        wanted = work(client)
        client.ask(create(b"begin"))
        key = other.subscribe(b"begin")
        begin(other, get(key, FOR_EVER), count(b"end"))
        with connect(bus) as hog:
            hog.send(produce(b"begin") + wanted + produce(b"begin") + create(b"end"))
        assert [one.code for one in other.answers(2)] == [OK, DOESNT_EXIST]
        until(lambda: client.ask(count(b"end")).code == OK, "the last request is carried out")
        until(lambda: len(connections(bus)) == 2, "and nothing of it is left")
        assert client.ask(create(b"end")).code == NOTHING_HAPPENED


def test_bus_with_expensive_pending_requests_stops_within_its_drain_timeout():
    env = {"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "0.5"}
    with started(env=env) as bus, connect(bus) as client, connect(bus) as other:
        wanted = fan_outs(client, 3000)  # a minute of work without a limit
        client.ask(create(b"begin"))
        key = other.subscribe(b"begin")
        with connect(bus) as hog:
            begin(other, get(key, FOR_EVER))
            hog.send(produce(b"begin") + wanted)
            assert other.answers(1)[0].code == OK
        assert bus.stop() == 0
        assert log_lines(bus, level="error") == []
