"""The raw relay in C: no topics, bytes from one to all. The limit of the machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.harness.load import Hello
from bench.harness.peer import Running
from bench.harness.places import compiled
from bench.harness.programs import Program
from bench.peers.polybus import notification


class RelayWire:
    """The bytes are rqueue notifications in and out, so that sizes compare."""

    aside = b""

    def publish(self, topic: bytes, content: bytes) -> bytes:
        return notification(topic, content)

    def deliver(self, topic: bytes, number: int, content: bytes) -> bytes:
        return notification(topic, content)

    def subscriber(self, topics: Sequence[bytes]) -> Hello:
        return Hello(b"S", skip_bytes=1)

    def publisher(self, subscriptions: Sequence[Sequence[bytes]], publishers: int) -> Hello:
        return Hello(b"P" + bytes([publishers]), skip_bytes=1)


class Relay:
    name = "raw relay"
    wire = RelayWire()
    selects_topics = False

    @contextmanager
    def start(self) -> Iterator[Running]:
        with Program("relay", [compiled("relay", "relay.c")]) as program:
            port = int(program.line())
            yield Running(program.pid, port, port, "")
