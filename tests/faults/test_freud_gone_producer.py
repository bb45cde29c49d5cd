"""A Produce of a disconnected client reaches all readers but the full push reader."""

from __future__ import annotations

import signal

from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import connect, serving
from tests.rig import rqueue_client
from tests.rig.freud_client import OK, Client, create, get, list_topics, produce
from tests.rig.observer import count, until

LARGE = 100_000
LOOK_S = 0.01
PATIENT = {"POLYBUS_LIMITS_SLOW_CONSUMER_TIMEOUT_S": "600"}  # the full reader is never cut


def waiting(bus: BusProcess) -> int:
    return count(bus, "connections", "waiting")


def fill(bus: BusProcess, client: Client) -> None:
    """Produce until a Produce waits for the full rqueue reader."""
    while not waiting(bus):
        client.send(produce(b"t", bytes(LARGE)))
        until(lambda: client.has_answer(LOOK_S) or waiting(bus), "it is answered, or waits")
        if client.has_answer(LOOK_S):
            client.answers(1)


def test_messages_of_a_disconnected_producer_reach_freud_despite_a_full_rqueue_reader():
    with (
        serving(env=PATIENT) as bus,
        connect(bus) as client,
        connect(bus) as filler,
        rqueue_client.connect(bus.address("rqueue"), receive_buffer=4096) as full,
        rqueue_client.connect(bus.address("rqueue")) as roomy,
    ):
        assert client.ask(create(b"t")).code == OK
        key = client.subscribe(b"t")
        full.send(rqueue_client.subscribe(b"t"))
        full.settle()
        fill(bus, filler)
        roomy.send(rqueue_client.subscribe(b"t"))
        roomy.settle()
        gone = connect(bus)
        bus.signal(signal.SIGSTOP)  # so that all of it has arrived when it closes
        try:
            gone.send(list_topics(), produce(b"t", b"last"))  # the client does not read the answer
            gone.close()
        finally:
            bus.signal(signal.SIGCONT)
        assert roomy.messages(1) == [(b"t", b"last")]
        assert count(bus, "dropped", "slow_consumer") == 1  # by the one that is full
        assert waiting(bus) == 1
        found = []
        while (answer := client.ask(get(key))).code == OK:
            found.append(answer.payload)
        assert found[-1] == b"last"
