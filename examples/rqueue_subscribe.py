"""Prints what is published on a topic, until Ctrl-C.

python examples/rqueue_subscribe.py numbers [tcp://127.0.0.1:6567]
"""

import asyncio
import sys

from polybus import rqueue


async def main(topic: str, address: str = "tcp://127.0.0.1:6567") -> None:
    async with rqueue.connect(address) as client:
        await client.subscribe(topic)
        print("subscribed to", topic, flush=True)
        # A batch at a time, for speed; `async for message in client` works too.
        async for batch in client.batches():
            for message in batch:
                print(message.content.decode(errors="replace"))
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        pass
