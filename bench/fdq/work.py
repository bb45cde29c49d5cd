"""`python -m bench.fdq.work URL TOPIC NUMBER`: one process of the load, driven line by line.

It uses FDQ as a program would. A line on its standard input says what to do, and one on its output
that it was done, with what it found:

    produce BATCHES MESSAGES WINDOW   BATCHES of MESSAGES each, WINDOW of them in flight
    join GROUP batch|single           consumes in a group until `leave`, which says how many it had
    read PROCESSES                    reads its share of the shards with plain reads; says how many
    pace RATE SECONDS                 so many messages a second, with the time in each
    hear GROUP                        consumes, noting how long each message took, until `heard N`,
                                      which waits for N and answers how many there were, and the
                                      p50 and p99 in microseconds

NUMBER tells the processes of one crew apart.
"""

import itertools
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from bench.fdq.cases import KEYS
from bench.store.contract import SIZE, bodies
from polybus import fdq, native

PATIENCE_S, LOOK_S = 20.0, 0.02
TIME = struct.Struct("<q")


class Work:
    def __init__(self, url: str, topic: str, number: str) -> None:
        self._url, self._topic, self._number = url, topic, int(number)
        self._producer: Any = None
        self._consumer: Any = None
        self._counts: list[int] = []
        self._took_ns: list[int] = []
        self._batch: list[fdq.MessageRequest] = []

    def produce(self, batches: str, messages: str, window: str) -> str:
        if len(self._batch) != int(messages):
            keys = (f"customer-{at}" for at in itertools.cycle(range(KEYS)))
            pairs = zip(keys, bodies(int(messages)), strict=False)
            self._batch = [fdq.MessageRequest(key, body) for key, body in pairs]
        producer, under_way = self._opened(), deque[Any]()
        for _ in range(int(batches)):
            under_way.append(producer.produce_batch_nowait(self._topic, self._batch))
            if len(under_way) == int(window):
                under_way.popleft().result()
        for one in under_way:
            one.result()
        return batches

    def join(self, group: str, mode: str) -> str:
        self._counts = []
        counted = self._counts.append
        as_batch = mode == "batch"

        def by_batch(batch: Any) -> None:
            counted(batch.num_rows)

        def one(envelope: fdq.Envelope) -> None:
            counted(1)

        self._consumer = fdq.Consumer(self._url)
        handler = by_batch if as_batch else one
        name = f"worker-{self._number}"
        self._consumer.consume(self._topic, name, handler, group=group, batch=as_batch)
        return "joined"

    def leave(self) -> str:
        self._consumer.close()
        return str(sum(self._counts))

    def read(self, processes: str) -> str:
        found = 0
        with native.Client(self._url) as client:
            shards = client.topic(self._topic)["shards"]
            for shard in range(self._number, shards, int(processes)):
                for batch in client.read(self._topic, shard):
                    found += batch.num_rows
                    if batch.column("body").nbytes < batch.num_rows * SIZE:
                        raise SystemExit("a body was cut")
        return str(found)

    def pace(self, rate: str, seconds: str) -> str:
        """Those that are late go at once: a pause of the machine is not hidden."""
        producer = self._opened()
        count, every_ns = int(int(rate) * float(seconds)), 1_000_000_000 // int(rate)
        rest = bytes(SIZE - TIME.size)
        start_ns = time.monotonic_ns()
        for at in range(count):
            due_ns = start_ns + at * every_ns
            if (left_ns := due_ns - time.monotonic_ns()) > 0:
                time.sleep(left_ns / 1e9)
            body = TIME.pack(time.monotonic_ns()) + rest
            producer.produce_nowait(self._topic, f"customer-{at % KEYS}", body)
        producer.flush()
        return str(count)

    def hear(self, group: str) -> str:
        self._took_ns = []
        took, now_ns, unpack = self._took_ns.append, time.monotonic_ns, TIME.unpack_from

        def handler(envelope: fdq.Envelope) -> None:
            took(now_ns() - unpack(envelope.message)[0])

        self._consumer = fdq.Consumer(self._url)
        name = f"listener-{self._number}"
        self._consumer.consume(self._topic, name, handler, group=group, start="latest")
        return "listening"

    def heard(self, count: str) -> str:
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self._took_ns) < int(count) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        self._consumer.close()
        took = sorted(self._took_ns)
        if not took:
            return "0 0 0"
        half, most = took[len(took) // 2], took[min(len(took) - 1, int(len(took) * 0.99))]
        return f"{len(took)} {half / 1000} {most / 1000}"

    def _opened(self) -> Any:
        if self._producer is None:
            self._producer = fdq.Producer(self._url)
        return self._producer


def main() -> None:
    work = Work(*sys.argv[1:])
    names = ("produce", "join", "leave", "read", "pace", "hear", "heard")
    verbs: dict[str, Callable[..., str]] = {name: getattr(work, name) for name in names}
    for line in sys.stdin:
        verb, *words = line.split()
        print(verbs[verb](*words), flush=True)
    os._exit(0)  # gRPC would wait for streams that never end


if __name__ == "__main__":
    main()
