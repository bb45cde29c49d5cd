"""A SIGTERM while peers hold requests open: each gets an answer, and the log has no traceback."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attack.whole_bus import serve_all
from tests.faults.gsb_live import failure
from tests.rig import gsb_peer, rqueue_client
from tests.rig.gsb_peer import call
from tests.rig.observer import log_lines, until
from tests.rig.pirate.zmq_client import Bare, NoAnswer

UNAVAILABLE = 503
CLIENTS = 4


@pytest.mark.sabotage("stop-answers-no-call", expects="the open call got no FULL")
def test_open_call_gets_503_at_shutdown():
    with serve_all() as bus, gsb_peer.connect(bus.address("gsb")) as service:
        assert service.register("slow") == 0
        with gsb_peer.connect(bus.address("gsb")) as caller:
            caller.send(call("slow", "1"))
            assert service.call().address
            bus.signal(signal.SIGTERM)
            try:
                reply = caller.reply()
            except (gsb_peer.HungUp, EOFError, OSError) as error:
                raise AssertionError("the open call got no FULL") from error
            assert (reply.request_id, failure(reply).code) == ("1", UNAVAILABLE)
            caller.wait_for_end()
        assert bus.wait() == 0


@pytest.mark.sabotage("ticks-after-close", expects="unexpected error")
def test_stop_with_pirate_clients_logs_no_error():
    """The pirate listener is closed while a reader of rqueue still holds up the stop."""
    with serve_all() as bus:
        address = bus.address("pirate")
        with (
            Bare(f"tcp://{address.host}:{address.port}", b"a") as client,
            rqueue_client.connect(bus.address("rqueue"), receive_buffer=4096) as reader,
            rqueue_client.connect(bus.address("rqueue")) as writer,
        ):
            client.hello()
            reader.send(rqueue_client.subscribe(b"t"))
            reader.settle()
            for _ in range(100):
                writer.send(*(rqueue_client.publish(b"t", b"x" * 1000) for _ in range(50)))
                writer.settle()
            bus.signal(signal.SIGTERM)
            until(lambda: log_lines(bus, event="stopping"), "the stop")
            # The bus waits for the reader up to drain_timeout_s, while its ticker goes on.
            until(lambda: bus.process.poll() is not None, "the end", 20)
        assert bus.wait() == 0
        assert log_lines(bus, level="error") == []
        assert "Traceback" not in bus.log_path.read_text()


def put_until_the_bus_ends(endpoint: str, name: str, has_put: threading.Event) -> None:
    with Bare(endpoint, name.encode(), patience_s=5.0) as client:
        client.hello()
        client.sub(name)  # creates the topic
        try:
            while client.put(name, b"x" * 1000)[0] == "OK":
                has_put.set()
        except NoAnswer:
            pass


def test_stop_under_load_of_pirate_clients_logs_no_error():
    with serve_all() as bus, ThreadPoolExecutor(CLIENTS) as pool:
        address = bus.address("pirate")
        begun = [threading.Event() for _ in range(CLIENTS)]
        clients = [
            pool.submit(
                put_until_the_bus_ends, f"tcp://{address.host}:{address.port}", f"c{number}", event
            )
            for number, event in enumerate(begun)
        ]
        assert all(event.wait(20) for event in begun)
        bus.signal(signal.SIGTERM)
        assert bus.wait() == 0
        for client in clients:
            client.result()
        assert log_lines(bus, level="error") == []
        assert "Traceback" not in bus.log_path.read_text()
