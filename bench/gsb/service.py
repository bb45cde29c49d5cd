"""The service: `python -m bench.gsb.service KIND ADDRESS`. It prints `ready` and then serves.

Every kind replies with its request. GSB's services also stream numbers and items of 1 MiB.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

from bench.gsb.wire import BUFFERS, ECHO, ITEM_BYTES, ITEMS, METHOD, NUMBERS, gsb_pb2


def _ready() -> None:
    print("ready", flush=True)


async def gsb(address: str) -> None:
    from polybus import gsb as dialect

    async with dialect.connect(address) as bus:

        @bus.service(ECHO)
        async def echo(call: dialect.Call) -> Any:
            return call.data

        @bus.service(NUMBERS)
        async def numbers(call: dialect.Call) -> AsyncIterator[int]:
            for number in range(call.data):
                yield number

        @bus.service(ITEMS)
        async def items(call: dialect.Call) -> AsyncIterator[bytes]:
            item = bytes(ITEM_BYTES)
            for _ in range(call.data):
                yield item

        await bus.registered()
        _ready()
        await bus.serve()


async def nats(address: str) -> None:
    from nats.aio.client import Client

    client = Client()
    await client.connect(address)

    async def echo(message: Any) -> None:
        await message.respond(message.data)

    await client.subscribe(ECHO, cb=echo)
    await client.flush()
    _ready()
    await asyncio.Event().wait()


async def grpcio(address: str) -> None:
    import grpc

    async def echo(request: bytes, _context: Any) -> bytes:
        return request

    method = grpc.unary_unary_rpc_method_handler(echo)
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(METHOD[0], {METHOD[1]: method})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(address)
    await server.start()
    _ready()
    await server.wait_for_termination()


def req(address: str) -> None:
    import pynng

    with pynng.Rep0(listen=address) as socket:
        _ready()
        while True:
            socket.send(socket.recv())


def pair(address: str) -> None:
    """A service with pynng and the compiled messages alone."""
    import pynng

    with pynng.Pair0(dial=address, block_on_dial=True, **BUFFERS) as socket:
        packet = gsb_pb2.Packet()
        packet.register_request.service_id = ECHO
        socket.send(packet.SerializeToString())
        socket.recv()
        _ready()
        answer = gsb_pb2.Packet()
        while True:
            packet.ParseFromString(socket.recv())
            answer.call_reply.request_id = packet.call_request.request_id
            answer.call_reply.data = packet.call_request.data
            socket.send(answer.SerializeToString())


ASYNC: dict[str, tuple[Callable[[str], Awaitable[None]], Callable[[], asyncio.AbstractEventLoop]]]
ASYNC = {
    "gsb": (gsb, uvloop.new_event_loop),
    "nats": (nats, uvloop.new_event_loop),
    "grpc": (grpcio, asyncio.new_event_loop),  # it uses threads of its own for the sockets
}
PLAIN = {"req": req, "pair": pair}


def main() -> None:
    kind, address = sys.argv[1:]
    if kind in PLAIN:
        return PLAIN[kind](address)
    serve, loop = ASYNC[kind]
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(_awaited(serve(address)))


async def _awaited(work: Awaitable[None]) -> None:
    await work


if __name__ == "__main__":
    main()
