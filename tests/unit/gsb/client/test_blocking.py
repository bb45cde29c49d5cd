"""The blocking client: the same names, without `await`."""

from __future__ import annotations

import gc
import threading

import pytest

from polybus import gsb
from polybus.errors import Conflict, DoesNotExist, ServiceFailed
from tests.rig.observer import stats, until


def test_services_calls_and_streams(address):
    with gsb.blocking.connect(address) as bus:

        @bus.service("greeter")
        def greet(call):
            return {"hello": call.data["name"]}

        @bus.service("numbers")
        def numbers(call):
            yield from range(call.data)

        @bus.service("fails")
        def fails(call):
            raise ServiceFailed("teapot", 417)

        assert bus.call("greeter", {"name": "Ada"}) == {"hello": "Ada"}
        assert list(bus.stream("numbers", 1000)) == list(range(1000))
        with pytest.raises(ServiceFailed, match="teapot") as failed:
            bus.call("fails")
        assert failed.value.status == 417
        with pytest.raises(DoesNotExist):
            list(bus.stream("unknown"))
        with pytest.raises(Conflict):
            bus.register("greeter", greet)
        bus.unregister("greeter")
        assert bus.ping() > 0
        assert bus.is_connected
        assert bus.open_calls == 0


def test_many_threads_share_a_client(address):
    with gsb.blocking.connect(address) as bus:

        @bus.service("echo")
        def echo(call):
            return call.data

        answers: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            answers[number] = [bus.call("echo", number * 100 + at) for at in range(20)]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {n: [n * 100 + at for at in range(20)] for n in range(8)}


@pytest.mark.parametrize("way", ["close", "with", "dropped"])
def test_abandoned_stream_is_cancelled(address, bus, way):
    with gsb.blocking.connect(address) as client:
        closed = threading.Event()

        @client.service("endless")
        def endless(call):
            try:
                while True:
                    yield 1
            finally:
                closed.set()

        items = client.stream("endless")
        assert next(items) == 1
        if way == "close":
            items.close()
        elif way == "with":
            with items:
                assert next(items) == 1
        del items
        gc.collect()
        assert closed.wait(20)
        until(lambda: stats(bus)["gsb"]["open_calls"] == 0, "the call has ended")


def test_subscribe_and_broadcast(address):
    with gsb.blocking.connect(address) as bus, bus.subscribe("news") as news:
        bus.broadcast("news", [1])
        message = next(news)
        assert (message.topic, message.data) == ("news", [1])
        assert news.get(timeout_s=0.01) is None
        assert news.lost == 0
