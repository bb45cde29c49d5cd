"""`python -m bench.peers.router`: a bare ROUTER that sends every message back as it came."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from bench.harness.peer import Running
from bench.harness.programs import Program

NAME = "bare ROUTER"


@contextmanager
def started() -> Iterator[Running]:
    with Program("router", [sys.executable, "-m", "bench.peers.router"]) as program:
        port = int(program.line())
        yield Running(program.pid, port, port, zmq.zmq_version())


def main() -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    receive, send = socket.recv_multipart, socket.send_multipart
    while True:
        send(receive())


if __name__ == "__main__":
    main()
