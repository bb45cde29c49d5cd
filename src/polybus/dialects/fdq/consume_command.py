"""`polybus fdq consume TOPIC`: a member of a group that prints what it gets, and acks it.

polybus fdq consume orders                          in the group "default", for ever
polybus fdq consume orders --group audit -e --json  what the group has not got yet
polybus fdq consume orders -n 100 -f '%i %k %s\\n'
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import row_format
from polybus.cli.bus_connection import Bus, check_reachable
from polybus.cli.flags import Count, Format, JsonLines

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.consumer import Consumer

POLL_S = 0.2
TERMINATED = 128 + signal.SIGTERM


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    group: Annotated[str, typer.Option("--group", help="Whose messages they are.")] = "default",
    name: Annotated[
        str | None,
        typer.Option("--name", help="Unique in the group. [default: the host and the process]"),
    ] = None,
    start: Annotated[
        str, typer.Option("--start", help="Of a group that is new: earliest or latest.")
    ] = "earliest",
    count: Count = 0,
    stop: Annotated[
        bool, typer.Option("-e", "--exit", help="End when the group has got all there is.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the topic if it is not there.")
    ] = False,
    form: Format = None,
    as_json: JsonLines = False,
    bus: Bus = None,
) -> None:
    shape = row_format.choose_formatter(topic, form, as_objects=as_json)
    from polybus.dialects.fdq.client.consumer import Consumer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # time to leave the group
    url, options = check_reachable(bus)
    with Consumer(url, options=options) as consumer:
        printer = MessagePrinter(consumer, shape, count)
        consumer.consume(
            topic,
            name or f"{socket.gethostname()}-{os.getpid()}",
            printer.print_message if count else printer.print_batch,
            group,
            start=start,
            batch=not count,
            create=create,
        )
        while not consumer.wait(POLL_S):
            if stop and not _lag(url, topic, group):
                break
    if printer.error is not None:
        raise printer.error


class MessagePrinter:
    """Handlers. What could not be written was not handled, and ends it all."""

    def __init__(self, consumer: Consumer, shape: row_format.RowFormatter, count: int) -> None:
        self.error: OSError | None = None
        self._consumer = consumer
        self._shape = shape
        self._left = count

    def print_batch(self, batch: pa.RecordBatch) -> None:
        self._write(self._shape(batch))

    def print_message(self, envelope: Any) -> None:
        self._write(self._shape(_build_row(envelope)))
        self._left -= 1
        if not self._left:
            self._consumer.close()

    def _write(self, data: bytes) -> None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except OSError as error:
            self.error = error
            self._consumer.close()
            raise


def _build_row(envelope: Any) -> pa.RecordBatch:
    import pyarrow as pa

    from polybus.model.arrow import READ_SCHEMA

    row = {
        "id": envelope.id,
        "shard": envelope.shard,
        "offset": envelope.offset,
        "timestamp_ns": envelope.timestamp_ns,
        "insertion_ms": envelope.insertion_time,
        "shard_key": envelope.shard_key,
        "body": envelope.message,
        "headers": list(envelope.headers.items()) or None,
    }
    return pa.RecordBatch.from_pylist([row], schema=READ_SCHEMA)


def _lag(url: str, topic: str, group: str) -> int:
    from polybus.native import bus_client as buses

    reached = buses.connect(url)
    try:
        shards = reached.act("group.info", topic=topic, group=group)["shards"]
        return sum(one["lag"] for one in shards)
    finally:
        reached.close()
