"""`polybus sub TOPIC`: a durable topic on stdout, from any place on, and what comes next.

polybus sub orders                       from now on
polybus sub orders -o earliest -e        all there is
polybus sub orders -o @2026-01-31T12:00 -n 100 -f '%i %k %s\\n'
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import row_format, start_position
from polybus.cli.bus_connection import Bus, connect_waiting
from polybus.cli.flags import Count, Format, JsonLines
from polybus.cli.progress_bar import show_progress

if TYPE_CHECKING:
    from polybus.cli.read_ahead import CancellableReader

START = f"Where to begin: {start_position.FORMS}."


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(sub)


def sub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    start: Annotated[str, typer.Option("-o", "--offset", metavar="PLACE", help=START)] = "latest",
    count: Count = 0,
    stop: Annotated[
        bool, typer.Option("-e", "--exit", help="End with the last that is there now.")
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
    bounds: dict[str, Any],
    count: int,
) -> None:
    """All that is read goes to stdout; how far it has come, to stderr."""
    size = sum(shard["bytes"] for shard in bounds["shards"])
    with _progress(size, _wanted(first, bounds, count)) as tell:
        _copy(reading, shape, tell)


def _wanted(first: int, bounds: dict[str, Any], count: int) -> tuple[int, int]:
    """How many messages will come, as far as one knows, and how many there are."""
    there = bounds["next_id"] - bounds["first_id"]
    coming = max(0, bounds["next_id"] - max(first, bounds["first_id"]))
    return min(count or coming, coming), there


@contextmanager
def _progress(size: int, wanted: tuple[int, int]) -> Iterator[Callable[[int], None]]:
    """A bar where nobody sees the messages themselves. Bytes are by their average."""
    coming, there = wanted
    if not coming or sys.stdout.isatty() or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    with show_progress("reading") as show:
        total = size * coming // max(there, 1)
        yield lambda done: show(total * min(done, coming) // coming, total)


def _copy(
    reading: CancellableReader, shape: row_format.RowFormatter, tell: Callable[[int], None]
) -> None:
    from polybus.cli.read_ahead import ReadAhead

    done = 0
    with ReadAhead(reading) as batches:
        for batch in batches:
            _write(shape(batch))
            done += batch.num_rows
            tell(done)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
