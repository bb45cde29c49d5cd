"""The Python client as a program of its own: `… receive PORT CYCLES` or `… publish PORT CYCLES`.

Receiving, it prints `connected` when its subscription is in force, and at the end the time from its
first batch to its last. With `verify` in place of `receive` it also compares every content, which
costs a Python step a message and is therefore not timed. Publishing, the receiver does the timing.
"""

import json
import sys
import time

import uvloop

from bench.harness.workloads import Streams
from polybus import rqueue

TOPIC = b"bench"
SIZE = 128


async def receive(port: int, cycles: int, verify: bool) -> None:
    expected = [content for _, content in Streams(1, (SIZE,)).messages()]
    wanted, got, size, started_s = cycles * len(expected), 0, 0, 0.0
    async with rqueue.connect(f"tcp://127.0.0.1:{port}") as client:
        await client.subscribe(TOPIC)
        print("connected", flush=True)
        async for batch in client.batches():
            started_s = started_s or time.perf_counter()
            if verify:
                _compare(batch.contents(), expected, got)
            got += len(batch)
            size += batch.total_bytes
            if got >= wanted:
                break
        seconds = time.perf_counter() - started_s
    if (got, size) != (wanted, wanted * SIZE):
        sys.exit(f"received {got} messages, {size} bytes; sent were {wanted} of {SIZE}")
    print(json.dumps({"seconds": seconds}), flush=True)


def _compare(contents: list[bytes], expected: list[bytes], before: int) -> None:
    for number, content in enumerate(contents, before):
        if content != expected[number % len(expected)]:
            sys.exit(f"message {number} is not what was sent")


async def publish(port: int, cycles: int) -> None:
    contents = [content for _, content in Streams(1, (SIZE,)).messages()]
    async with rqueue.connect(f"tcp://127.0.0.1:{port}") as client:
        for _ in range(cycles):
            await client.publish_many(TOPIC, contents)
        await client.flush()


async def main() -> None:
    what, port, cycles = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if what == "publish":
        await publish(port, cycles)
    else:
        await receive(port, cycles, verify=what == "verify")


if __name__ == "__main__":
    uvloop.run(main())
