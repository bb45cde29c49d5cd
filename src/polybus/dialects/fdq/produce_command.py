"""`polybus fdq produce TOPIC`: lines of stdin, or arguments, with keys and headers.

polybus fdq produce orders --key-sep : < orders.txt
polybus fdq produce orders 'a message' --key customer-7 --header source=shell
polybus fdq produce orders --atomic --name importer < orders.jsonl

Input is read as it comes, in large pieces, and each piece is one batch: it is all there,
or not at all. With --atomic that holds for all of the input. The command ends when
everything is on disk; the summary says what was stored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated

import typer

from polybus.cli.bus_connection import Bus, check_reachable
from polybus.cli.flags import Key, KeySeparator, Messages, Quiet
from polybus.cli.line_producer import LineProducer, MessageKeys, line_batches, send_input
from polybus.errors import UsageError

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.producer import Producer
    from polybus.native import Produced

# A bus that restarts is waited for; one that stays away ends the command.
PATIENCE_S = 60.0
MANY = 1 << 31


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    messages: Messages = None,
    key: Key = None,
    separator: KeySeparator = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="Of all of them; repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Take over from the producer of this name."),
    ] = None,
    atomic: Annotated[
        bool, typer.Option("--atomic", help="All of the input is one batch: all or none.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create/--no-create", help="Make the topic if it is missing.")
    ] = True,
    quiet: Quiet = False,
    bus: Bus = None,
) -> None:
    from polybus.dialects.fdq.client.producer import Producer

    headers = _headers(header or ())
    sending = LineProducer(topic, MessageKeys(key, separator), *((MANY,) if atomic else ()))
    url, options = check_reachable(bus, produce_timeout_s=PATIENCE_S)
    try:
        with (
            Producer(url, name, create=create, options=options) as producer,
            sending.sending_to(_BatchProducer(producer, headers)),
        ):
            if atomic and not messages:
                lines = [line for batch in line_batches() for line in batch]
                sending.send(lines)
            else:
                send_input(sending, messages, whole=False)
    finally:  # everything has its outcome
        if sending.began_s is not None and not quiet:
            sending.print_summary(time.monotonic() - sending.began_s)


class _BatchProducer:
    """Lines as batches of a producer."""

    def __init__(self, producer: Producer, headers: dict[str, bytes]) -> None:
        self._producer = producer
        self._headers = headers or None

    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> Future[Produced]:
        from polybus.dialects.fdq.client.envelope import MessageRequest

        given = keys or [None] * len(bodies)
        requests = [
            MessageRequest(key, body, self._headers)
            for key, body in zip(given, bodies, strict=True)
        ]
        return self._producer.produce_batch(topic, requests, wait=False)


def _headers(given: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--header {text!r}: write NAME=VALUE")
        found[name] = os.fsencode(value)
    return found
