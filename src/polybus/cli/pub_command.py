"""`polybus pub TOPIC`: publish lines of stdin, or arguments, to a durable topic.

polybus pub orders < orders.jsonl
polybus pub orders 'one message' 'another' --key customer-7
polybus pub images --whole < picture.png

The bus creates the topic if it does not exist. Input is read in large pieces; each piece is
sent as one batch and stored completely or not at all. The command exits when everything is
on disk, or at the first refused batch; the summary shows the stored messages.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from polybus.cli.bus_connection import Bus, connect_waiting
from polybus.cli.flags import Delay, Key, KeySeparator, Messages, Quiet, TimeToLive
from polybus.cli.line_producer import LineProducer, MessageKeys, send_input
from polybus.errors import UsageError

# How long to wait for a bus that restarts.
RECONNECT_TIMEOUT_S = 60.0


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(pub)


def pub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    messages: Messages = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Publish all of stdin as one message.")
    ] = False,
    key: Key = None,
    separator: KeySeparator = None,
    producer: Annotated[
        str | None,
        typer.Option(
            "--producer", metavar="NAME", help="Open this producer, which fences its current owner."
        ),
    ] = None,
    delay: Delay = None,
    ttl: TimeToLive = None,
    quiet: Quiet = False,
    bus: Bus = None,
) -> None:
    if messages and whole:
        raise UsageError("--whole reads stdin; remove the MESSAGE arguments, or --whole")
    sending = LineProducer(topic, MessageKeys(key, separator), delay=delay, ttl=ttl)
    try:
        with (
            connect_waiting(bus, produce_timeout_s=RECONNECT_TIMEOUT_S) as client,
            client.producer(producer) as sender,
            sending.sending_to(sender),
        ):
            send_input(sending, messages, whole)
    finally:  # every batch has its result here
        if sending.began_s is not None and not quiet:
            sending.print_summary(time.monotonic() - sending.began_s)
