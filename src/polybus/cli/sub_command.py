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
from polybus.cli.flags import Count, Format, JsonLines
from polybus.cli.progress_bar import show_progress

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
    bus: Bus = None,
) -> None:
    shape = row_format.choose_formatter(topic, form, as_objects=as_json)
    start_position.parse_start(start)
    with connect_waiting(bus, connect_timeout_s=math.inf) as client:
        first = start_position.first_id(client, topic, start)
        bounds = client.bounds(topic)
        end = bounds["next_id"] if stop else None
        reading = client.read(
            topic, start=first, end=end, max_rows=count, wait_s=0.0 if stop else math.inf
        )
        print_batches(reading, shape, first, bounds, count)


def print_batches(
    reading: CancellableReader,
    shape: row_format.RowFormatter,
    first: int,
    bounds: TopicBounds,
    count: int,
) -> None:
    """Print the messages to stdout and the progress to stderr."""
    size = sum(shard["bytes"] for shard in bounds["shards"])
    with _progress(size, _estimate(first, bounds, count)) as show:
        _copy(reading, shape, show)


def _estimate(first: int, bounds: TopicBounds, count: int) -> tuple[int, int]:
    """Return the expected number of messages, and the number that the topic has."""
    existing = bounds["next_id"] - bounds["first_id"]
    expected = max(0, bounds["next_id"] - max(first, bounds["first_id"]))
    return min(count or expected, expected), existing


@contextmanager
def _progress(size: int, wanted: tuple[int, int]) -> Iterator[Callable[[int], None]]:
    """Show a progress bar unless stdout is a terminal. Bytes are estimated by the average size."""
    expected, existing = wanted
    if not expected or sys.stdout.isatty() or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    with show_progress("reading") as show:
        total = size * expected // max(existing, 1)
        yield lambda done: show(total * min(done, expected) // expected, total)


def _copy(
    reading: CancellableReader, shape: row_format.RowFormatter, show: Callable[[int], None]
) -> None:
    from polybus.cli.read_ahead import ReadAhead

    done = 0
    with ReadAhead(reading) as batches:
        for batch in batches:
            _write(shape(batch))
            done += batch.num_rows
            show(done)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
