"""redis-server, from Debian, spoken to in RESP2."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.harness.load import Hello
from bench.harness.peer import Running
from bench.harness.places import installed
from bench.harness.programs import Program, free_port

# Nothing on disk; subscribers are never cut as slow, so that every message is delivered.
OPTIONS = (
    *("--bind", "127.0.0.1"),
    *("--save", ""),
    *("--appendonly", "no"),
    *("--daemonize", "no"),
    *("--client-output-buffer-limit", "pubsub 0 0 0"),
)


def array(*items: bytes) -> bytes:
    return b"*%d\r\n" % len(items) + b"".join(b"$%d\r\n%s\r\n" % (len(i), i) for i in items)


class RedisWire:
    """https://redis.io/docs/latest/develop/reference/protocol-spec/"""

    aside = b""

    def publish(self, topic: bytes, content: bytes) -> bytes:
        return array(b"PUBLISH", topic, content)

    def deliver(self, topic: bytes, number: int, content: bytes) -> bytes:
        return array(b"message", topic, content)

    def subscriber(self, topics: Sequence[bytes]) -> Hello:
        return Hello(array(b"SUBSCRIBE", *topics) + array(b"PING"), until=array(b"pong", b""))

    def publisher(self, subscriptions: Sequence[Sequence[bytes]], publishers: int) -> Hello:
        # No answer to each PUBLISH: the other servers send none either.
        return Hello(array(b"PING") + array(b"CLIENT", b"REPLY", b"OFF"), until=b"+PONG\r\n")


class Redis:
    name = "redis"
    wire = RedisWire()
    selects_topics = True

    @contextmanager
    def start(self) -> Iterator[Running]:
        binary = installed("redis-server", "apt-get install redis-server")
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"v=(\S+)", said.stdout)
        port = free_port()
        with Program(self.name, [str(binary), "--port", str(port), *OPTIONS]) as program:
            program.wait_listening(port)
            yield Running(program.pid, port, port, version[1] if version else "?")
