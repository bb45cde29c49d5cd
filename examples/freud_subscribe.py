"""Creates a topic and prints its messages until the topic is deleted.

python examples/freud_subscribe.py news [unix:/run/polybus/freud.sock]
"""

import asyncio
import sys

from polybus import freud


async def main(topic: str, address: str | None = None) -> None:
    async with freud.connect(address) as client:
        await client.create_topic(topic)
        async with await client.subscribe(topic) as subscription:
            print("subscribed to", topic, flush=True)
            async for record in subscription:
                text = record.body.decode(errors="replace")
                print(record.message_id, record.timestamp_ns, text, flush=True)
        print(topic, "was deleted")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        pass
