"""Services that call each other: one value, a stream, a stream that is left half-way.

polybus serve
python examples/gsb.py [tcp://127.0.0.1:6569]
"""

import asyncio
import sys
from collections.abc import AsyncIterator

from polybus import gsb
from polybus.errors import DoesNotExist


async def main(address: str | None) -> None:
    async with gsb.connect(address) as bus, gsb.connect(address) as caller:

        @bus.service("greeter")
        async def greet(call: gsb.Call) -> dict[str, str]:
            return {"hello": call.data["name"]}

        @bus.service("greeter/many")
        async def many(call: gsb.Call) -> AsyncIterator[str]:
            try:
                for number in range(call.data["n"]):
                    yield f"hello {number}"
            finally:
                print("the stream has ended")

        await bus.registered()
        print(await caller.call("greeter", {"name": "Ada"}))
        async for item in caller.stream("greeter/many", {"n": 3}):
            print(item)

        async with caller.stream("greeter/many", {"n": 1_000_000}) as items:
            print(await anext(items), "… and so on; enough")

        try:
            await caller.call("unknown")
        except DoesNotExist as error:
            print("no such service:", error)
        for service in await caller.call("sys/services"):
            print(service["id"], "was called", service["calls"], "times")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
