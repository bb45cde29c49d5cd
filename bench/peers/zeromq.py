"""A ZeroMQ proxy (XSUB to XPUB, all of it libzmq's own code) and ZMTP 3.0 on plain sockets.

Run as a program, this file is the proxy: it prints its two ports and forwards until it is stopped.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq

from bench.harness.load import Hello
from bench.harness.peer import Running
from bench.harness.programs import Program

SHORT_FRAME = 255  # the longest body with a one-byte length
# Not the default 1000: meant to ride out bursts. A full queue is waited for (XPUB_NODROP).
QUEUE_MESSAGES = 100_000


def _frame(body: bytes) -> bytes:
    if len(body) <= SHORT_FRAME:
        return b"\x00" + len(body).to_bytes(1, "big") + body
    return b"\x02" + len(body).to_bytes(8, "big") + body


def _opening(socket_type: bytes) -> bytes:
    """Greeting with the NULL mechanism, then the READY command."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    socket_property = b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    command = b"\x05READY" + socket_property
    return greeting + b"\x04" + len(command).to_bytes(1, "big") + command


class ZmtpWire:
    """https://rfc.zeromq.org/spec/23/; one frame a message, the topic in front of the content."""

    aside = b""

    def publish(self, topic: bytes, content: bytes) -> bytes:
        return _frame(topic + content)

    def deliver(self, topic: bytes, number: int, content: bytes) -> bytes:
        return _frame(topic + content)

    def subscriber(self, topics: Sequence[bytes]) -> Hello:
        # Sent in one piece with the opening, libzmq 4.3.5 hung up; why, we do not know.
        subscriptions = b"".join(_frame(b"\x01" + topic) for topic in topics)
        return Hello(_opening(b"SUB"), len(_opening(b"XPUB")), subscriptions)

    def publisher(self, subscriptions: Sequence[Sequence[bytes]], publishers: int) -> Hello:
        """The proxy passes each new topic on to publishers: when all came, all are in force."""
        topics = {topic for subscribed in subscriptions for topic in subscribed}
        passed_on = sum(len(_frame(b"\x01" + topic)) for topic in topics)
        return Hello(_opening(b"PUB"), len(_opening(b"XSUB")) + passed_on)


class ZeroMq:
    name = "ZeroMQ proxy"
    wire = ZmtpWire()
    selects_topics = True

    @contextmanager
    def start(self) -> Iterator[Running]:
        with Program("zeromq", [sys.executable, "-m", "bench.peers.zeromq"]) as program:
            publish_port, subscribe_port = map(int, program.line().split())
            yield Running(program.pid, publish_port, subscribe_port, zmq.zmq_version())


def main() -> None:
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    outgoing.setsockopt(zmq.XPUB_NODROP, 1)
    for socket in (incoming, outgoing):
        socket.set_hwm(QUEUE_MESSAGES)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (incoming, outgoing)]
    print(*ports, flush=True)
    zmq.proxy(incoming, outgoing)


if __name__ == "__main__":
    main()
