"""Start positions on the command line: earliest, latest, an id, or @TIME."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.model.start_point import EARLIEST, FORMS, LATEST, parse_start, parse_time_ns

if TYPE_CHECKING:
    from polybus.native import Client

__all__ = ["EARLIEST", "FORMS", "LATEST", "first_id", "parse_start", "parse_time_ns"]


def first_id(client: Client, topic: str, text: str) -> int:
    """Return the id of the first message to read."""
    place = parse_start(text)
    if isinstance(place, int):
        return place
    if place.startswith("@"):
        return client.find(topic, parse_time_ns(text))
    bounds = client.bounds(topic)
    return int(bounds["first_id"] if place == EARLIEST else bounds["next_id"])
