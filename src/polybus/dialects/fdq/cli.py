"""`polybus fdq`: produce, consume and replay from a terminal.

polybus fdq produce orders --key-sep : < orders.txt
polybus fdq produce orders 'a message' --key customer-7 --header source=shell
polybus fdq produce orders --atomic --name importer < orders.jsonl
polybus fdq produce reminders 'call back' --delay 2h --ttl 1d
polybus fdq consume orders                          in the group "default", until Ctrl-C
polybus fdq consume orders --group audit -e --json  all messages that the group has not acked
polybus fdq consume orders -n 100 -f '%i %k %s\\n'
polybus fdq replay orders                           all messages, in id order, without a group
polybus fdq replay orders --from 1000 --to 2000 --json
polybus fdq replay orders --from @2026-01-31T12:00 --follow

`produce` reads its input in large pieces as it arrives. Each piece is one batch and is stored
completely or not at all; with --atomic this holds for the whole input. The command ends when
all batches are durable, and its summary says how many messages were stored.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated

import typer

from polybus.cli import row_format, start_position
from polybus.cli.bus_connection import Bus, check_reachable
from polybus.cli.flags import (
    Count,
    Delay,
    Format,
    JsonLines,
    Key,
    KeySeparator,
    Messages,
    Quiet,
    Raw,
    TimeToLive,
)
from polybus.cli.line_producer import LineProducer, MessageKeys, line_batches, send_input
from polybus.cli.sub_command import print_batches
from polybus.cli.terminal import print_raw
from polybus.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.consumer import Consumer
    from polybus.dialects.fdq.client.envelope import Envelope
    from polybus.dialects.fdq.client.producer import Producer
    from polybus.native import Produced

EXIT_CODES = """\b
Exit codes:
  0   done
  2   invalid argument, or a data folder that another process uses
  3   no bus answers, or the connection was lost
  4   the bus refused: no such topic, no permission, fenced by a client of the same name
  1   a bug in polybus, or the reader of the output has closed it
  130 Ctrl-C
