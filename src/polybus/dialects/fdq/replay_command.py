"""`polybus fdq replay TOPIC`: all shards in the order of their ids, without any group.

polybus fdq replay orders                                    all there is
polybus fdq replay orders --from 1000 --to 2000 --json
polybus fdq replay orders --from @2026-01-31T12:00 --follow
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import row_format, start_position
from polybus.cli.bus_connection import Bus, check_reachable
from polybus.cli.flags import Count, Format, JsonLines
from polybus.cli.sub_command import print_batches

if TYPE_CHECKING:
    from polybus.native import bus_client as buses


def replay(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    start: Annotated[
        str,
        typer.Option("--from", metavar="PLACE", help=f"Where to begin: {start_position.FORMS}."),
    ] = start_position.EARLIEST,
    end: Annotated[
        str | None,
        typer.Option("--to", metavar="PLACE", help="The first that is left out. [default: now]"),
    ] = None,
    count: Count = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes, instead of ending.")
    ] = False,
    form: Format = None,
    as_json: JsonLines = False,
    bus: Bus = None,
) -> None:
    shape = row_format.choose_formatter(topic, form, as_objects=as_json)
    for place in (start, end):
        if place is not None:
            start_position.parse_start(place)
    from polybus.native import bus_client as buses

    url, options = check_reachable(bus, connect_timeout_s=math.inf)
    reached = buses.connect(url, options)
    try:
        bounds = reached.act("bounds", topic=topic)
        first = _id(reached, topic, start, bounds)
        last = bounds["next_id"] if end is None else _id(reached, topic, end, bounds)
        if follow and end is None:
            last = None
        wait_s = math.inf if follow else 0.0
        reading = reached.read(topic, start=first, end=last, max_rows=count, wait_s=wait_s)
        print_batches(
            reading, shape, first, {**bounds, "next_id": last or bounds["next_id"]}, count
        )
    finally:
        reached.close()


def _id(bus: buses.BusClient, topic: str, text: str, bounds: dict[str, Any]) -> int:
    place = start_position.parse_start(text)
    if isinstance(place, int):
        return place
    if place.startswith("@"):
        found = bus.act("find", topic=topic, timestamp_ns=start_position.parse_time_ns(text))
        return int(found["position"])
    return int(bounds["first_id"] if place == start_position.EARLIEST else bounds["next_id"])
