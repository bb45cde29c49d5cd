"""Produces to a topic what comes on standard input, a message a line, then deletes the topic.

seq 1000000 | python examples/freud_publish.py news [unix:/run/polybus/freud.sock]
"""

import asyncio
import sys
from itertools import islice

from polybus import freud

LINES_AT_ONCE = 1000


async def main(topic: str, address: str | None = None) -> None:
    read = dropped = 0
    async with freud.connect(address) as client:
        while lines := list(islice(sys.stdin.buffer, LINES_AT_ONCE)):
            ids = await client.produce_many(topic, [line.rstrip(b"\n") for line in lines])
            dropped += ids.count(None)  # the topic had no subscriber
            read += len(ids) - ids.count(None)
        await client.delete_topic(topic)
    print(f"{read} produced, {dropped} dropped because {topic} has no subscriber")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
