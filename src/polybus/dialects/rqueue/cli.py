"""`polybus rqueue sink` and `polybus rqueue pusher`: the two ends of a first measurement.

The sink subscribes and says each second how much came; the pusher publishes as
fast as the server takes it, or at a rate. Both end with a summary: after
`--count` messages, or at Ctrl-C. They measure the bus and these clients
together; `make bench` has load generators that cost less than what they measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

Topic = Annotated[str, typer.Option(help="Topic to publish or to subscribe.")]
Count = Annotated[int, typer.Option(min=0, help="Stop after so many messages; 0: at Ctrl-C.")]
Host = Annotated[str, typer.Option(help="Where the server is.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Where the server is.")]
MaxPayload = Annotated[int, typer.Option(help="The server's --max-payload, in bytes.")]

DEFAULT_TOPIC = "bench"
DEFAULT_SIZE = 128


def register(group: typer.Typer) -> None:
    """Add both commands to the `rqueue` group."""
    group.command("sink", help="Subscribe, and print messages/s and MB/s.")(sink)
    group.command("pusher", help="Publish at full speed, or at a rate.")(pusher)


def sink(
    topic: Topic = DEFAULT_TOPIC,
    size: Annotated[int, typer.Option(min=-1, help="Bytes each message must have; -1: any.")] = -1,
    count: Count = 0,
    host: Host = "127.0.0.1",
    port: Port = 6567,
    max_payload: MaxPayload = 2048,
) -> int:
    from polybus.dialects.rqueue.client import throughput_meter

    place = throughput_meter.MeterTarget(host, port, topic, max_payload)
    return _run(throughput_meter.sink(place, size, count))


def pusher(
    topic: Topic = DEFAULT_TOPIC,
    size: Annotated[int, typer.Option(min=0, help="Bytes of each message.")] = DEFAULT_SIZE,
    count: Count = 0,
    rate: Annotated[
        float, typer.Option(min=0, help="Messages a second; 0: as many as the server takes.")
    ] = 0,
    host: Host = "127.0.0.1",
    port: Port = 6567,
    max_payload: MaxPayload = 2048,
) -> int:
    from polybus.dialects.rqueue.client import throughput_meter

    place = throughput_meter.MeterTarget(host, port, topic, max_payload)
    return _run(throughput_meter.pusher(place, size, count, rate))


def _run(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    import uvloop

    from polybus.kernel.allocator import keep_freed_buffers

    keep_freed_buffers()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
