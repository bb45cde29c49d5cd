"""`polybus sub TOPIC`: print messages of a durable topic, from any position, and follow it.

polybus sub orders                       new messages only
polybus sub orders -o earliest -e        all existing messages
polybus sub orders -o @2026-01-31T12:00 -n 100 -f '%i %k %s\\n'
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from polybus.cli import row_format, start_position
from polybus.cli.bus_connection import Bus, connect_waiting
from polybus.cli.flags import Count, Format, JsonLines, Raw
from polybus.cli.progress_bar import show_progress
from polybus.cli.terminal import print_raw

if TYPE_CHECKING:
    from polybus.cli.read_ahead import CancellableReader
    from polybus.native.protocol.answers import TopicBounds

START = f"Start position: {start_position.FORMS}."


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(sub)


def sub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    start: Annotated[str, typer.Option("-o", "--offset", metavar="PLACE", help=START)] = "latest",
    count: Count = 0,
    stop: Annotated[
        bool, typer.Option("-e", "--exit", help="Exit after the last message that exists now.")
    ] = False,
    form: Format = None,
    as_json: JsonLines = False,
    raw: Raw = False,
    bus: Bus = None,
) -> None:
    print_raw(raw)
    format_batch = row_format.choose_formatter(topic, form, as_objects=as_json)
    start_position.parse_start(start)
    with connect_waiting(bus, connect_timeout_s=math.inf) as client:
        bounds = client.bounds(topic)
        first = start_position.find_id(client, topic, start, bounds)
        end = bounds["next_id"] if stop else None
        reading = client.read(
            topic, start=first, end=end, max_rows=count, wait_s=0.0 if stop else math.inf
        )
        print_batches(reading, format_batch, first, bounds, count)


def print_batches(
    reading: CancellableReader,
    format_batch: row_format.RowFormatter,
    first: int,
    bounds: TopicBounds,
    count: int,
) -> None:
    """Print the messages to stdout and the progress to stderr."""
    from polybus.cli.read_ahead import ReadAhead

    done = 0
    with _progress(first, bounds, count) as show, ReadAhead(reading) as batches:
        for batch in batches:
            sys.stdout.buffer.write(format_batch(batch))
            sys.stdout.buffer.flush()
            done += batch.num_rows
            show(done)


@contextmanager
def _progress(first: int, bounds: TopicBounds, count: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar unless stdout is a terminal. Bytes are estimated by the average size."""
    expected = max(0, bounds["next_id"] - max(first, bounds["first_id"]))
    expected = min(count or expected, expected)
    if not expected or sys.stdout.isatty() or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    existing = max(1, bounds["next_id"] - bounds["first_id"])
    total = sum(shard["bytes"] for shard in bounds["shards"]) * expected // existing
    with show_progress("reading") as show:
        yield lambda done: show(total * min(done, expected) // expected, total)
