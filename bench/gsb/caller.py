"""The caller: `python -m bench.gsb.caller KIND ADDRESS IN_FLIGHT [NODE]`, driven by lines on stdin.

    calls N      N calls, IN_FLIGHT at once; each sends another number and must get it back
    numbers N    a stream of N numbers, which must be 0, 1, 2, …
    items N      a stream of N items of 1 MiB

With NODE the calls go to that node. The answer to each line is a line of JSON: seconds, and for
calls the 50th and 99th percentile.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import uvloop

from bench.gsb.wire import BUFFERS, ECHO, ITEM_BYTES, ITEMS, METHOD, NUMBERS, gsb_pb2

# One call: sends a number and returns the number of the reply.
Call = Callable[[int], Awaitable[int]]
NUMBER_BYTES = 8
US = 1e6


class WrongAnswer(Exception):
    """The reply differs from the request."""


async def gsb_bus(address: str, stack: AsyncExitStack) -> Any:
    from polybus import gsb

    return await stack.enter_async_context(gsb.connect(address))


async def gsb(address: str, stack: AsyncExitStack) -> Call:
    bus = await gsb_bus(address, stack)
    echo = f"/net/{sys.argv[4]}/{ECHO}" if len(sys.argv) > 4 else ECHO

    async def call(number: int) -> int:
        answer: int = await bus.call(echo, number)
        return answer

    return call


async def nats(address: str, stack: AsyncExitStack) -> Call:
    from nats.aio.client import Client

    client = Client()
    await client.connect(address)
    stack.push_async_callback(client.close)

    async def call(number: int) -> int:
        answer = await client.request(ECHO, number.to_bytes(NUMBER_BYTES, "big"), timeout=30)
        return int.from_bytes(answer.data, "big")

    return call


async def grpcio(address: str, stack: AsyncExitStack) -> Call:
    import grpc

    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
    method = channel.unary_unary("/".join(("", *METHOD)))

    async def call(number: int) -> int:
        return int.from_bytes(await method(number.to_bytes(NUMBER_BYTES, "big")), "big")

    return call


async def req_many(address: str, stack: AsyncExitStack) -> Call:
    """Req0 with a context for each call in flight."""
    import pynng

    socket = stack.enter_context(pynng.Req0(dial=address, block_on_dial=True))
    free: list[Any] = []

    async def call(number: int) -> int:
        context = free.pop() if free else socket.new_context()
        await context.asend(number.to_bytes(NUMBER_BYTES, "big"))
        answer = await context.arecv()
        free.append(context)
        return int.from_bytes(answer, "big")

    return call


async def run_calls(call: Call, count: int, in_flight: int) -> list[float]:
    """Run the calls. Returns the seconds of each."""
    took: list[float] = []
    numbers = iter(range(count))
    clock = time.perf_counter

    async def call_in_sequence() -> None:
        for number in numbers:
            began = clock()
            answer = await call(number)
            took.append(clock() - began)
            if answer != number:
                raise WrongAnswer(f"sent {number}, got {answer}")

    await asyncio.gather(*(call_in_sequence() for _ in range(in_flight)))
    return took


async def stream(bus: Any, order: str, count: int) -> None:
    at = 0
    if order == NUMBERS:
        async for number in bus.stream(NUMBERS, count):
            if number != at:
                raise WrongAnswer(f"item {at} is {number}")
            at += 1
    else:
        async for item in bus.stream(ITEMS, count):
            if len(item) != ITEM_BYTES:
                raise WrongAnswer(f"item {at} has {len(item)} bytes")
            at += 1
    if at != count:
        raise WrongAnswer(f"{at} items of {count}")


# --- plain pynng ---------------------------------------------------------------


@contextmanager
def req(address: str, _in_flight: int) -> Iterator[Callable[[int], list[float]]]:
    """Req0 by itself has one request in flight."""
    import pynng

    with pynng.Req0(dial=address, block_on_dial=True) as socket:

        def calls(count: int) -> list[float]:
            took, clock = [], time.perf_counter
            for number in range(count):
                began, sent = clock(), number.to_bytes(NUMBER_BYTES, "big")
                socket.send(sent)
                answer = socket.recv()
                took.append(clock() - began)
                if answer != sent:
                    raise WrongAnswer(f"sent {sent!r}, got {answer!r}")
            return took

        yield calls


@contextmanager
def pair(address: str, in_flight: int) -> Iterator[Callable[[int], list[float]]]:
    """GSB with pynng and the compiled messages alone: a window of calls in flight."""
    import pynng

    with pynng.Pair0(dial=address, block_on_dial=True, **BUFFERS) as socket:
        yield lambda count: _windowed(socket, count, in_flight)


def _windowed(socket: Any, count: int, in_flight: int) -> list[float]:
    packet, clock = gsb_pb2.Packet(), time.perf_counter
    call = packet.service_call_request
    call.address = ECHO
    began: dict[str, float] = {}
    took: list[float] = []
    answer = gsb_pb2.Packet()
    sent = 0
    while len(took) < count:
        while sent < count and len(began) < in_flight:
            call.request_id = str(sent)
            call.data = sent.to_bytes(NUMBER_BYTES, "big")
            began[call.request_id] = clock()
            socket.send(packet.SerializeToString())
            sent += 1
        answer.ParseFromString(socket.recv())
        reply = answer.call_reply
        took.append(clock() - began.pop(reply.request_id))
        if reply.code or reply.data != int(reply.request_id).to_bytes(NUMBER_BYTES, "big"):
            raise WrongAnswer(f"{reply}")
    return took


# --- orders --------------------------------------------------------------------


def outcome(seconds: float, took: list[float]) -> dict[str, float]:
    if not took:
        return {"seconds": seconds}
    took.sort()
    middle, late = took[len(took) // 2], took[min(len(took) - 1, len(took) * 99 // 100)]
    return {"seconds": seconds, "p50_us": middle * US, "p99_us": late * US}


def orders() -> Iterator[tuple[str, int]]:
    for line in sys.stdin:
        order, count = line.split()
        yield order, int(count)


def print_outcome(seconds: float, took: list[float]) -> None:
    print(json.dumps(outcome(seconds, took)), flush=True)


async def asynchronous(kind: str, address: str, in_flight: int) -> None:
    async with AsyncExitStack() as stack:
        bus = await gsb_bus(address, stack) if kind == "gsb" else None
        call = await CALLS[kind](address, stack)
        for order, count in orders():
            began, took = time.perf_counter(), []
            if order == "calls":
                took = await run_calls(call, count, in_flight)
            else:
                await stream(bus, order, count)
            print_outcome(time.perf_counter() - began, took)


CALLS = {"gsb": gsb, "nats": nats, "grpc": grpcio, "req": req_many}
PLAIN = {"req": req, "pair": pair}


def main() -> None:
    kind, address, in_flight = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "pair" or (kind == "req" and in_flight == 1):
        with PLAIN[kind](address, in_flight) as calls:
            for _order, count in orders():
                began = time.perf_counter()
                took = calls(count)
                print_outcome(time.perf_counter() - began, took)
        return
    threaded = kind in ("grpc", "req")  # these use threads of their own for the sockets
    loop = asyncio.new_event_loop if threaded else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asynchronous(kind, address, in_flight))


if __name__ == "__main__":
    main()
