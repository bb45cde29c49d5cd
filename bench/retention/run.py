"""`python -m bench retention [--messages N] [--by messages|bytes] [--json FILE]`.

Fills a topic with messages of 16 B, then sets a limit that nearly all of them exceed. Two
bystanders measure how long each of their messages takes, before the trim and during it: one
publishes to another durable topic and waits for the disk, one sends rqueue messages to itself,
which passes the event loop and no disk. The trim lasts until the store has removed all entries.
The stall of a bystander is the longest time that one of its messages took.
"""

import argparse
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from bench.harness.places import output_folder
from bench.harness.report import table
from bench.peers.polybus import RqueueWire
from polybus.native import Client
from polybus.testing.bus_process import serve

TOPIC, OTHER = "large", "bystander"
BODY = b"0123456789abcdef"
BATCH = 10_000
SHARDS = 4
BEFORE_S = 10.0
PAUSE_S = 0.001  # between two messages of a bystander
LEFT_MESSAGES = 1000
LEFT_BYTES = 1 << 20
POLL_S = 0.5
TIMEOUT_S = 600.0


class Bystander:
    """Sends one message after another on a thread, and notes how long each takes."""

    def __init__(self, name: str, send: Callable[[], object]) -> None:
        self.name = name
        self._send = send
        self._times_s: list[float] = []
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> list[float]:
        """Return the times since the last call, sorted."""
        times, self._times_s = self._times_s, []
        return sorted(times)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(PAUSE_S):
            began_s = time.perf_counter()
            self._send()
            self._times_s.append(time.perf_counter() - began_s)


@contextmanager
def rqueue_echo(port: int) -> Iterator[Callable[[], None]]:
    wire = RqueueWire()
    message = wire.publish(b"echo", BODY)
    answer = wire.deliver(b"echo", 0, BODY)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = wire.subscriber([b"echo"])
        peer.sendall(hello.send)
        _receive(peer, len(hello.until))

        def send() -> None:
            peer.sendall(message)
            _receive(peer, len(answer))

        yield send


def _receive(peer: socket.socket, size: int) -> None:
    while size:
        size -= len(peer.recv(size))


def fill(client: Client, messages: int) -> None:
    client.create_topic(TOPIC, SHARDS)
    with client.producer() as producer:
        futures = [
            producer.produce(TOPIC, [BODY] * min(BATCH, messages - done))
            for done in range(0, messages, BATCH)
        ]
        for future in futures:
            future.result()


def stored_bytes(client: Client) -> int:
    return sum(shard["bytes"] for shard in client.bounds(TOPIC)["shards"])


def trim(client: Client, by: str) -> float:
    """Set the limit. Returns the seconds until the store has removed the entries."""
    before, began_s = stored_bytes(client), time.monotonic()
    limit = LEFT_MESSAGES if by == "messages" else LEFT_BYTES
    client.configure_topic(TOPIC, {f"retain_{by}": limit})
    # A few blocks stay: the limit is exact to a block of each shard.
    while stored_bytes(client) > before // 20:
        if time.monotonic() - began_s > TIMEOUT_S:
            raise TimeoutError("the entries were not removed")
        time.sleep(POLL_S)
    return time.monotonic() - began_s


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench retention")
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--by", choices=("messages", "bytes"), default="messages")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="retention-", dir=output_folder()))
    listen = ["native=grpc://127.0.0.1:0", "rqueue=tcp://127.0.0.1:0"]
    rows: list[dict[str, object]] = []
    try:
        with serve(listen=listen, folder=folder) as bus:
            url = f"polybus://127.0.0.1:{bus.address('native').port}"
            with Client(url) as client, Client(url) as other:
                fill(client, options.messages)
                size = stored_bytes(client)
                other.create_topic(OTHER, 1)
                with (
                    other.producer() as producer,
                    rqueue_echo(bus.address("rqueue").port) as echo,
                ):
                    bystanders = [
                        Bystander("durable", lambda: producer.produce(OTHER, [BODY]).result()),
                        Bystander("rqueue", echo),
                    ]
                    time.sleep(1.0)
                    for bystander in bystanders:
                        bystander.take()
                    time.sleep(BEFORE_S)
                    rows += [_row(one.name, "before", one.take()) for one in bystanders]
                    took_s = trim(client, options.by)
                    rows += [_row(one.name, "trim", one.take()) for one in bystanders]
                    for bystander in bystanders:
                        bystander.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{options.messages} messages, {size >> 20} MiB, trimmed in {took_s:.1f} s")
    columns = list(rows[0])
    print(table([columns, *([str(row[name]) for name in columns] for row in rows)]))
    if options.json:
        options.json.write_text(json.dumps({"seconds": took_s, "rows": rows}, indent=2))
    return 0


def _row(name: str, phase: str, times_s: list[float]) -> dict[str, object]:
    def at(share: float) -> float:
        return round(times_s[min(len(times_s) - 1, int(len(times_s) * share))] * 1000, 3)

    return {
        "bystander": name,
        "phase": phase,
        "messages": len(times_s),
        "p50 ms": at(0.5),
        "p99 ms": at(0.99),
        "p99.9 ms": at(0.999),
        "max ms": at(1.0),
    }
