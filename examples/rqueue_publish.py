"""Publishes on a topic what comes on standard input, a message a line.

seq 1000000 | python examples/rqueue_publish.py numbers [tcp://127.0.0.1:6567]
"""

import asyncio
import sys
from itertools import islice

from polybus import rqueue

LINES_AT_ONCE = 1000


async def main(topic: str, address: str = "tcp://127.0.0.1:6567") -> None:
    async with rqueue.connect(address) as client:
        while lines := list(islice(sys.stdin.buffer, LINES_AT_ONCE)):
            await client.publish_many(topic, [line.rstrip(b"\n") for line in lines])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
