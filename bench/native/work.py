"""`python -m bench.native.work URL TOPIC`: one process of the load, driven line by line.

It speaks plain pyarrow.flight, so that the port is measured and not our client. A line on its
standard input says what to do, and one on its output how many seconds that took:

    streams N MESSAGES WINDOW   opens N produce streams for batches of so many messages
    run BATCHES                 each stream produces so many, at most WINDOW of them unanswered
    read                        reads the topic from its first message to its last
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from bench.store.contract import SIZE, bodies

SCHEMA = pa.schema([("shard_key", pa.utf8()), pa.field("body", pa.binary(), nullable=False)])

# Arrow shares a connection between clients of an address, and a connection has `max_streams` calls.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def _batch(messages: int) -> pa.RecordBatch:
    keys = pa.nulls(messages, pa.utf8())
    return pa.record_batch([keys, pa.array(bodies(messages), pa.binary())], schema=SCHEMA)


class Stream:
    """One producer: a put stream, its stamps, and how many batches have no answer yet."""

    def __init__(self, client: Any, topic: str, messages: int, window: int) -> None:
        opened = next(iter(client.do_action(flight.Action("producer.open", b"{}"))))
        self._stamp = json.loads(opened.body.to_pybytes())
        self._counter = 0
        self._batch = _batch(messages)
        self._window = window
        self._missing = 0
        descriptor = flight.FlightDescriptor.for_path("produce", topic)
        self._writer, self._reader = client.do_put(descriptor, SCHEMA)

    def write(self) -> None:
        """One batch more; before that, the answers that leave room for it."""
        while self._missing >= self._window:
            self.read()
        self._counter += 1
        stamp = {"producer": self._stamp["producer"], "epoch": self._stamp["epoch"]}
        metadata = json.dumps({**stamp, "counter": self._counter}).encode()
        self._writer.write_with_metadata(self._batch, metadata)
        self._missing += 1

    def read(self) -> None:
        answer = json.loads(self._reader.read().to_pybytes())
        if "error" in answer:
            raise SystemExit(f"a batch was refused: {answer['error']}")
        self._missing -= 1

    def settle(self) -> None:
        while self._missing:
            self.read()


class Work:
    def __init__(self, url: str, topic: str) -> None:
        self._url = url
        self._topic = topic
        self._streams: list[Stream] = []

    def streams(self, count: int, messages: int, window: int) -> None:
        clients = [flight.connect(self._url, generic_options=OWN_CONNECTION) for _ in range(count)]
        made = [Stream(client, self._topic, messages, window) for client in clients]
        self._streams = made

    def run(self, batches: int) -> None:
        for _ in range(batches):
            for stream in self._streams:
                stream.write()
        for stream in self._streams:
            stream.settle()

    def read(self, messages: int) -> None:
        ticket = json.dumps({"topic": self._topic, "shard": 0, "from": 0}).encode()
        found = 0
        for chunk in flight.connect(self._url).do_get(flight.Ticket(ticket)):
            found += chunk.data.num_rows
            if chunk.data.column("body").nbytes < chunk.data.num_rows * SIZE:
                raise SystemExit("a body was cut")
        if found != messages:
            raise SystemExit(f"{found} messages were read of {messages}")


def main() -> None:
    work = Work(*sys.argv[1:])
    verbs: dict[str, Callable[..., None]] = {
        "streams": work.streams,
        "run": work.run,
        "read": work.read,
    }
    for line in sys.stdin:
        verb, *numbers = line.split()
        started_s = time.perf_counter()
        verbs[verb](*map(int, numbers))
        print(time.perf_counter() - started_s, flush=True)
    os._exit(0)  # gRPC would wait for streams that never end


if __name__ == "__main__":
    main()
