"""A subscriber that is away gets what it missed, once and in order.

python examples/pirate.py [tcp://127.0.0.1:6568]
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from polybus import pirate

SERVER = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:6568"
TOPIC = "example.pirate.news"


async def read(client: pirate.Client) -> None:
    async for message in client.messages(TOPIC, wait=False):
        print("read", message.id, message.body.decode())


async def main(folder: Path) -> None:
    reader, writer = folder / "reader", folder / "writer"  # what each of the two knows
    async with pirate.connect(SERVER, state=reader) as client:
        print("subscribed after", await client.subscribe(TOPIC))
    # The reader is away. Whatever is put meanwhile is kept for it, on the bus's disk.
    async with pirate.connect(SERVER, state=writer) as client:
        for number in range(3):
            print("put", await client.put(TOPIC, b"news %d" % number))
    async with pirate.connect(SERVER, state=reader) as client:
        await read(client)
    # The same reader once more: nothing comes twice.
    async with pirate.connect(SERVER, state=reader) as client:
        await read(client)
        await client.unsubscribe(TOPIC)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # a real client keeps its folder
        asyncio.run(main(Path(folder)))
