"""`polybus pub TOPIC`: lines of stdin, or arguments, into a durable topic.

polybus pub orders < orders.jsonl
polybus pub orders 'one message' 'another' --key customer-7
polybus pub images --whole < picture.png

The topic is made if it is not there. Input is read as it comes, in large pieces, and
each piece is sent as one batch: it is all there, or not at all. The command ends when
everything is on disk; what is refused ends it, and the summary says what was stored.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from polybus.cli.bus_connection import Bus, connect_waiting
from polybus.cli.flags import Key, KeySeparator, Messages, Quiet
from polybus.cli.line_producer import LineProducer, MessageKeys, send_input
from polybus.errors import UsageError

# A bus that restarts is waited for; one that stays away ends the command.
PATIENCE_S = 60.0


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(pub)


def pub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    messages: Messages = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="All of stdin is one message, not one a line.")
    ] = False,
    key: Key = None,
    separator: KeySeparator = None,
    producer: Annotated[
        str | None,
        typer.Option("--producer", metavar="NAME", help="Take over from whoever has this name."),
    ] = None,
    quiet: Quiet = False,
    bus: Bus = None,
) -> None:
    if messages and whole:
        raise UsageError("--whole is for stdin: leave out the messages, or --whole")
    sending = LineProducer(topic, MessageKeys(key, separator))
    try:
        with (
            connect_waiting(bus, produce_timeout_s=PATIENCE_S) as client,
            client.producer(producer) as sender,
            sending.sending_to(sender),
        ):
            send_input(sending, messages, whole)
    finally:  # everything has its outcome
        if sending.began_s is not None and not quiet:
            sending.print_summary(time.monotonic() - sending.began_s)
