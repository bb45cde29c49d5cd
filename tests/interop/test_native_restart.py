"""The bus goes away and comes back, at the same place: clients go on by themselves."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, wait

import pytest

from polybus import errors
from polybus.native import Client, Produced
from tests.rig.native_bus import NativeBus

PATIENCE_S = 90
ROUNDS = 2


def end(bus: NativeBus, how: str) -> None:
    if how == "kill":
        bus.kill()
    else:
        assert bus.stop() == 0


class Following(threading.Thread):
    """Reads all that comes, on its own thread, until `last` has come."""

    def __init__(self, client: Client, topic: str, last: bytes) -> None:
        super().__init__(daemon=True)
        self._reading = client.read(topic, wait_s=math.inf)
        self._last = last
        self.found: list[bytes] = []
        self.start()

    def run(self) -> None:
        for batch in self._reading:
            self.found += batch.column("body").to_pylist()
            if self._last in self.found[-batch.num_rows :]:
                break


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_messages_are_stored_once_across_restarts(how):
    with NativeBus() as bus, bus.client() as client:
        client.create_topic("t", shards=1)
        following = Following(client, "t", b"end")
        futures: list[Future[Produced]] = []
        sent: list[bytes] = []
        with client.producer("steady") as producer:
            for round_ in range(ROUNDS):
                for n in range(400):
                    sent.append(b"%d:%d" % (round_, n))
                    futures.append(producer.produce("t", sent[-1:]))
                    if n == 200:
                        wait(futures[-50:-40], PATIENCE_S)
                        end(bus, how)
                bus.start()
            sent.append(b"end")
            futures.append(producer.produce("t", [b"end"]))
            ids = [future.result(PATIENCE_S).first_id for future in futures]
        following.join(PATIENCE_S)
        assert ids == list(range(1, len(sent) + 1))
        assert following.found == sent


def test_call_waits_for_the_bus(tmp_path):
    with NativeBus() as bus, bus.client() as client:
        client.create_topic("t")
        bus.kill()
        names: list[str] = []
        asking = threading.Thread(
            target=lambda: names.extend(one["topic"] for one in client.topics())
        )
        asking.start()
        bus.start()
        asking.join(PATIENCE_S)
        assert names == ["t"]


def test_call_fails_after_the_connect_timeout():
    with NativeBus() as bus, bus.client(connect_timeout_s=0.3) as client:
        client.create_topic("t", shards=1)
        following = client.read("t", wait_s=math.inf)
        bus.kill()
        with pytest.raises(errors.Unavailable):
            client.topics()
        with pytest.raises(errors.Unavailable):
            next(following)
        bus.start()
        assert [one["topic"] for one in client.topics()] == ["t"]