"""
# A restarting bus is waited for this long; then the command ends.
PRODUCE_TIMEOUT_S = 60.0
UNLIMITED = 1 << 31
POLL_S = 0.2
TERMINATED = 128 + signal.SIGTERM


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    messages: Messages = None,
    key: Key = None,
    separator: KeySeparator = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="Add to every message; repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Take over from the producer of this name."),
    ] = None,
    atomic: Annotated[
        bool, typer.Option("--atomic", help="Store the whole input as one batch, or nothing.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create/--no-create", help="Create the topic if it is missing.")
    ] = True,
    delay: Delay = None,
    ttl: TimeToLive = None,
    quiet: Quiet = False,
    bus: Bus = None,
) -> None:
    from polybus.dialects.fdq.client.producer import Producer

    headers: dict[str, bytes] = {}
    for text in header or ():
        header_name, equals, value = text.partition("=")
        if not equals or not header_name:
            raise UsageError(f"--header must be NAME=VALUE, got {text!r}")
        headers[header_name] = os.fsencode(value)
    most = (UNLIMITED,) if atomic else ()
    lines = LineProducer(topic, MessageKeys(key, separator), *most, delay=delay, ttl=ttl)
    url, options = check_reachable(bus, produce_timeout_s=PRODUCE_TIMEOUT_S)
    try:
        with (
            Producer(url, name, create=create, options=options) as producer,
            lines.sending_to(_BatchProducer(producer, headers)),
        ):
            if atomic and not messages:
                lines.send([line for batch in line_batches() for line in batch])
            else:
                send_input(lines, messages, whole=False)
    finally:  # leaving the `with` has waited for every batch, so the summary is complete
        if lines.began_s is not None and not quiet:
            lines.print_summary(time.monotonic() - lines.began_s)


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    group: Annotated[str, typer.Option("--group", help="Consumer group to join.")] = "default",
    name: Annotated[
        str | None,
        typer.Option("--name", help="Unique in the group. [default: HOST-PID]"),
    ] = None,
    start: Annotated[
        str, typer.Option("--start", help="Where a new group starts: earliest or latest.")
    ] = "earliest",
    count: Count = 0,
    stop: Annotated[
        bool, typer.Option("-e", "--exit", help="Exit when the group has no lag.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Create the topic if it is missing.")
    ] = False,
    form: Format = None,
    as_json: JsonLines = False,
    raw: Raw = False,
    bus: Bus = None,
) -> None:
    print_raw(raw)
    formatter = row_format.choose_formatter(topic, form, as_objects=as_json)
    from polybus.dialects.fdq.client.consumer import Consumer

    # Exit by an exception on SIGTERM, so that the consumer leaves its group.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    url, options = check_reachable(bus)
    with Consumer(url, options=options) as consumer:
        printer = MessagePrinter(consumer, formatter, count)
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
            if stop and not _read_lag(url, topic, group):
                break
    if printer.error is not None:
        raise printer.error


def replay(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    start: Annotated[
        str,
        typer.Option("--from", metavar="POSITION", help=f"Start at: {start_position.FORMS}."),
    ] = start_position.EARLIEST,
    end: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="POSITION", help="Stop before this position (exclusive). [default: now]"
        ),
    ] = None,
    count: Count = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for new messages instead of ending.")
    ] = False,
    form: Format = None,
    as_json: JsonLines = False,
    raw: Raw = False,
    bus: Bus = None,
) -> None:
    print_raw(raw)
    formatter = row_format.choose_formatter(topic, form, as_objects=as_json)
    for position in (start, end):
        if position is not None:
            start_position.parse_start(position)
    from polybus.native import bus_client as buses

    url, options = check_reachable(bus, connect_timeout_s=math.inf)
    client = buses.connect(url, options)
    try:
        bounds = client.bounds(topic)
        first = start_position.find_id(client, topic, start, bounds)
        if end is not None:
            bounds["next_id"] = start_position.find_id(client, topic, end, bounds)
        last = None if follow and end is None else bounds["next_id"]
        wait_s = math.inf if follow else 0.0
        reader = client.read(topic, start=first, end=last, max_rows=count, wait_s=wait_s)
        print_batches(reader, formatter, first, bounds, count)
    finally:
        client.close()


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    commands = (
        ("produce", produce, "Produce lines of stdin, or arguments, by key."),
        ("consume", consume, "Print a group's messages, and ack them."),
        ("replay", replay, "Print messages of a topic between two positions."),
    )
    for verb, command, line in commands:
        group.command(verb, help=line, epilog=EXIT_CODES)(command)
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)


class _BatchProducer:
    """Produces lines as batches."""

    def __init__(self, producer: Producer, headers: dict[str, bytes]) -> None:
        self._producer = producer
        self._headers = headers or None

    def produce(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        *,
        delay_s: float | None = None,
        ttl_s: float | None = None,
    ) -> Future[Produced]:
        from polybus.dialects.fdq.client.envelope import MessageRequest

        requests = [
            MessageRequest(key, body, self._headers)
            for key, body in zip(keys or [None] * len(bodies), bodies, strict=True)
        ]
        return self._producer.produce_batch_nowait(topic, requests, delay_s=delay_s, ttl_s=ttl_s)


class MessagePrinter:
    """Handlers that print. A message that could not be printed fails and ends the command."""

    def __init__(self, consumer: Consumer, formatter: row_format.RowFormatter, count: int) -> None:
        self.error: OSError | None = None
        self._consumer = consumer
        self._formatter = formatter
        self._left = count

    def print_batch(self, batch: pa.RecordBatch) -> None:
        self._write(self._formatter(batch))

    def print_message(self, envelope: Envelope) -> None:
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
        self._write(self._formatter(pa.RecordBatch.from_pylist([row], schema=READ_SCHEMA)))
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


def _read_lag(url: str, topic: str, group: str) -> int:
    from polybus.native import bus_client as buses
    from polybus.native.protocol.requests import GroupGet

    client = buses.connect(url)
    try:
        shards = client.call(GroupGet(topic=topic, group=group))["shards"]
        return sum(shard["lag"] for shard in shards)
    finally:
        client.close()
